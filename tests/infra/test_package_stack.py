"""What the shared stack is started with; tests/flows/test_given_services.py starts it."""

import stat
from pathlib import Path

import pytest

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


def test_clients_are_led_to_the_stack_with_its_passwords(site: Site) -> None:
    env = client_environment(site)
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert {"PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"} <= env.keys()
