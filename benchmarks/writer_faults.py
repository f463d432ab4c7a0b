"""Faults around the writer: no half-written dump is ever readable, and the server answers throughout.

    python -m benchmarks.writer_faults [--aborts N] [--kills N]

While a reader verifies every dump it can see, again and again: kill -9 in the middle of a write (of the scheduler, of
it and its publisher, of the publisher alone), a full disk, a disk that turns read-only, the folder deleted again and
again, and aborted requests. Full and read-only disks are a small tmpfs, which only root may mount; without that right
they are left out and named in `skipped`. The last line is one JSON object: `faults` tried, `torn_dumps_read` and their
names in `torn`, `server_deaths` (the kills we did ourselves do not count), `unanswered` requests, and
`partials_left_by_kills`: half-written dumps that the kills left behind, under names no reader takes. While the folder
is being deleted, a dump of which one file is gone already is looked at again later: it is torn when it stays.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.capture_server import Served, capture_server, is_publisher, prompt
from eyas_capture import contract
from eyas_capture.identity import process_start_time
from tests.server_patch.writers import whole
from tests.tiny_models import make_tiny

DISK_MIB = 3
FLAGS = {"chunked-prefill-size": 128}
BURST = 24
LONG = 1200  # tokens of prompts whose dumps take long enough to write for a kill to hit one


class Reader:
    """Reads whatever is published, all the time, and counts what is not whole."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._seen: set[Path] = set()
        self.torn: list[str] = []
        self.deleting = False  # somebody deletes dumps, one file after the other
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def verified(self) -> int:
        """Dumps found whole."""
        return len(self._seen) - len(self.torn)

    def _read(self) -> None:
        while not self._stop.is_set():
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Verify every dump not seen before."""
        for folder in self._folders:
            for path in list(folder.glob("*/req_*")):
                if path in self._seen:
                    continue
                try:
                    torn = not whole(path)
                except Exception as error:  # unreadable in any way is what this benchmark looks for
                    if not path.exists() or (self.deleting and isinstance(error, FileNotFoundError)):
                        continue
                    torn = True
                    print(f"{path}: {error!r}", flush=True)
                self._seen.add(path)
                if torn:
                    self.torn.append("/".join(path.parts[-3:]))

    def stop(self) -> None:
        """One last look, then no more."""
        self._stop.set()
        self._thread.join()
        self.look()


def burst(served: Served, name: str, seed: int, length: int = 100) -> int:
    """Prefill a burst; the number of requests that were not answered."""
    prompts = {f"{name}-{n}": prompt(length + n, seed + n) for n in range(BURST)}
    failed = 0
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(served.ask, ids, rid) for rid, ids in prompts.items()]:
            try:
                future.result()
            except (RuntimeError, httpx.HTTPError) as error:
                failed += 1
                print(f"{name}: {error!r}", flush=True)
    return failed


def publishers(scheduler: int) -> list[int]:
    """The processes that write a scheduler's dumps."""
    return [child.pid for child in psutil.Process(scheduler).children(recursive=True) if is_publisher(child)]


def killed(model: Path, work: Path, dump_dir: Path, both: bool) -> int:
    """kill -9 at the scheduler, and its publishers if `both`, while it prefills and writes; half-written dumps left."""
    with capture_server(model, work, flags=FLAGS, dump_dir=dump_dir) as served, ThreadPoolExecutor(1) as pool:
        (writer,) = (writer for writer in served.writers() if _alive(writer["pid"]))
        folder, writing = dump_dir / writer["writer_id"], publishers(writer["pid"])
        running = pool.submit(burst, served, "killed", random.randrange(10**6), LONG)
        until_writing(folder, running)
        for pid in [*(writing if both else []), writer["pid"]]:
            os.kill(pid, signal.SIGKILL)
        running.result()
        while any(map(_alive, writing)):
            time.sleep(0.01)
    return len(list(folder.glob(contract.PARTIAL_GLOB)))


def until_writing(folder: Path, running: Future[int]) -> None:
    """Wait for a dump that is being written, as long as there are any to come."""
    while not running.done() and not any(name.endswith(".partial") for name in os.listdir(folder)):
        pass


def publisher_killed(served: Served, times: int) -> int:
    """kill -9 at the publisher while it writes; the requests without an answer. Nothing may be lost by it."""
    (writer,) = (writer for writer in served.writers() if _alive(writer["pid"]))
    failed, folder = 0, served.dump_dir / writer["writer_id"]
    for number in range(times):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(burst, served, f"publisher-{number}", 10**5 + 100 * number, LONG)
            until_writing(folder, running)
            for pid in publishers(writer["pid"]):
                os.kill(pid, signal.SIGKILL)
            failed += running.result()
    return failed


def _alive(pid: int) -> bool:
    return process_start_time(pid) is not None


