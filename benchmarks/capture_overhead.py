"""What capture costs: two servers of the same model side by side, one of them capturing everything, taking turns.

    python -m benchmarks.capture_overhead [--models NAME ...] [--smollm2 FOLDER] [--sittings N] [--rounds N]
                                          [--parts PART ...] [--touch GIB]

Three parts. Speed: prefill and decode tokens a second, with capture over without, as the median over batches of prompts
that are never sent twice; by the clock, and by the processor time of the processes that run the model and write dumps,
which also counts dumps that are written after the answer. Both servers are asked at once and run in turns of a tenth of
a second, so that a machine that is slow for seconds, as shared ones are, is slow for both. Several sittings, each of
two fresh servers: two processes of the very same server may differ by one or two percent for as long as they live.
Publishers may lag behind, so what is published at the answer is counted too (as a share of the batch). `publishers_...`
are 1 when they ran in the idle class at the end of every sitting, and were the same processes throughout every batch.
Dumps go where nobody has deleted anything lately (see `undisturbed`), and into memory that is there (see `touched`;
`--touch 0`: as the machine has it; twice as much must be available). Memory: a server whose disk is throttled to 2
MB/s, its queue bounded. Disk: the writer alone against plain writing of the same bytes by as many threads, in turn;
what either wrote is then synced, and the syncing counts. The last line is one JSON object: `prefill_ratio` and
`decode_ratio` (the worse of the two models), `queue_peak_bytes` beside `queue_limit_bytes`, `writer_bytes_per_s` beside
`disk_bytes_per_s`.
"""

import argparse
import contextlib
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.capture_server import Served, capture_server, is_publisher, prompt
from eyas_capture import contract
from eyas_capture.identity import Identity
from eyas_capture.rows import Layout, RowCopier
from eyas_capture.spans import Assembly, Part
from eyas_capture.writer import Writer, process_count
from infra.demo import DEFAULT_OUT
from tests.tiny_models import make_tiny

# Seconds. Of the same pairs of batches, one whole batch after the other, ratios scattered three times as far.
TURN = 0.1
# An idle server must not take cycles from the one that is measured.
FLAGS = {"sleep-on-idle": True, "disable-radix-cache": True, "chunked-prefill-size": 2048}
TINY, SMOLLM2 = "tiny-deepseek-v3", "smollm2-135m"
PARTS = ("speed", "memory", "disk")
# Of linux/fs.h: read and set a folder's flags; "its folders are the tops of hierarchies of their own".
GET_FLAGS, SET_FLAGS, TOP_FOLDER = 0x80086601, 0x40086602, 0x00020000
MIB = 1 << 20
IDLE_CLASS, SAME_PUBLISHERS = "publishers_in_idle_class", "publishers_stayed"
NEVER_LESS = (IDLE_CLASS, SAME_PUBLISHERS)  # 1 when it was so in every sitting, and in every batch
SETTLES_WITHIN = 120.0  # seconds
QUEUE_LIMIT = 4 << 20
THROTTLE = 2_000_000  # bytes a second
THROTTLED = f"""
import time
from eyas_capture import publisher
plain = publisher.write_all
def throttled(descriptor, view):
    time.sleep(len(view) / {THROTTLE})
    plain(descriptor, view)
publisher.write_all = throttled
"""


@dataclass
class Answer:
    """seconds: that a server has run until it answered. published: its dumps so far, right then."""

    seconds: float = 0.0
    published: int = 0


