"""Programs for the lifeline's tests: a server with awkward workers, and an owner that can be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from infra.process import OwnedProcess


def stubborn_tree(pids: Path) -> None:
    """Act like a server: one plain worker, one that ignores TERM, one that left session and parent. Never returns."""
    sleep = "import time; time.sleep(600)"
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {sleep}"
    started = [subprocess.Popen([sys.executable, "-c", code]).pid for code in (sleep, deaf)]
    read, write = os.pipe()
    if os.fork() == 0:  # the daemon's usual way out: a new session, then a second fork whose parent ends
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()
    started.append(int(os.read(read, 20)))
    done = pids.with_suffix(".tmp")
    done.write_text(" ".join(map(str, [os.getpid(), *started])))
    done.replace(pids)
    time.sleep(600)


def runners(pids: Path) -> None:
    """Two chains of processes; each lives for 5 ms and leaves a child behind. They touch `pids` as they go."""
    end = time.monotonic() + 15
    for _ in range(2):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while time.monotonic() < end:
                time.sleep(0.005)
                pids.touch()
                if os.fork() != 0:
                    os._exit(0)
            os._exit(0)
    time.sleep(600)


def owner(folder: Path, fork_first: bool) -> None:
    """Own a stubborn tree until killed; with `fork_first` a forked child of the owner lives on."""
    with OwnedProcess(
        [sys.executable, "-m", "tests.infra.process_tree", "tree", folder / "pids"],
        log_path=folder / "log",
        pid_file=folder / "pid",
        grace_s=0.5,
    ):
        if fork_first and os.fork() == 0:
            (folder / "forked").write_text(str(os.getpid()))
            time.sleep(600)
        time.sleep(600)


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "tree":
        stubborn_tree(path)
    elif what == "runners":
        runners(path)
    else:
        owner(path, fork_first=what == "forking-owner")