def delete_again_and_again(dump_dir: Path, over: threading.Event) -> int:
    """Delete the dump folder for as long as requests are prefilled; how often it was there to delete."""
    times = 0
    while not over.wait(0.1):
        times += dump_dir.exists()
        shutil.rmtree(dump_dir, ignore_errors=True)
    return times


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of a few MiB; False when this user may not mount one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "eyas-faults", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """Turn the small disk read-only ("ro") or back ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def abort_many(served: Served, count: int) -> int:
    """Requests aborted at any moment of their life; the number that got no answer at all."""
    rng = random.Random(0)

    def one(number: int) -> bool:
        rid = f"abort-{number}"
        body = {"input_ids": prompt(rng.randint(50, 600), 10**6 + number), "rid": rid}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(served.http.post, "/generate", json=body | {"sampling_params": {"max_new_tokens": 4}})
            time.sleep(rng.random() * 0.2)  # anywhere between queued and answered
            served.http.post("/abort_request", json={"rid": rid})
            try:
                return running.result().status_code >= 500
            except httpx.HTTPError as error:
                print(f"{rid}: {error!r}", flush=True)
                return True

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, range(count)))


def main() -> None:
    """Run every fault and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    faults: dict[str, int] = {}
    skipped: list[str] = []
    lost: dict[str, int] = {}
    deaths = unanswered = left_by_kills = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = make_tiny("deepseek_v3", work / "model")
        dump_dir, disk_dir = work / "dump", work / "disk"
        with small_disk(disk_dir) as has_disk:
            reader = Reader(dump_dir, disk_dir / "dump")
            print("kill -9", flush=True)
            for number in range(arguments.kills):
                left_by_kills += killed(model, work / f"kill-{number}", dump_dir, both=number % 2 == 0)
                faults["kill -9"] = number + 1

            with capture_server(model, work / "live", flags=FLAGS, dump_dir=dump_dir) as served:
                swept = not list(dump_dir.glob(f"*/{contract.PARTIAL_GLOB}"))
                print("publisher killed, folder deleted, aborts", flush=True)
                unanswered += burst(served, "before", 1)
                unanswered += publisher_killed(served, arguments.kills)
                faults["kill -9 of the publisher"] = arguments.kills
                served.ask(prompt(43, 9), "publisher-again")
                served.wait_for(["publisher-again"])
                time.sleep(2)  # writer.json is a second behind
                lost_by_kills = {why: count for one in served.writers() for why, count in one["totals"]["lost"].items()}
                over, reader.deleting = threading.Event(), True
                with ThreadPoolExecutor(1) as pool:
                    deleting = pool.submit(delete_again_and_again, dump_dir, over)
                    for number in range(3):
                        unanswered += burst(served, "deleted", 1000 + 100 * number, LONG)
                    over.set()
                    faults["folder deleted"] = deleting.result()
                reader.deleting = False
                served.ask(prompt(42, 9), "folder-again")
                served.wait_for(["folder-again"])
                unanswered += abort_many(served, arguments.aborts)
                faults["aborted request"] = arguments.aborts
                unanswered += burst(served, "after", 2000)
                totals = served.wait_for_totals(60)
                deaths += not served.server.alive()

            if has_disk:
                with capture_server(model, work / "full", flags=FLAGS, dump_dir=disk_dir / "dump") as served:
                    print("disk full, read-only", flush=True)
                    for number in range(3):
                        unanswered += burst(served, f"full-{number}", 3000 + 100 * number)
                    faults["disk full"] = 1
                    for path in list((disk_dir / "dump").glob("*/req_*")):
                        shutil.rmtree(path)
                    served.ask(prompt(40, 9), "room-again")
                    served.wait_for(["room-again"])
                    remount(disk_dir, "ro")
                    unanswered += burst(served, "read-only", 5000)
                    faults["disk read-only"] = 1
                    remount(disk_dir, "rw")
                    served.ask(prompt(41, 9), "writable-again")
                    served.wait_for(["writable-again"])
                    lost = served.wait_for_totals(60)["lost"]
                    deaths += not served.server.alive()
            else:
                skipped = ["disk full", "disk read-only"]
            reader.stop()
    result = {
        "faults": faults,
        "torn_dumps_read": len(reader.torn),
        "torn": reader.torn,
        "server_deaths": deaths,
        "unanswered": unanswered,
        "dumps_verified": reader.verified,
        "partials_left_by_kills": left_by_kills,
        "lost_by_kills_of_the_publisher": lost_by_kills,
        "partials_swept_at_start": swept,
        "aborted_incomplete": totals["incomplete"].get(contract.ABORTED, 0),
        "pending_after_aborts": totals["pending"],
        "queue_bytes_after_aborts": totals["queue_bytes"],
        "lost_on_bad_disk": lost,
        "skipped": skipped,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