@dataclass
class Load:
    """Batches of prompts nobody has seen before; each call is one message, and gives each server's answer.

    Prefills of several passes, so that dumps of the first are written while the next are computed, as under a load
    that goes on.
    """

    prefills: int
    decodes: int
    tokens: int = 256
    new_tokens: int = 64
    sent: int = 0

    def _batch(self, prompts: int, length: int) -> list[list[int]]:
        self.sent += prompts
        return [prompt(length, self.sent + n) for n in range(prompts)]

    def prefill(self, *servers: Served) -> list[Answer]:
        """Prompts only."""
        return self._timed(servers, self._batch(self.prefills, self.tokens), 0)

    def decode(self, *servers: Served) -> list[Answer]:
        """New tokens, of prompts too short to matter."""
        return self._timed(servers, self._batch(self.decodes, 4), self.new_tokens)

    def _timed(self, servers: Sequence[Served], batch: list[list[int]], new_tokens: int) -> list[Answer]:
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0.0}
        return in_turns(servers, lambda served: served.post({"input_ids": batch, "sampling_params": sampling}))


def in_turns(servers: Sequence[Served], ask: Callable[[Served], object]) -> list[Answer]:
    """Ask all at once, and let one at a time run until all have answered."""
    workers = {served: served.workers() for served in servers}
    answers = {served: Answer() for served in servers}
    with ThreadPoolExecutor(len(servers)) as pool:
        try:
            for served in servers:
                _signal(workers[served], signal.SIGSTOP)
            asked = {served: pool.submit(_answered_at, ask, served) for served in servers}
            while waiting := [served for served in servers if not asked[served].done()]:
                for served in waiting:
                    _signal(workers[served], signal.SIGCONT)
                    began = time.perf_counter()
                    wait([asked[served]], TURN)
                    _signal(workers[served], signal.SIGSTOP)
                    ended = time.perf_counter()
                    if asked[served].done():
                        ended = asked[served].result()
                        answers[served].published = published(served)
                    answers[served].seconds += ended - began
        finally:  # before the pool waits for answers
            for served in servers:
                _signal(workers[served], signal.SIGCONT)
    return [*answers.values()]


def _answered_at(ask: Callable[[Served], object], served: Served) -> float:
    ask(served)
    return time.perf_counter()


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a publisher that was replaced
            process.send_signal(number)


