"""The local stack: object store, Prefect and MLflow on the loopback address, for one machine and one user.

    eyas up      LocalStack(state).up()     all three, until `eyas down`; runs find them by themselves
    eyas run     embedded_store(...)        what a run needs and nobody has started, as long as the run
                 embedded_prefect(...)

All that is kept lies under the state folder; nothing is sent anywhere, nothing listens to other machines.

    <state>/stack.json            what `up` has started, where, on which ports
            object-store/         data/, credentials.json (0600)
            prefect/, mlflow/     SQLite each; MLflow's artifacts
            services/<name>.log, <name>.pid.json
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hidden_states.errors import ServerError
from infra.detached import DetachedProcess
from infra.lifeline import start_time
from infra.object_store import credentials, ensure_bucket, object_store
from infra.ports import free_ports
from infra.process import OwnedProcess, read_record, running
from infra.service import Service, unready_http, wait_ready

STORE, PREFECT, MLFLOW = "object-store", "prefect", "mlflow"
DEFAULT_BUCKET = "eyas"
_QUIET = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
# What of the caller's environment would lead a server of ours to somebody else's.
_OURS_ONLY = {"PREFECT_API_URL": None, "PREFECT_API_KEY": None, "MLFLOW_TRACKING_URI": None}


def prefect_server(state_dir: Path) -> Service:
    """Prefect's server with its page, on SQLite in the state folder."""
    home = state_dir / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    port = free_ports(1)
    env = {
        **_QUIET,
        **_OURS_ONLY,
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",  # else the pages ask port 4200, and show nothing
        # In memory, a restart would forget who holds the GPUs, and nobody would ever give them back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}/api"
    return Service("Prefect server", command, env, url, lambda: unready_http(f"{url}/ready"), deadline_s=120.0)


def mlflow_server(state_dir: Path) -> Service:
    """MLflow's tracking server on the SQLite file that runs without it write to as well."""
    home = state_dir / "mlflow"
    (home / "artifacts").mkdir(parents=True, exist_ok=True)
    port = free_ports(1)
    # Without job execution: 2 processes and 0.5 GB instead of 10 and 1.6 GB.
    env = {**_QUIET, **_OURS_ONLY, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}", "--artifacts-destination", str(home / "artifacts"),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    return Service("MLflow server", command, env, url, lambda: unready_http(f"{url}/health"), deadline_s=120.0)


class LocalStack:
    """The three services of one state folder, as `eyas up` starts and `eyas down` ends them."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = Path(state_dir).resolve()
        self.file = self.state_dir / "stack.json"

    def up(self) -> dict[str, Any]:
        """Starts what does not run yet and returns when all three are ready: `status()`.

        Raises:
            ServerError: one did not start, with its last words; or a run is using the state folder. What this call has
                started is ended again.
        """
        known, started = self._known(), {}
        wanted = {
            STORE: lambda: object_store(self.state_dir / STORE, DEFAULT_BUCKET),
            PREFECT: lambda: prefect_server(self.state_dir),
            MLFLOW: lambda: mlflow_server(self.state_dir),
        }
        try:
            for name, make in wanted.items():
                process = self._process(name)
                if name in known and process.alive():
                    continue
                _refuse_shared(self.state_dir, name)
                service = make()
                process.start(service.command, service.env)
                started[name] = service
            for name, service in started.items():
                wait_ready(service, self._process(name))
        except BaseException:
            for name in started:
                self._process(name).stop()
            raise
        urls = {name: started[name].url if name in started else known[name] for name in wanted}
        self.file.write_text(json.dumps({"urls": urls}, indent=1))
        return self.status()

    def down(self) -> list[str]:
        """Ends what `up` has started, and what killed runs have left; returns the names of what was running.

        Raises:
            ServerError: something does not end.
        """
        mine = [name for name in (MLFLOW, PREFECT, STORE) if _living_owner(self.state_dir, name) is None]
        ended = [name for name in mine if self._process(name).stop()]
        self.file.unlink(missing_ok=True)
        return ended

    def status(self) -> dict[str, Any]:
        """By service: whether it runs, its URL, pid and log. `credentials`: the file with the object store's."""
        urls = self._known()
        services = {}
        for name in (STORE, PREFECT, MLFLOW):
            process = self._process(name)
            pid = process.pid() if name in urls else None
            url = urls.get(name) if pid is not None else None
            services[name] = {"running": pid is not None, "url": url, "pid": pid, "log": str(process.log_path)}
        return {"services": services, "credentials": str(self.state_dir / STORE / "credentials.json")}

    def url(self, name: str) -> str | None:
        """Where a service of the stack is, if it runs."""
        url = self._known().get(name)
        return url if url is not None and self._process(name).alive() else None

    def environment(self) -> dict[str, str]:
        """Variables that lead a run to what of the stack runs; the object store's credentials are among them."""
        found = {"PREFECT_API_URL": self.url(PREFECT), "MLFLOW_TRACKING_URI": self.url(MLFLOW)}
        store = self.url(STORE)
        if store is not None:
            found |= {"AWS_ENDPOINT_URL": store, **_store_variables(self.state_dir)}
        return {name: value for name, value in found.items() if value is not None}

    def _known(self) -> dict[str, str]:
        try:
            urls = json.loads(self.file.read_text())["urls"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}
        return {name: url for name, url in urls.items() if isinstance(url, str)} if isinstance(urls, dict) else {}

    def _process(self, name: str) -> DetachedProcess:
        log, pid_file = _files(self.state_dir, name)
        return DetachedProcess(log_path=log, pid_file=pid_file, name=name)


@contextlib.contextmanager
def embedded_store(state_dir: Path, bucket: str = DEFAULT_BUCKET) -> Iterator[str]:
    """The URL of an object store with `bucket` in it: the stack's if that is up, else one that ends with the block.

    Within the block the environment holds its credentials, for boto3's usual chain.

    Raises:
        ServerError: it did not start, or another run uses the same state folder.
    """
    state_dir = Path(state_dir).resolve()
    folder = state_dir / STORE
    url = LocalStack(state_dir).url(STORE)
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(_embedded(state_dir, STORE, object_store(folder, bucket)))
        ensure_bucket(url, folder, bucket)
        stack.enter_context(_environment(_store_variables(state_dir)))
        yield url


@contextlib.contextmanager
def embedded_prefect(state_dir: Path) -> Iterator[str]:
    """The API URL of a Prefect server: the stack's if that is up, else of one that ends with the block.

    Raises:
        ServerError: it did not start, or another run uses the same state folder.
    """
    state_dir = Path(state_dir).resolve()
    url = LocalStack(state_dir).url(PREFECT)
    if url is not None:
        yield url
        return
    with _embedded(state_dir, PREFECT, prefect_server(state_dir)) as url:
        yield url


@contextlib.contextmanager
def _embedded(state_dir: Path, name: str, service: Service) -> Iterator[str]:
    _refuse_shared(state_dir, name)
    log, pid_file = _files(state_dir, name)
    with OwnedProcess(service.command, log_path=log, pid_file=pid_file, env=service.env, name=service.name) as process:
        wait_ready(service, process)
        yield service.url


def _living_owner(state_dir: Path, name: str) -> int | None:
    """The process whose end will end an embedded service of this folder; None for the stack's and for none at all."""
    _, pid_file = _files(state_dir, name)
    record = read_record(pid_file)
    if record is None or not running(pid_file):
        return None
    owner: dict[str, int] = record["owner"]
    same = owner["start_time"] is not None and start_time(owner["pid"]) == owner["start_time"]
    return owner["pid"] if same and owner["pid"] != os.getpid() else None


def _refuse_shared(state_dir: Path, name: str) -> None:
    """Two servers on one folder destroy its data: an embedded one of a run that lives keeps everybody else out."""
    owner = _living_owner(state_dir, name)
    if owner is not None:
        found = f"another run (process {owner}) has started its own {name} there"
        do = "Wait for it to end; or `eyas up` first, then any number of runs share the services."
        raise ServerError(str(state_dir), found, None, do)


def _files(state_dir: Path, name: str) -> tuple[Path, Path]:
    """Log and pid file of a service."""
    folder = state_dir / "services"
    return folder / f"{name}.log", folder / f"{name}.pid.json"


def _store_variables(state_dir: Path) -> dict[str, str]:
    access, secret = credentials(state_dir / STORE)
    return {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables, and no other credentials, within the block."""
    others = ("AWS_SESSION_TOKEN", "AWS_PROFILE")
    before = {name: os.environ.get(name) for name in (*values, *others)}
    for name in others:
        os.environ.pop(name, None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
