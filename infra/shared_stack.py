"""The services a team shares: Prefect and MLflow on PostgreSQL, behind passwords, and an S3-compatible store.

What each is started with is said here once. `infra/compose.yaml` starts them in containers, whose command is
`python -m infra.shared_stack SERVICE`; `infra.package_stack` starts the same from packages, where there is no container
engine. Only addresses and folders differ: the `Site`.

There are no default passwords: `keys` draws each at the first start and keeps it in a file of its own, mode 0600.
"""

import argparse
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from hidden_states.errors import ServerError
from infra.object_store import store_command

USER = "eyas"
BUCKET = "eyas"
KEYS = ("database", "prefect", "mlflow", "mlflow-session", "store-access", "store-secret")
_QUIET = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


@dataclass(frozen=True)
class Site:
    """Where the services are.

    Attributes:
        keys: folder of the drawn passwords.
        data: folder for what the services keep on disk (PostgreSQL's own folder is not in it).
        listen: address they bind; in a container all of its own, which compose publishes on loopback only.
        database, prefect, mlflow, store: `host:port` each, as the others reach it.
        prefect_page: `host:port` at which a browser reaches Prefect.
    """

    keys: Path
    data: Path
    listen: str
    database: str
    prefect: str
    mlflow: str
    store: str
    prefect_page: str

    @classmethod
    def of_container(cls) -> "Site":
        """In the compose stack: names and ports of `infra/compose.yaml`."""
        page = os.environ.get("EYAS_PREFECT_PAGE", "127.0.0.1:4200")
        return cls(
            Path("/keys"), Path("/data"), "0.0.0.0", "database:5432", "prefect:4200", "mlflow:5000", "store:8333", page
        )


def keys(folder: Path) -> dict[str, str]:
    """The passwords by name, drawn where there is none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in KEYS:
        path = folder / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found[name] = path.read_text()
            continue
        found[name] = secrets.token_hex(10).upper() if name == "store-access" else secrets.token_urlsafe(30)
        with open(descriptor, "w") as file:
            file.write(found[name])
    return found


def command(service: str, site: Site) -> tuple[list[str], dict[str, str]]:
    """How a service is started: its command line, which holds no password, and its environment.

    Args:
        service: `prefect`, `mlflow` or `store`.
    """
    return {"prefect": _prefect, "mlflow": _mlflow, "store": _store}[service](site, keys(site.keys))


def client_environment(site: Site) -> dict[str, str]:
    """What a run needs to use the stack: addresses and passwords, through the environment and nowhere else."""
    drawn = keys(site.keys)
    return {
        "PREFECT_API_URL": f"http://{site.prefect}/api",
        "PREFECT_API_AUTH_STRING": f"{USER}:{drawn['prefect']}",
        "MLFLOW_TRACKING_URI": f"http://{site.mlflow}",
        "MLFLOW_TRACKING_USERNAME": USER,
        "MLFLOW_TRACKING_PASSWORD": drawn["mlflow"],
        "AWS_ENDPOINT_URL": f"http://{site.store}",
        "AWS_REGION": "us-east-1",
        **_store_keys(drawn),
    }


def _prefect(site: Site, drawn: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    home = site.data / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    env = {
        **_QUIET,
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": _database("postgresql+asyncpg", site, drawn, "prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{drawn['prefect']}",
        "PREFECT_SERVER_UI_API_URL": f"http://{site.prefect_page}/api",
        # In memory, a restart would forget who holds the GPUs, and nobody would ever give them back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    port = site.prefect.rpartition(":")[2]
    return [sys.executable, "-m", "prefect", "server", "start", "--host", site.listen, "--port", port], env


def _mlflow(site: Site, drawn: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    home = site.data / "mlflow"
    home.mkdir(parents=True, exist_ok=True)
    config = home / "basic_auth.ini"
    with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        uri = _database("postgresql+psycopg2", site, drawn, "mlflow_auth").replace("%", "%%")
        file.write(
            "[mlflow]\ndefault_permission = READ\n"
            f"database_uri = {uri}\nadmin_username = {USER}\nadmin_password = {drawn['mlflow']}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
    env = {
        **_QUIET,
        "MLFLOW_BACKEND_STORE_URI": _database("postgresql+psycopg2", site, drawn, "mlflow"),
        "MLFLOW_ARTIFACTS_DESTINATION": f"s3://{BUCKET}/mlflow",
        "MLFLOW_S3_ENDPOINT_URL": f"http://{site.store}",
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": drawn["mlflow-session"],
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "AWS_REGION": "us-east-1",
        **_store_keys(drawn),
    }
    host, _, port = site.mlflow.rpartition(":")
    allowed = ",".join(f"{name}:*" for name in sorted({host, "127.0.0.1", "localhost"}))
    line = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--host", site.listen, "--port", port]
    return [*line, "--workers", "1", "--allowed-hosts", allowed], env


def _store(site: Site, drawn: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    host, _, port = site.store.rpartition(":")
    data = site.data / "store"
    data.mkdir(parents=True, exist_ok=True)
    name = host if site.listen == "0.0.0.0" else site.listen
    return store_command(data, BUCKET, int(port), name=name, listen=site.listen), {
        **_store_keys(drawn),
        "GOMEMLIMIT": "1GiB",
    }


def _store_keys(drawn: Mapping[str, str]) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": drawn["store-access"], "AWS_SECRET_ACCESS_KEY": drawn["store-secret"]}


def _database(driver: str, site: Site, drawn: Mapping[str, str], name: str) -> str:
    return f"{driver}://{USER}:{quote(drawn['database'], safe='')}@{site.database}/{name}"


def main() -> None:
    """What a container of the stack runs: one service, in this process' place."""
    parser = argparse.ArgumentParser(description="Start one service of the shared stack inside its container.")
    parser.add_argument("service", choices=["keys", "prefect", "mlflow", "store", "client"])
    parser.add_argument("command", nargs="*", help="client: what to run with the stack's addresses and passwords")
    options = parser.parse_args()
    site = Site.of_container()
    if options.service == "keys":
        keys(site.keys)
        return
    line, env = (
        (options.command, client_environment(site)) if options.service == "client" else command(options.service, site)
    )
    if not line:
        raise ServerError("infra.shared_stack", "nothing to run", "a command after `client`", "Name it.")
    os.execvpe(line[0], line, {**os.environ, **env})


if __name__ == "__main__":
    main()
