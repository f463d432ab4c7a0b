"""What does Prefect cost a run? Run: .venv/bin/python -m benchmarks.orchestration [--folder F] [key=value ...]

`eyas run demo-smollm2` as a person starts it, against a Prefect server that is up. Prints one JSON object:

    start_s          from the flow's begin to its first step at work
    command_s        from the command to the flow's begin: imports, recipe
    wall_s           from the flow's begin to its end
    work_s           of it in the steps themselves, by their own clocks
    orchestration    (wall_s - work_s) / wall_s
    slowest_gap_s    longest time between the end of a step and the begin of the next
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from infra.process import OwnedProcess
from infra.service import wait_ready
from infra.services import prefect_server

CHECKOUT = Path(__file__).resolve().parent.parent


def prepare(folder: Path) -> None:
    """The demo's recipe names its parts from the checkout: show them here, so that everything written stays here."""
    (folder / ".eyas").mkdir(parents=True, exist_ok=True)
    for name in (".eyas/assets", ".venv-sglang"):
        if not (folder / name).exists():
            (folder / name).symlink_to(CHECKOUT / name)


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def measure(folder: Path, api: str, overrides: list[str]) -> dict[str, Any]:
    """One run; see the top of this file."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "EYAS", "MLFLOW"))}
    env |= {"PREFECT_API_URL": api, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-m", "flows.cli", "run", "--json", "demo-smollm2", *overrides]
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(done.stdout)
    with httpx.Client(base_url=api, timeout=30, trust_env=False) as http:
        flow = http.get(f"/flow_runs/{summary['prefect_flow_run_id']}").json()
        wanted = {"flow_runs": {"id": {"any_": [flow["id"]]}}, "limit": 200}
        tasks = sorted(http.post("/task_runs/filter", json=wanted).json(), key=lambda run: str(run["start_time"]))
    gaps, end = [], tasks[0]["end_time"]
    for task in tasks[1:]:
        gaps.append(seconds_between(end, task["start_time"]))
        end = max(end, task["end_time"])
    wall = seconds_between(flow["start_time"], flow["end_time"])
    work = sum(seconds for name, seconds in summary["wall_s"].items() if name != "total")
    begin = datetime.fromisoformat(flow["start_time"]).timestamp()
    return {
        "start_s": round(seconds_between(flow["start_time"], tasks[0]["start_time"]), 1),
        "command_s": round(begin - began, 1), "wall_s": round(wall, 1), "work_s": round(work, 1),
        "orchestration": round((wall - work) / wall, 4), "slowest_gap_s": round(max(gaps), 2), "steps": len(tasks),
        "samples": summary["samples_valid"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to run; kept (a temporary one)")
    parser.add_argument("overrides", nargs="*", help="changes of the recipe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        prepare(folder)
        service = prefect_server(folder / "prefect-server")
        with OwnedProcess(
            service.command, log_path=folder / "prefect.log", pid_file=folder / "prefect.pid", env=service.env
        ) as process:
            wait_ready(service, process)
            print(json.dumps(measure(folder, service.url, options.overrides)), flush=True)


if __name__ == "__main__":
    main()
