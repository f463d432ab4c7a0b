"""Eyas as it is operated: a real Prefect server, `eyas serve` beside it, runs started, cancelled and retried by API."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from infra.lifeline import PR_SET_PDEATHSIG
from infra.process import OwnedProcess
from infra.service import Service, wait_ready
from infra.services import prefect_server
from tests.flows.runs import CHECKOUT, Place, wait_for

SABOTEUR = Path(__file__).parent / "saboteur"
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
TRIES = 15
GONE_S = 60.0  # docs/operating.md: how long anything of a run may outlive it


class Operated(Place):
    """A folder with `eyas serve` in it, and the server it serves."""

    def __init__(self, folder: Path, service: Service, recipe: Path) -> None:
        self.orders = folder / "sabotage"
        self.service, api = service, service.url
        self.prefect = self.start_prefect()
        super().__init__(folder, {
            "PREFECT_API_URL": api, "PREFECT_RUNNER_POLL_FREQUENCY": "1", "PREFECT_HOME": str(folder / "prefect-home"),
            "PYTHONPATH": f"{SABOTEUR}{os.pathsep}{CHECKOUT}", "EYAS_TEST_SABOTAGE": str(self.orders),
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        })  # fmt: skip
        self.recipe = recipe
        self.http = httpx.Client(base_url=api, timeout=30, trust_env=False)
        self.server: subprocess.Popen[str] | None = None

    def start_prefect(self) -> OwnedProcess:
        """The server; it listens where it did before."""
        where = self.orders.parent.with_name(f"{self.orders.parent.name}-services")
        process = OwnedProcess(
            self.service.command, log_path=where / "prefect.log", pid_file=where / "prefect.pid", env=self.service.env
        ).start()
        wait_ready(self.service, process)
        return process

    def restart_prefect(self) -> None:
        """kill -9 of the server, and a new one on the same database: away for as long as it takes to start."""
        for pid in self.prefect.pids():
            os.kill(pid, signal.SIGKILL)
        self.prefect.stop()
        self.prefect = self.start_prefect()

    def serve(self, *recipes: str) -> None:
        """Start `eyas serve` and wait until its deployments are there and it listens."""
        mark = len(self.log())
        with (self.folder / "serve.log").open("a") as log:
            env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "EYAS"))} | self.env
            self.server = subprocess.Popen(
                self.command("serve", *(recipes or (str(self.recipe),))), cwd=self.folder, env=env, text=True,
                stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
            )  # fmt: skip
        ready = wait_for(lambda: "Your deployments are being served" in self.log()[mark:] or self._ended(), 60)
        assert ready and not self._ended(), self.log()

    def _ended(self) -> bool:
        return self.server is None or self.server.poll() is not None

    def log(self) -> str:
        path = self.folder / "serve.log"
        return path.read_text() if path.exists() else ""

    def stop_serving(self, deadline_s: float = 60) -> None:
        """End `eyas serve` as a person does."""
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            self.server.wait(deadline_s)

    def begin(self, flow: str = "extract", overrides: list[str] | None = None, name: str = "tiny") -> str:
        """Start a run of a deployment, as its page does; its id."""
        deployment = self.ask("GET", f"/deployments/name/{flow}/{name}")
        parameters = {"overrides": overrides} if overrides else {}
        run = self.ask("POST", f"/deployments/{deployment['id']}/create_flow_run", parameters=parameters)
        return str(run["id"])

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """The server's answer. On SQLite a busy one answers 503 now and then; Prefect's own clients ask again too."""
        for _ in range(TRIES):
            answer = self.http.request(method, path, json=body or None)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def run_of(self, run_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/flow_runs/{run_id}"))

    def state(self, run_id: str) -> str:
        return str(self.run_of(run_id)["state"]["type"])

    def message(self, run_id: str) -> str:
        return str(self.run_of(run_id)["state"]["message"])

    def cancel(self, run_id: str) -> None:
        """As the button on its page."""
        self.ask("POST", f"/flow_runs/{run_id}/set_state", state={"type": "CANCELLING"}, force=False)

    def retry(self, run_id: str) -> None:
        """As the button on its page, and `prefect flow-run retry`."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retried by hand"}
        self.ask("POST", f"/flow_runs/{run_id}/set_state", state=state, force=True)

    def ends(self, run_id: str, deadline_s: float = 300) -> str:
        """The state in which it ends."""
        assert wait_for(lambda: self.state(run_id) in FINAL, deadline_s), (self.state(run_id), self.log())
        return self.state(run_id)

    def process_of(self, run_id: str) -> psutil.Process | None:
        """The process that runs it, found by what Prefect put into its environment."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PREFECT__FLOW_RUN_ID") == run_id and "prefect" in " ".join(process.cmdline()):
                    return process
        return None

    def wait_alone(self, deadline_s: float = GONE_S) -> list[str]:
        """What runs here besides `eyas serve`, after at most so many seconds."""

        def others() -> list[psutil.Process]:
            mine = {self.server.pid} if self.server is not None else set()
            return [process for process in self.processes() if process.pid not in mine]

        wait_for(lambda: not others(), deadline_s)
        found = []
        for process in others():
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return found

    def tasks_of(self, run_id: str) -> list[dict[str, Any]]:
        """Its task runs, of all attempts."""
        return list(self.ask("POST", "/task_runs/filter", flow_runs={"id": {"any_": [run_id]}}, limit=200))

    def summary_of(self, run_id: str) -> dict[str, Any]:
        """What its attempt that went to its end wrote."""
        (found,) = [s for s in self.summaries() if s["prefect_flow_run_id"] == run_id]
        return found


def end_with_parent() -> None:
    """A test that is killed leaves no `eyas serve` behind. (Not the lifeline: it would end the runs along with it.)"""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def operated(folder: Path, recipe: Path) -> Iterator[Operated]:
    """A server of its own for the folder, and `eyas serve`."""
    services = folder.parent / f"{folder.name}-services"
    services.mkdir()
    place = Operated(folder, prefect_server(services), recipe)
    try:
        place.serve()
        yield place
    finally:
        place.stop_serving()
        left = place.wait_empty(GONE_S)
        for process in place.processes():
            process.kill()
        place.prefect.stop()
    assert not left, left


def manifest_digest(store: Path) -> str:
    """Of the only dataset in a folder store."""
    import hashlib

    (path,) = store.glob("*/manifest.json")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pause(seconds: float) -> None:
    """Let a run get somewhere; when a disturbance comes is chance on purpose."""
    time.sleep(seconds)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Lines of all attempts' `events.jsonl` of one kind."""
    lines = [line for path in sorted(folder.glob("runs/*/events.jsonl")) for line in path.read_text().splitlines()]
    return [entry for entry in map(json.loads, lines) if entry["event"] == name]
