"""The slot for a host's GPUs comes back however a run or Prefect's server ends, and no run gives back another's."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.process import OwnedProcess
from infra.service import wait_ready
from infra.services import prefect_server
from tests.flows.runs import CHECKOUT, wait_for

STORAGE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
TRIES = 15
HOLDER = """
import sys
from flows import gpus
from infra.recipe_file import load_recipe
gpus.RENEW_S = 0.5
try:
    with gpus.gpus(load_recipe("demo-smollm2", ["schedule.when_busy=skip"])):
        print("holds", flush=True)
        sys.stdin.read()
except gpus.GpusBusy:
    print("busy", flush=True)
"""


_numbers = itertools.count()


class Prefect:
    """A real server, with its leases in memory (as Prefect's own default is) or in files; and runs that hold GPUs."""

    def __init__(self, folder: Path, storage: str) -> None:
        self.folder, self.forgets = folder, storage == "memory"
        service = prefect_server(folder)
        env = {**service.env, STORAGE: f"prefect.server.concurrency.lease_storage.{storage}"}
        self.service = dataclasses.replace(service, env=env)
        self.http = httpx.Client(base_url=service.url, timeout=30, trust_env=False)
        self.start()

    def start(self) -> None:
        log, pid_file = self.folder / "prefect.log", self.folder / "prefect.pid"
        self.process = OwnedProcess(self.service.command, log_path=log, pid_file=pid_file, env=self.service.env).start()
        wait_ready(self.service, self.process)

    def kill(self) -> None:
        for pid in self.process.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.stop()

    def taken(self, host: str) -> int:
        return int(self.ask("GET", f"/v2/concurrency_limits/eyas-gpus-{host}").json()["active_slots"])

    def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        """Its answer. On SQLite a busy one answers 503 now and then; Prefect's own clients ask again too."""
        for _ in range(TRIES):
            answer = self.http.request(method, path, json=body or None)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        return answer.raise_for_status()

    def run(self, host: str) -> "Run":
        return Run(self, host)


class Run:
    """A process that holds the GPUs of a host until it is told to end; `says` is all it has written."""

    def __init__(self, prefect: Prefect, host: str) -> None:
        self.records, self.log = prefect.folder / host / "gpus", prefect.folder / f"run-{next(_numbers)}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "EYAS"))} | {
            "PREFECT_API_URL": prefect.service.url, "PREFECT_CLIENT_MAX_RETRIES": "2", "EYAS_GPU_HOST": host,
            "EYAS_HOME": str(prefect.folder / host), "PREFECT_HOME": str(prefect.folder / "home"),
        }  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOLDER], env=env, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert wait_for(lambda: self.says().startswith(("holds", "busy")) or self.process.poll() is not None, 120)

    def says(self) -> str:
        return self.log.read_text()

    def lease(self) -> str:
        (record,) = self.records.glob("*.json")
        return str(json.loads(record.read_text())["slot"]["lease"])

    def end(self, number: int | None = None) -> str:
        """As a run ends, or by a signal; what it said."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)
        return self.says()


@pytest.fixture(scope="module", params=["memory", "filesystem"])
def prefect(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    server = Prefect(tmp_path_factory.mktemp(request.param), request.param)
    yield server
    server.kill()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_keeps_no_slot_for_ever(prefect: Prefect) -> None:
    """Whether the run outlives its absence, or ends in it, in good order or not."""
    outlives, ends, killed = (prefect.run(host) for host in ("outlives", "ends", "killed"))
    assert [prefect.taken(host) for host in ("outlives", "ends", "killed")] == [1, 1, 1]
    prefect.kill()
    assert "Traceback" not in ends.end()
    killed.end(signal.SIGKILL)
    prefect.start()

    if prefect.forgets:
        assert wait_for(lambda: "has forgotten who holds the GPUs" in outlives.says(), 20), outlives.says()
    assert prefect.run("outlives").says().startswith("busy"), "two runs at once"
    assert "Traceback" not in outlives.end()
    assert ("has forgotten who holds the GPUs" in outlives.says()) == prefect.forgets
    for host in ("outlives", "ends", "killed"):
        after = prefect.run(host)
        assert after.says().startswith("holds"), f"{host}: its slot is stuck: {after.says()}"
        assert prefect.taken(host) == 1
        assert "Traceback" not in after.end()
        assert prefect.taken(host) == 0
        assert not list(after.records.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("taken", [True, False])
def test_a_run_whose_lease_ran_out_takes_the_slot_again_or_says_that_another_has_it(
    prefect: Prefect, taken: bool
) -> None:
    """A lease that ran out is taken back by the server; here it is handed back while the run is stopped."""
    host = f"lost-{taken}"
    run = prefect.run(host)
    run.process.send_signal(signal.SIGSTOP)
    prefect.ask("POST", "/v2/concurrency_limits/decrement-with-lease", lease_id=run.lease())
    assert prefect.taken(host) == 0
    other = prefect.run(host) if taken else None
    assert other is None or other.says().startswith("holds")
    run.process.send_signal(signal.SIGCONT)
    expected = "another run holds them now" if taken else "this run holds them again"
    assert wait_for(lambda: expected in run.says(), 20), run.says()
    assert prefect.taken(host) == 1
    assert run.end().count(expected) == 1
    if other is not None:
        assert prefect.taken(host) == 1, "it gave back the other's slot"
        other.end()
    assert prefect.taken(host) == 0


@pytest.mark.slow
def test_a_slot_that_nobody_knows_of_is_freed_by_the_command_in_the_papers(prefect: Prefect) -> None:
    """`docs/operating.md`: the run was killed, and its record went with its container."""
    gone = prefect.run("gone")
    gone.end(signal.SIGKILL)
    shutil.rmtree(gone.records)
    assert prefect.run("gone").says().startswith("busy")
    subprocess.run(
        [Path(sys.executable).with_name("prefect"), "gcl", "update", "eyas-gpus-gone", "--active-slots", "0"],
        env=os.environ | {"PREFECT_API_URL": prefect.service.url}, check=True, capture_output=True,
    )  # fmt: skip
    after = prefect.run("gone")
    assert after.says().startswith("holds")
    after.end()
