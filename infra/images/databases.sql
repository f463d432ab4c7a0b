-- Run once, by the database's first start: in a container by PostgreSQL's image, from packages by infra/package_stack.py.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
CREATE DATABASE mlflow_auth;
