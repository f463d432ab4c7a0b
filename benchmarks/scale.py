"""Does a long extraction stay as lean and as fast as it began? Run: .venv/bin/python -m benchmarks.scale

One `eyas extract` of 10,000 samples on a tiny model; every part real. Watches the flow's own process from outside and
prints one JSON object:

    samples, stored            planned, and in the manifest at the end
    rss_first_mb, rss_last_mb  resident memory of the flow while the first and the last thousand samples were stored
                               (median); `rss_peak_mb` over all
    task_runs                  as Prefect's database has them
    s_per_1000_first, _last    seconds from the first batch begun to a thousand samples stored, and of the last thousand
"""

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import make_conversations
from tasks.job import read_events
from tests.flows.runs import Place, tiny_recipe
from tests.tiny_models import make_tiny

EVERY_S = 0.5


class Watch:
    """Resident memory of a process, sampled until it ends."""

    def __init__(self, pid: int) -> None:
        self.samples: list[tuple[float, float]] = []
        self._process = psutil.Process(pid)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while True:
            try:
                self.samples.append((time.time(), self._process.memory_info().rss / 1e6))
            except psutil.Error:  # it has ended
                return
            time.sleep(EVERY_S)

    def median(self, start: float, stop: float) -> float:
        """Of the samples between two moments."""
        return round(statistics.median(mb for at, mb in self.samples if start <= at <= stop + EVERY_S), 1)


def thousand(stored: list[dict[str, Any]], size: int) -> float:
    """The moment at which `size` samples were stored."""
    total = 0
    for entry in stored:
        total += entry["samples"]
        if total >= size:
            return float(entry["at"])
    raise RuntimeError(f"only {total} samples were stored")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batch-tokens", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        model = make_tiny("llama", folder / "tiny-llama")
        make_conversations(folder / "conversations.jsonl", options.samples)
        recipe = tiny_recipe(
            folder, target={"model_path": str(model)}, regenerate={"enabled": False},
            extract={"batch_tokens": options.batch_tokens}, evaluate={"enabled": False},
            server={"env": {"OMP_NUM_THREADS": "1"}},
        )  # fmt: skip
        place = Place(folder)
        process = place.start("extract", str(recipe), "--json")
        watch = Watch(process.pid)
        output = process.communicate()[0]
        if process.returncode:
            sys.exit(output)
        (summary,) = place.summaries()
        run = Path(summary["summary_path"]).parent
        begun = read_events(run, "batch begun")[0]["at"]
        stored = read_events(run, "batch stored")
        size = min(1000, options.samples // 2)
        first, end = thousand(stored, size), float(stored[-1]["at"])
        last = thousand(stored, options.samples - size)
        with sqlite3.connect(folder / ".eyas" / "prefect" / "prefect.db") as db:
            (task_runs,) = db.execute("select count(*) from task_run").fetchone()
        phases: dict[str, float] = {}
        for entry in stored:
            for phase, seconds in entry["seconds"].items():
                phases[phase] = phases.get(phase, 0) + seconds
        answer = {
            "samples": options.samples, "stored": summary["samples_valid"], "batches": len(stored),
            "tokens": summary["tokens"], "rss_first_mb": watch.median(begun, first),
            "rss_last_mb": watch.median(last, end), "rss_peak_mb": round(max(mb for _, mb in watch.samples), 1),
            "task_runs": task_runs, "s_per_1000_first": round((first - begun) * 1000 / size, 2),
            "s_per_1000_last": round((end - last) * 1000 / size, 2), "s_total": round(end - begun, 1),
            "seconds_by_phase": {name: round(value, 1) for name, value in phases.items()},
        }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
