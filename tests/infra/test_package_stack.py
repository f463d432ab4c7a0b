"""The team's stack, from packages: PostgreSQL behind Prefect and MLflow, a password on everything."""

import os
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from infra.package_stack import package_stack, postgres_programs
from infra.shared_stack import KEYS, Site, client_environment, command, keys

DRIVER = {"prefect": "postgresql+asyncpg://", "mlflow": "postgresql+psycopg2://"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    where = [f"127.0.0.1:{port}" for port in (5432, 4200, 5000, 8333)]
    return Site(tmp_path / "keys", tmp_path / "data", "127.0.0.1", *where, where[1])


def test_every_password_is_drawn_at_the_first_start_kept_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    one, other = keys(tmp_path / "one"), keys(tmp_path / "other")
    assert one == keys(tmp_path / "one")
    assert set(one) == set(KEYS) and not set(one.values()) & set(other.values())
    assert min(map(len, one.values())) >= 20
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "one").iterdir()} == {0o600}


@pytest.mark.parametrize("service", ["prefect", "mlflow", "store"])
def test_a_service_is_told_its_passwords_by_its_environment_never_by_its_command_line(site: Site, service: str) -> None:
    line, env = command(service, site)
    drawn = keys(site.keys).values()
    assert not [word for word in line if any(secret in word for secret in drawn)]
    assert any(secret in value for value in env.values() for secret in drawn)
    if service in DRIVER:
        assert any(value.startswith(DRIVER[service]) for value in env.values())


@pytest.mark.slow
@pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL is not installed")
def test_prefect_and_mlflow_run_on_postgresql_and_answer_nobody_without_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(psutil.Process().children(recursive=True))
    with package_stack() as env:
        started = set(psutil.Process().children(recursive=True)) - before
        postgres = [process for process in started if process.name() == "postgres"]
        assert postgres
        assert "root" not in {process.username() for process in postgres}
        drawn = {env[name] for name in ("MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY")}
        drawn.add(env["PREFECT_API_AUTH_STRING"].partition(":")[2])
        for process in started:
            assert not [word for word in cmdline(process) for secret in drawn if secret in word]
        prefect = f"{env['PREFECT_API_URL']}/admin/version"
        mlflow = f"{env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/search?max_results=1"
        user, _, password = env["PREFECT_API_AUTH_STRING"].partition(":")
        assert (httpx.get(prefect).status_code, httpx.get(mlflow).status_code) == (401, 401)
        assert httpx.get(prefect, auth=(user, password)).status_code == 200
        assert httpx.get(mlflow, auth=(user, env["MLFLOW_TRACKING_PASSWORD"])).status_code == 200
        assert httpx.get(mlflow, auth=(user, "password")).status_code == 401
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        artifact_of_a_run()
    assert not [process for process in started if process.is_running() and process.status() != "zombie"]


def artifact_of_a_run() -> None:
    """MLflow keeps artifacts in the stack's own store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    run = client.create_run(client.create_experiment("stack"))
    client.log_text(run.info.run_id, "hello", "a.txt")
    assert [found.path for found in client.list_artifacts(run.info.run_id)] == ["a.txt"]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_clients_are_led_to_the_stack_with_its_passwords(site: Site) -> None:
    env = client_environment(site)
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert {"PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"} <= env.keys()
