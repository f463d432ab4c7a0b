"""Extraction from a server that others use: eight clients chat while 200 samples are captured.

    python -m benchmarks.live_server [--samples N] [--model FOLDER | --model tiny] [--repeats N]

One server in mode `opted-in` with the prefix cache on; of the demo's model, whose forward pass costs something, or of
a tiny random DeepSeek-V3, which is nearly free, so that capture looks as dear as it can. The samples are sent in
rounds: once with request ids that opt in, once under other ids, so that the clients' latency is compared between the
same loads (clients and extraction), seconds apart, with and without capture. Clients pause for a moment between
requests, as people do: asking at once, all eight would wait in step, and measure one thing eight times. Only requests
that lie wholly in one part of a round count. The last line is one JSON object: `samples`, `complete` dumps, `foreign`
dumps, `clients_failed`, `client_latency_ratio` (mean with capture over mean without; 95 % interval from resampling
rounds beside it).
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from benchmarks.capture_server import Served, capture_server, prompt
from eyas_capture import contract
from infra.demo import DEFAULT_OUT
from infra.demo_target import NAME
from tests.tiny_models import make_tiny

ROUNDS = 20
TINY = "tiny"
CLIENTS = 8
PAUSE = 0.4  # seconds at most between a client's answer and its next request
ANSWER = 4  # tokens; short answers are many, and many make a narrow interval
IN_FLIGHT = 2  # SGLang prefers prefills to decoding: many at once would starve the clients, captured or not


class Clients:
    """Eight users with one system prompt, each asking again soon after it has its answer."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._stop = threading.Event()
        self.latencies: list[tuple[float, float]] = []  # (when it ended, seconds)
        self.failed = 0
        self.cached = 0
        self._threads = [threading.Thread(target=self._chat, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _chat(self, client: int) -> None:
        rng = random.Random(client)
        system = prompt(48, 0)
        turn = 0
        while not self._stop.is_set():
            turn += 1
            time.sleep(rng.uniform(0, PAUSE))
            began = time.monotonic()
            try:
                ids = system + prompt(rng.randint(8, 60), 1000 * client + turn)
                answer = self._served.ask(ids, f"client-{client}-{turn}", ANSWER)
            except (RuntimeError, httpx.HTTPError):
                self.failed += 1
                continue
            self.cached += answer["meta_info"]["cached_tokens"] > 0
            self.latencies.append((time.monotonic(), time.monotonic() - began))

    def stop(self) -> None:
        """Let everybody finish."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def between(self, start: float, stop: float) -> list[float]:
        """Latencies of requests that began and ended in that time."""
        return [seconds for ended, seconds in self.latencies if start <= ended - seconds and ended <= stop]


def send_round(served: Served, prefix: str, samples: dict[str, list[int]], repeats: int) -> tuple[float, float]:
    """Prefill samples, a few at a time, each request under a key of its own; (start, end)."""
    requests = [(f"{prefix}{name}-{n}", ids) for n in range(repeats) for name, ids in samples.items()]
    began = time.monotonic()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(lambda request: served.ask(request[1], request[0], 1, extra_key=request[0]), requests))
    return began, time.monotonic()


def main() -> None:
    """Run the load and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--model", default=str(DEFAULT_OUT / NAME), help="a model's folder, or `tiny`")
    parser.add_argument(
        "--repeats", type=int, default=1, help="a sample is sent so often, so that clients notice a round"
    )
    options = parser.parse_args()
    count, repeats = options.samples, options.repeats
    rng = random.Random(1)
    samples = {f"s{n}": prompt(48, 0) + prompt(rng.randint(40, 300), n) for n in range(count)}
    names = list(samples)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_tiny("deepseek_v3", work / "model") if options.model == TINY else Path(options.model)
        with capture_server(model, work, env={contract.ENV_MODE: "opted-in"}) as served:
            clients = Clients(served)
            send_round(served, "warm-up-", dict(list(samples.items())[:8]), repeats)
            spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for number in range(min(ROUNDS, count)):
                part = {name: samples[name] for name in names[number::ROUNDS]}
                for capture in (True, False) if number % 2 else (False, True):
                    prefix = contract.OPT_IN_PREFIX if capture else "plain-"
                    spans[capture].append(send_round(served, prefix, part, repeats))
            clients.stop()
            rids = {f"{contract.OPT_IN_PREFIX}{name}-{n}": ids for n in range(repeats) for name, ids in samples.items()}
            dumps = served.wait_for(rids)
            foreign = [dump for dump in served.dumps() if dump.record["request_id"] not in rids]
    whole = {
        rid: dump.record["complete"] and dump.record["tokens_sha256"] == contract.tokens_sha256(rids[rid])
        for rid, dump in dumps.items()
    }
    complete = sum(all(whole[f"{contract.OPT_IN_PREFIX}{name}-{n}"] for n in range(repeats)) for name in samples)
    pairs = [
        (clients.between(*on), clients.between(*off)) for on, off in zip(spans[True], spans[False], strict=True)
    ]  # fmt: skip
    ratio, low, high = ratio_of_means(pairs)
    result = {
        "model": Path(options.model).name,
        "samples": count,
        "complete": complete,
        "foreign": len(foreign),
        "clients": CLIENTS,
        "clients_failed": clients.failed,
        "client_requests": len(clients.latencies),
        "client_prefix_hits": clients.cached,
        "client_latency_ratio": round(ratio, 3),
        "client_latency_ratio_95": [round(low, 3), round(high, 3)],
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


def ratio_of_means(pairs: list[tuple[list[float], list[float]]]) -> tuple[float, float, float]:
    """Mean latency with capture over without, over all rounds, with a 95 % interval over resampled rounds."""

    def ratio(chosen: list[tuple[list[float], list[float]]]) -> float:
        on = [value for pair in chosen for value in pair[0]]
        off = [value for pair in chosen for value in pair[1]]
        return statistics.fmean(on) / statistics.fmean(off)

    rng = random.Random(0)
    resampled = [ratio(rng.choices(pairs, k=len(pairs))) for _ in range(1000)]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return ratio(pairs), float(low), float(high)


if __name__ == "__main__":
    main()
