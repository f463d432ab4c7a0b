"""The shared stack from packages, for a machine without a container engine: `infra/compose.yaml`'s services, the same
versions, on loopback, for as long as one command runs.

    python -m infra.package_stack -- COMMAND ...     with the stack's addresses and passwords in its environment

PostgreSQL comes from the system's packages (Debian: `postgresql`), the rest from this Python environment. Data and
passwords lie in a fresh folder that is removed at the end.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hidden_states.errors import ServerError
from infra.object_store import GRPC_OFFSET, ensure_bucket_with
from infra.ports import free_ports
from infra.process import OwnedProcess
from infra.service import Service, unready_http, wait_ready
from infra.shared_stack import BUCKET, USER, Site, client_environment, command, keys

DATABASES = Path(__file__).parent / "images" / "databases.sql"
NOBODY = "postgres"  # PostgreSQL does not run as root; the Debian package brings this user


def postgres_programs() -> Path | None:
    """The folder of PostgreSQL's own programs, or None where it is not installed."""
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
    return versions[-1].parent if versions else None


@contextlib.contextmanager
def package_stack(pages: Sequence[str] = ("prefect", "mlflow")) -> Iterator[dict[str, str]]:
    """Start everything, yield the environment for its clients, end everything.

    Args:
        pages: which of Prefect and MLflow.

    Raises:
        ServerError: PostgreSQL is not installed, or a service did not start.
    """
    programs = postgres_programs()
    if programs is None:
        raise ServerError("PostgreSQL", "not installed", None, "Install it: apt-get install postgresql.")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eyas-stack-", dir="/tmp")))
        folder.chmod(0o711)  # PostgreSQL's own user must get to its folder, and sees nothing beside it
        port = free_ports(3)
        store = free_ports(5, also_at=GRPC_OFFSET)
        site = Site(
            folder / "keys", folder / "data", "127.0.0.1", f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}",
            f"127.0.0.1:{port + 2}", f"127.0.0.1:{store}", f"127.0.0.1:{port + 1}",
        )  # fmt: skip
        drawn = keys(site.keys)
        for path in (site.keys, site.data):
            path.mkdir(exist_ok=True)
            path.chmod(0o700)
        services = [_database(programs, folder / "database", site, drawn["database"]), _store(site, drawn)]
        for service in services:
            stack.enter_context(_running(service, folder))
        _make_databases(programs, site, drawn["database"])
        for name, address, ready in (("prefect", site.prefect, "/api/ready"), ("mlflow", site.mlflow, "/health")):
            if name not in pages:
                continue
            stack.enter_context(_running(_web(name, site, address, ready), folder))
        yield client_environment(site)


@contextlib.contextmanager
def _running(service: Service, folder: Path) -> Iterator[None]:
    log, pid_file = folder / f"{service.name}.log", folder / f"{service.name}.pid.json"
    with OwnedProcess(service.command, log_path=log, pid_file=pid_file, env=service.env, name=service.name) as process:
        wait_ready(service, process)
        yield


def _as_postgres() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--init-groups"]


def _database(programs: Path, folder: Path, site: Site, password: str) -> Service:
    """PostgreSQL with an empty cluster; passwords are checked by SCRAM, also on loopback."""
    folder.mkdir(mode=0o700)
    drawn = folder / "password"
    drawn.write_text(password)
    if os.geteuid() == 0:
        for path in (folder, drawn):
            shutil.chown(path, NOBODY, NOBODY)
    data, port = folder / "cluster", site.database.rpartition(":")[2]
    made = subprocess.run(
        [*_as_postgres(), programs / "initdb", "-D", data, "-U", USER, "--auth=scram-sha-256", f"--pwfile={drawn}",
         "--encoding=UTF8", "--no-locale"],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    drawn.unlink()
    if made.returncode:
        raise ServerError("PostgreSQL", f"initdb failed: {made.stderr.strip()[-500:]}", None, "See above.")
    line = [*_as_postgres(), str(programs / "postgres"), "-D", str(data), "-p", port, "-k", "",
            "-c", "listen_addresses=127.0.0.1"]  # fmt: skip
    asked = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", port]

    def unready() -> str | None:
        return "no answer" if subprocess.run(asked, check=False).returncode else None

    return Service("database", line, {}, f"postgresql://{site.database}", unready, deadline_s=60.0)


def _make_databases(programs: Path, site: Site, password: str) -> None:
    port = site.database.rpartition(":")[2]
    line = [str(programs / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", port, "-U", USER,
            "-d", "postgres", "-f", str(DATABASES)]  # fmt: skip
    made = subprocess.run(line, env={**os.environ, "PGPASSWORD": password}, capture_output=True, text=True, check=False)
    if made.returncode:
        raise ServerError("PostgreSQL", f"the databases were not made: {made.stderr.strip()}", None, "See above.")


def _store(site: Site, drawn: dict[str, str]) -> Service:
    line, env = command("store", site)
    url = f"http://{site.store}"

    def unready() -> str | None:
        return ensure_bucket_with(url, drawn["store-access"], drawn["store-secret"], BUCKET)

    return Service("store", line, env, url, unready, deadline_s=60.0)


def _web(name: str, site: Site, address: str, ready: str) -> Service:
    line, env = command(name, site)
    ours_only = {"PREFECT_API_URL": None, "PREFECT_API_KEY": None, "MLFLOW_TRACKING_URI": None}
    url = f"http://{address}"
    return Service(name, line, {**ours_only, **env}, url, lambda: unready_http(f"{url}{ready}"), deadline_s=180.0)


def main() -> int:
    """Start the stack, run a command in its environment, end the stack; the command's exit code."""
    parser = argparse.ArgumentParser(description="Run a command with the shared stack from packages around it.")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    options = parser.parse_args()
    with package_stack() as env:
        print(f"on PostgreSQL: Prefect {env['PREFECT_API_URL']}, MLflow {env['MLFLOW_TRACKING_URI']}", flush=True)
        return subprocess.run(options.command, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
