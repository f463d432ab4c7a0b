"""What capture costs: two servers of the same model side by side, one of them capturing everything, asked in turn.

    python -m benchmarks.capture_overhead [--smollm2 FOLDER] [--rounds N]

Three parts. Speed: prefill and decode tokens a second, with capture over without, as the median over alternating rounds
of prompts that are never sent twice. Memory: a server whose disk is throttled to 2 MB/s, its queue bounded. Disk: the
writer alone against plain writing and syncing of the same bytes. The last line is one JSON object: `prefill_ratio` and
`decode_ratio` (the worse of the two models), `queue_peak_bytes` beside `queue_limit_bytes`, `writer_bytes_per_s` beside
`disk_bytes_per_s`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.capture_server import Served, capture_server, prompt
from eyas_capture import contract
from eyas_capture.identity import Identity
from eyas_capture.spans import Assembly
from eyas_capture.writer import Writer
from infra.demo import DEFAULT_OUT
from tests.tiny_models import make_tiny

# An idle server must not take cycles from the one that is measured.
FLAGS = {"sleep-on-idle": True, "disable-radix-cache": True}
QUEUE_LIMIT = 4 << 20
THROTTLE = 2_000_000  # bytes a second
THROTTLED = f"""
import time
import eyas_capture.states as states
plain = states.write_all
def throttled(descriptor, view):
    plain(descriptor, view)
    time.sleep(len(view) / {THROTTLE})
states.write_all = throttled
"""


class Load:
    """Batches of prompts nobody has seen before; each call is one batch and gives tokens a second."""

    def __init__(self, prompts: int, length: int) -> None:
        self.prompts, self.length, self.sent = prompts, length, 0

    def _batch(self, length: int) -> list[list[int]]:
        self.sent += self.prompts
        return [prompt(length, self.sent + n) for n in range(self.prompts)]

    def prefill(self, served: Served) -> float:
        """Prompt tokens a second."""
        batch = self._batch(self.length)
        began = time.perf_counter()
        served.post({"input_ids": batch, "sampling_params": {"max_new_tokens": 0}})
        return self.prompts * self.length / (time.perf_counter() - began)

    def decode(self, served: Served) -> float:
        """New tokens a second, of prompts too short to matter."""
        batch, tokens = self._batch(4), 48
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
        began = time.perf_counter()
        served.post({"input_ids": batch, "sampling_params": sampling})
        return self.prompts * tokens / (time.perf_counter() - began)


def settle(served: Served, dumps: int) -> None:
    """Wait until the writer has caught up, so that it takes no cycles from the next measurement."""
    while len(list(served.dump_dir.glob("*/req_*"))) < dumps:
        time.sleep(0.01)


def speed(model: Path, work: Path, load: Load, rounds: int) -> dict[str, float]:
    """Ratios with capture over without, of one model."""
    results: dict[str, list[float]] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(capture_server(model, work / "plain", flags=FLAGS, capture=False))
        capturing = stack.enter_context(capture_server(model, work / "capturing", flags=FLAGS))
        measured: dict[str, Callable[[Served], float]] = {"prefill": load.prefill, "decode": load.decode}
        dumps = 0
        for number in range(rounds + 1):
            for name, measure in measured.items():
                rates, cpu = {}, {}
                for served in (plain, capturing) if number % 2 else (capturing, plain):
                    before = served.scheduler_cpu()
                    rates[served is capturing] = measure(served)
                    if served is capturing:
                        dumps += load.prompts
                        settle(served, dumps)
                    cpu[served is capturing] = served.scheduler_cpu() - before
                if number:  # the first round warms up
                    results.setdefault(f"{name}_ratio", []).append(rates[True] / rates[False])
                    results.setdefault(f"{name}_cpu_ratio", []).append(cpu[False] / cpu[True])
                    results.setdefault(f"{name}_tokens_per_s", []).append(rates[False])
    return {name: round(statistics.median(values), 4) for name, values in results.items()}


def throttled_disk(model: Path, work: Path) -> dict[str, Any]:
    """A disk of 2 MB/s and a queue of 4 MiB: the server waits, loses nothing, and stays within the bound."""
    (work / "site").mkdir(parents=True)
    (work / "site" / "sitecustomize.py").write_text(THROTTLED)
    env = {contract.ENV_QUEUE_BYTES: str(QUEUE_LIMIT), "PYTHONPATH": str(work / "site")}
    load = Load(16, 256)
    with capture_server(model, work / "throttled", flags=FLAGS | {"chunked-prefill-size": 512}, env=env) as served:
        (writer,) = served.writers()
        memory = psutil.Process(writer["pid"]).memory_info
        load.prefill(served)
        served.wait_for_totals(captured=16)
        before = memory().rss
        peak = before
        for _ in range(3):
            load.prefill(served)
            peak = max(peak, memory().rss)
        totals = served.wait_for_totals(120, captured=64)
    return {
        "queue_peak_bytes": totals["queue_peak_bytes"],
        "queue_limit_bytes": QUEUE_LIMIT,
        "throttled_complete": totals["complete"],
        "throttled_captured": totals["captured"],
        "throttled_blocked_seconds": totals["blocked_seconds"],
        "throttled_rss_growth_bytes": peak - before,
    }


def disk(work: Path, dumps: int = 40, rows: int = 2048, hidden: int = 1024) -> dict[str, int]:
    """The writer alone, and plain writes of as many bytes with as many syncs."""
    source = torch.randn(rows, hidden).to(torch.bfloat16)
    names = [*(contract.block_tensor(k) for k in (1, 2, 3)), contract.FINAL]
    nbytes = len(names) * rows * hidden * 2

    def plain() -> float:
        data = memoryview(bytearray(os.urandom(1 << 20)) * (nbytes >> 20))
        began = time.perf_counter()
        for number in range(dumps):
            with open(work / f"plain-{number}", "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
        return dumps * nbytes / (time.perf_counter() - began)

    def writer() -> float:
        one = Writer(Identity(work / "writer", None, {}), 1 << 30, wait_when_full=True)
        one.start(lambda: None)
        began = time.perf_counter()
        for _ in range(dumps):
            assembly = Assembly(one.next_counter(), "r", array("q", range(rows)), base=0, nbytes=nbytes)
            one.reserve(nbytes)
            assembly.ids = torch.arange(rows)
            assembly.rows = dict.fromkeys(names, source)
            assembly.take(0, rows)
            one.submit(assembly, None)
        one.stop(600)
        return dumps * nbytes / (time.perf_counter() - began)

    work.mkdir(parents=True, exist_ok=True)
    return {"disk_bytes_per_s": int(plain()), "writer_bytes_per_s": int(writer())}


def main() -> None:
    """Run the three parts and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", type=Path, default=DEFAULT_OUT / "SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tiny = make_tiny("deepseek_v3", work / "model")
        models = {"tiny-deepseek-v3": speed(tiny, work / "tiny", Load(16, 256), 2 * arguments.rounds)}
        print(json.dumps(models), flush=True)
        if arguments.smollm2.is_dir():
            models["smollm2-135m"] = speed(arguments.smollm2, work / "smollm2", Load(8, 256), arguments.rounds)
            print(json.dumps(models), flush=True)
        result = {
            "prefill_ratio": min(model["prefill_ratio"] for model in models.values()),
            "decode_ratio": min(model["decode_ratio"] for model in models.values()),
            **throttled_disk(tiny, work / "memory"),
            **disk(work / "disk"),
            "models": models,
            "load_average": round(os.getloadavg()[0], 1),
            "cpus": os.cpu_count(),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
