"""What does a training notice of an MLflow that is away? Run: .venv/bin/python -m benchmarks.outages

A real MLflow server is killed (kill -9) while a training's figures are sent to it, one step every tenth of a second as
the trainer makes them, and started again on the same database after `--away` seconds. Prints one JSON object:

    away_s           seconds the server did not answer, its own start included
    longest_step_s   longest time the trainer was held up by its figures
    end_s            seconds the end of the training waited for what had not been sent
    steps            made while this went on
    arrived          steps whose figures MLflow has; `twice` of them more than once
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

from drafter.acceptance import Figures
from drafter.course import StepMetrics
from infra.process import OwnedProcess
from infra.recipe_file import load_recipe
from infra.service import Service, wait_ready
from infra.services import mlflow_server
from tasks import training
from tasks.tracking import Tracker

STEP_S = 0.1


def start(service: Service, folder: Path) -> OwnedProcess:
    process = OwnedProcess(
        service.command, log_path=folder / "mlflow.log", pid_file=folder / "mlflow.pid", env=service.env
    ).start()
    wait_ready(service, process)
    return process


def figures() -> Figures:
    """Something to send."""
    found = mock.MagicMock(spec=Figures)
    found.flat.return_value = {"loss": 1.0}
    found.top1 = (0.5,)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--away", type=float, default=120.0, help="seconds between the kill and the next start")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, mock.patch.object(training, "REPORT_EVERY_S", 2.0):
        folder = Path(temporary)
        service = mlflow_server(folder)
        process = start(service, folder)
        tracker = Tracker.open("eyas/outage", "training", {}, service.url, None)
        config = replace(training.train_config(load_recipe("demo-smollm2")), max_steps=100_000)
        with mock.patch.object(training, "Progress"):
            watch = training.TrainingWatch(tracker, lambda words: print(words, flush=True), config)
        back: list[OwnedProcess] = []
        killed = time.monotonic()
        for pid in process.pids():
            os.kill(pid, signal.SIGKILL)
        process.stop()

        def come_back() -> None:
            time.sleep(options.away)
            back.append(start(service, folder))

        again = threading.Thread(target=come_back)
        again.start()
        steps, longest = 0, 0.0
        while again.is_alive() or time.monotonic() - killed < options.away + 10:
            steps += 1
            before = time.monotonic()
            watch.step(StepMetrics(steps, 0, 1e-3, 1.0, 1.0, 1000, 10_000.0, steps * STEP_S, figures()))
            longest = max(longest, time.monotonic() - before)
            time.sleep(STEP_S)
        away = time.monotonic() - killed
        before = time.monotonic()
        watch.end(True)
        ended = time.monotonic() - before
        history = tracker.client.get_metric_history(tracker.run_id, "train/loss")
        times = Counter(entry.step for entry in history)
        tracker.close()
        back[0].stop()
    print(json.dumps({
        "away_s": round(away, 1), "longest_step_s": round(longest, 3), "end_s": round(ended, 1), "steps": steps,
        "arrived": len(times), "twice": sum(count > 1 for count in times.values()),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