def undisturbed(folder: Path) -> None:
    """Let ext4 put this folder's folders where there is most room, and not where others have just deleted much.

    Without a journal it looks at every inode that was deleted in the last minutes before it makes a new one nearby: a
    dump's three inodes took 0.13 ms longer after a test run than before it. Other file systems don't know the flag.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        (flags,) = struct.unpack("L", fcntl.ioctl(descriptor, GET_FLAGS, struct.pack("L", 0)))
        fcntl.ioctl(descriptor, SET_FLAGS, struct.pack("L", flags | TOP_FOLDER))
    os.close(descriptor)


def touched(gib: int) -> mmap.mmap:
    """Have the host of a virtual machine give memory for the dumps, for as long as the result is kept.

    Such a machine may give what is free back to its host (`Free page reporting enabled` in its kernel's log). Then each
    new page of a file, whoever writes it, is fetched from the host first: half of what a dump costs. Only whole free
    blocks of 2 MB are given back, so one page of each MB is kept.
    """
    memory = mmap.mmap(-1, gib << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # of those a part can't be freed
    for _ in range(0, len(memory), MIB):
        memory.write(bytes(MIB))
    for start in range(0, len(memory), MIB):
        memory.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, MIB - mmap.PAGESIZE)
    return memory


def settle(served: Served, dumps: int) -> None:
    """Wait until the writer has caught up, so that it takes no cycles from the next measurement."""
    ends = time.monotonic() + SETTLES_WITHIN
    while (found := published(served)) < dumps:
        if time.monotonic() > ends:
            raise TimeoutError(f"{found} of {dumps} dumps within {SETTLES_WITHIN} s: {served.writers()}")
        time.sleep(0.01)


def published(served: Served) -> int:
    """Dumps so far."""
    return len(list(served.dump_dir.glob("*/req_*")))


def publishers(served: Served) -> list[int]:
    """Process ids."""
    return sorted(process.pid for process in served.workers() if is_publisher(process))


def in_idle_class(served: Served) -> bool:
    """Whether the publishers still run where a core is idle."""
    return all(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in publishers(served))


def speed(model: Path, work: Path, load: Load, sittings: int, rounds: int) -> dict[str, Any]:
    """Ratios with capture over without, of one model, with 95 % intervals from resampled sittings and their batches."""
    found = []
    for number in range(sittings):
        found.append(sitting(model, work / str(number), load, rounds))
        medians = {name: round(statistics.median(values), 4) for name, values in found[-1].items()}
        print(json.dumps({"model": model.name, "sitting": number, **medians}), flush=True)
    rng = random.Random(0)
    result: dict[str, Any] = {}
    for name in found[0]:
        values = [each[name] for each in found]
        result[name] = round((min if name in NEVER_LESS else statistics.median)(flat(values)), 4)
        if name.endswith("_ratio"):
            again = sorted(statistics.median(flat(resampled(values, rng))) for _ in range(1000))
            result[f"{name}_95"] = [round(again[25], 4), round(again[974], 4)]
            result[f"{name}_sittings"] = [round(statistics.median(each), 4) for each in values]
    return result


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    """The batches of all sittings."""
    return [value for each in values for value in each]


def resampled(values: Sequence[Sequence[float]], rng: random.Random) -> list[list[float]]:
    """As many sittings, drawn from these, each of as many batches, drawn from its own."""
    return [rng.choices(each, k=len(each)) for each in rng.choices(values, k=len(values))]


def sitting(model: Path, work: Path, load: Load, rounds: int) -> dict[str, list[float]]:
    """Two fresh servers, and what each batch of theirs gave."""
    results: dict[str, list[float]] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(capture_server(model, work / "plain", flags=FLAGS, capture=False))
        capturing = stack.enter_context(capture_server(model, work / "capturing", flags=FLAGS))
        dumps = 0
        for number in range(rounds + 1):
            prefill = ("prefill", load.prefill, load.prefills, load.tokens)
            decode = ("decode", load.decode, load.decodes, load.new_tokens)
            for turn, (name, measure, prompts, tokens) in enumerate((prefill, decode, prefill, decode, prefill)):
                servers = (plain, capturing) if (number + turn) % 2 else (capturing, plain)
                writing, before = publishers(capturing), {served: served.worker_cpu() for served in servers}
                answer = dict(zip(servers, measure(*servers), strict=True))
                at_the_answer = answer[capturing].published - dumps
                dumps += prompts
                settle(capturing, dumps)
                cpu = {served: served.worker_cpu() - before[served] for served in servers}
                if number:  # the first round warms up
                    of = {
                        "ratio": answer[plain].seconds / answer[capturing].seconds,
                        "cpu_ratio": cpu[plain] / cpu[capturing],
                        "tokens_per_s": prompts * tokens / answer[plain].seconds,
                        "published_at_the_answer": at_the_answer / prompts,
                    }
                    for what, value in of.items():
                        results.setdefault(f"{name}_{what}", []).append(value)
                    # Others run in the plain server's turns too, and the time of those that ended is gone.
                    results.setdefault(SAME_PUBLISHERS, []).append(float(publishers(capturing) == writing))
        results[IDLE_CLASS] = [float(in_idle_class(capturing))]
    return results  # the dumps stay until the end: deleting them is what `undisturbed` goes out of the way of


def throttled_disk(model: Path, work: Path) -> dict[str, Any]:
    """A disk of 2 MB/s and a queue of 4 MiB: the server waits, loses nothing, and stays within the bound."""
    (work / "site").mkdir(parents=True)
    (work / "site" / "sitecustomize.py").write_text(THROTTLED)
    env = {contract.ENV_QUEUE_BYTES: str(QUEUE_LIMIT), "PYTHONPATH": str(work / "site")}
    load = Load(16, 16)
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


def sync(path: Path) -> None:
    """Have a written file's bytes on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def disk(work: Path, dumps: int = 24, rows: int = 2048, hidden: int = 1024, rounds: int = 5) -> dict[str, int]:
    """The writer alone, and plain writes of as many bytes with as many syncs and threads."""
    source = torch.randn(rows, hidden).to(torch.bfloat16)
    names = [*(contract.block_tensor(k) for k in (1, 2, 3)), contract.FINAL]
    nbytes = len(names) * rows * hidden * 2
    data = memoryview(bytearray(os.urandom(1 << 20)) * (nbytes >> 20))

    def write_file(path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(data)

    def plain(folder: Path) -> None:
        with ThreadPoolExecutor(process_count()) as pool:
            list(pool.map(write_file, [folder / f"plain-{number}" for number in range(dumps)]))

    def writer(folder: Path) -> None:
        one = Writer(Identity(folder, None, {}), 1 << 30, wait_when_full=True)
        copier, named = RowCopier(source.device, one.memory), dict.fromkeys(names, source)
        layout, ids = Layout.of(named), torch.arange(rows)
        one.start(lambda: None)
        for _ in range(dumps):
            taken, tokens = layout.bytes_for(rows, rows), array("q", range(rows))
            assembly = Assembly(one.next_counter(), "r", tokens, base=0, nbytes=taken)
            one.reserve(taken)
            there = copier.copy([tokens], [(0, rows)], ids, named, layout)
            there.holders = 1
            assembly.prompt = there, there.prompts[0]
            assembly.parts.append(Part(0, rows, there, there.rows[0]))
            one.submit(assembly, None)
            one.look()
        one.stop(600)

    rates: dict[str, list[float]] = {"disk": [], "writer": []}
    for number in range(rounds):
        for name, write in (("disk", plain), ("writer", writer)):
            folder = work / f"{name}-{number}"
            folder.mkdir(parents=True)
            began = time.perf_counter()
            write(folder)
            for path in folder.rglob("*"):
                if path.is_file():
                    sync(path)
            rates[name].append(dumps * nbytes / (time.perf_counter() - began))
            shutil.rmtree(folder)
    return {f"{name}_bytes_per_s": int(statistics.median(values)) for name, values in rates.items()}


def main() -> None:
    """Run the three parts and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", type=Path, default=DEFAULT_OUT / "SmolLM2-135M-Instruct")
    parser.add_argument("--sittings", type=int, default=3, help="pairs of fresh servers; twice as many if tiny")
    parser.add_argument("--rounds", type=int, default=3, help="of a sitting: three prefills and two decodes each")
    parser.add_argument("--models", nargs="+", default=[TINY, SMOLLM2], choices=[TINY, SMOLLM2])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--touch", type=int, default=8, help="GiB of memory for dumps; 0: as the machine has it")
    arguments = parser.parse_args()
    if arguments.touch << 30 > psutil.virtual_memory().available // 2:
        parser.error(f"--touch {arguments.touch}: more than half of the memory that is available")
    kept = touched(arguments.touch) if arguments.touch else b""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        undisturbed(work)
        tiny = make_tiny("deepseek_v3", work / "model")
        loads = {
            TINY: (tiny, Load(64, 16, new_tokens=192), 2 * arguments.sittings),
            SMOLLM2: (arguments.smollm2, Load(16, 8, new_tokens=32), arguments.sittings),
        }
        models = {}
        for name in arguments.models if "speed" in arguments.parts else ():
            model, load, sittings = loads[name]
            models[name] = speed(model, work / name, load, sittings, arguments.rounds)
            print(json.dumps(models), flush=True)
        result: dict[str, Any] = {}
        for ratio in ("prefill_ratio", "decode_ratio") if models else ():
            result[ratio] = min(model[ratio] for model in models.values())
        if "memory" in arguments.parts:
            result |= throttled_disk(tiny, work / "memory")
        if "disk" in arguments.parts:
            result |= disk(work / "disk")
        result |= {"models": models, "touched_bytes": len(kept)}
        result |= {"load_average": round(os.getloadavg()[0], 1), "cpus": os.cpu_count()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
