"""One SGLang server: started with the flags of a recipe, watched until it is ready, always ended.

    with SGLangServer(spec) as server:
        server.wait_ready(deadline_s=1800, on_line=print)
        ... server.base_url ...

`attach(url)` gives the same interface to a server that somebody else runs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from hidden_states.errors import RecipeError, ServerError
from infra.ports import free_port, listening_process, refuse_used_port
from infra.process import OwnedProcess

# What a server on a machine without a GPU needs (recipes: `device: cpu`); infra/sglang_cpu/README.md says why.
CPU_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # SGLang's "auto" would make half precision of a float32 model; without AMX that is slower, too
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "mem-fraction-static": 0.3,
    "max-total-tokens": 16384,
    "max-running-requests": 64,
    "sleep-on-idle": True,  # else the scheduler spins on a whole core while it has nothing to do
}
CPU_ENV: dict[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    # Threads that wait give their core away. Spinning, two threads on two cores that others use are slower than one.
    "OMP_WAIT_POLICY": "PASSIVE",
    # But not at once: some microseconds later there is mostly more to do, and waking up takes longer than that.
    "GOMP_SPINCOUNT": "2000",
    # Freed memory stays with the process (glibc). Else every pass pays a page fault for each 4 KB of its activations:
    # a sixth of the processor's time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

POLL_S = 0.3
HEALTH_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 30.0
OWN_FLAGS = {"model-path", "host", "port", "speculative-draft-model-path"}  # set by the other fields of a spec

ADDRESS_IN_USE = r"[Aa]ddress already in use|EADDRINUSE"
STARTS = 3  # of a server whose ports were taken by others while it loaded

# What the log of a server that died says -> what to do about it.
ADVICE = [
    (r"No module named '?sglang", "Install SGLang in this environment, or name another in server.python."),
    (r"unrecognized arguments|error: argument|invalid choice", "Correct this flag in server.flags."),
    (r"out of memory|OutOfMemory|Not enough memory", "Lower mem-fraction-static in server.flags or use more GPUs."),
    (ADDRESS_IN_USE, "Another program took the port; leave server.port out to get a free one."),
]


@dataclass
class ServerSpec:
    """What to start.

    Attributes:
        python: interpreter of the environment SGLang is installed in.
        model_path: Hugging Face folder of the target.
        log_path: file the server's output is appended to.
        pid_file: file by which a later start finds what this one left behind.
        host: address it listens on.
        port: None = a free one, chosen at start.
        flags: further SGLang flags without the dashes; True = bare flag, False and None = left out, a list = several
            values, a dict = JSON.
        env: environment variables added to this process' own.
        draft_path: EAGLE-3 drafter to serve with; None = plain decoding.
        num_steps: tokens drafted per verification.
    """

    python: Path | str
    model_path: Path | str
    log_path: Path
    pid_file: Path
    host: str = "127.0.0.1"
    port: int | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    draft_path: Path | str | None = None
    num_steps: int = 3


class SGLangServer:
    """A server of our own. Also a context manager: starts on entry, ends on exit."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.port = spec.port
        self.process: OwnedProcess | None = None

    @property
    def base_url(self) -> str:
        """Address of the HTTP API; the port is known from `start` on."""
        return f"http://{self.spec.host}:{self.port}"

    def start(self) -> Self:
        """Start the server; it loads for seconds to minutes, see `wait_ready`.

        Raises:
            RecipeError: interpreter, model or drafter is not there, or a flag is set twice.
            ServerError: the port is in use, or the process could not be started.
        """
        command = self._command_without_port()
        if self.spec.port is None:
            self.port = free_port(self.spec.host)
        else:
            refuse_used_port(self.spec.host, self.spec.port)
        self.process = OwnedProcess(
            [*command, "--host", self.spec.host, "--port", str(self.port)],
            log_path=self.spec.log_path,
            pid_file=self.spec.pid_file,
            env=self._environment(),
            name="SGLang",
        ).start()
        return self

    def wait_ready(self, deadline_s: float, on_line: Callable[[str], None] | None = None) -> None:
        """Return when the server has finished its warm-up.

        SGLang looks for free ports when it starts and binds them seconds to minutes later. One that another program
        took meanwhile costs a new start with other ports, unless the recipe named the port.

        Only `/health` tells: `/model_info`, `/server_info` and `/v1/models` answer 200 while warm-up still runs.

        Args:
            deadline_s: seconds from now after which a server that is not ready is ended.
            on_line: called with every new line of the server's log.

        Raises:
            ServerError: it died (with its last log lines), or was not ready in time (thread stacks of all its processes
                are then saved beside the log, and it is ended).
        """
        deadline = time.monotonic() + deadline_s
        starts_left = STARTS - 1
        with httpx.Client(timeout=self._health_timeout_s(), trust_env=False) as http:
            while True:
                self._show_new_lines(on_line)
                if starts_left and self._lost_a_port():
                    starts_left -= 1
                    self.stop()
                    self.start()
                self.ensure_alive()
                if self._healthy(http):
                    self._refuse_stranger()
                    self._show_new_lines(on_line)
                    return
                if time.monotonic() > deadline:
                    self._give_up(deadline_s)
                time.sleep(POLL_S)

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self.process is not None and self.process.alive()

    def ensure_alive(self) -> None:
        """Raise ServerError, with the last log lines, if the server is dead."""
        if self.alive():
            return
        if self.process is None:
            raise ServerError("SGLang", "the server was not started, or was stopped", None, "Start it again.")
        tail = "\n    ".join(self.process.last_lines(15))
        advice = next((do for pattern, do in ADVICE if re.search(pattern, tail)), "The log has the whole story.")
        raise ServerError(
            f"SGLang ({self.spec.log_path})",
            f"the server died with status {self.process.returncode}",
            None,
            f"{advice} Its last lines:\n    {tail}",
        )

    def info(self) -> dict[str, Any]:
        """The server's own description (`/server_info`): version, flags in effect, memory."""
        try:
            answer = httpx.get(f"{self.base_url}/server_info", timeout=30, trust_env=False).raise_for_status()
            return dict(answer.json())
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(
                f"{self.base_url}/server_info", f"no answer: {error}", "a JSON object", "Is this an SGLang server?"
            ) from error

    def save_stacks(self) -> Path:
        """Write the thread stacks of all the server's processes beside its log; returns the file."""
        path = Path(self.spec.log_path).with_suffix(".stacks.txt")
        spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        with path.open("w", encoding="utf-8") as out:
            for pid in self.process.pids() if self.process is not None else []:
                out.write(f"===== process {pid}\n{_stacks(spy, pid)}\n")
        return path

    def stop(self) -> None:
        """End the server and all its processes; returns when nothing is left. Harmless when it is over."""
        if self.process is not None:
            self.process.stop()
            self.process = None

    def __enter__(self) -> Self:
        return self if self.process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command_without_port(self) -> list[str]:
        spec = self.spec
        # Not resolved: in a virtual environment the interpreter is a link, and only through it are its packages found.
        python = shutil.which(os.path.abspath(spec.python) if os.sep in str(spec.python) else str(spec.python))
        if python is None:
            raise RecipeError("server.python", f"{spec.python} is no program", None, "Name SGLang's interpreter.")
        model = _model_folder("target.model_path", spec.model_path)
        flags = {key.replace("_", "-").lstrip("-"): value for key, value in spec.flags.items()}
        if taken := sorted(OWN_FLAGS & flags.keys()):
            raise RecipeError("server.flags", f"{', '.join(taken)} is set by Eyas", None, "Take it out of the flags.")
        if spec.draft_path is not None:
            flags |= {
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": _model_folder("drafter", spec.draft_path),
                "speculative-num-steps": spec.num_steps,
                "speculative-eagle-topk": 1,
                "speculative-num-draft-tokens": spec.num_steps + 1,
            }
        return [python, "-m", "sglang.launch_server", "--model-path", str(model), *flag_arguments(flags)]

    def _environment(self) -> dict[str, str | None]:
        """Variables of the server.

        A health check would be a real prefill of a token, taking a second each: switched off. The flow's own
        PYTHONPATH belongs to another interpreter.
        """
        return {
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": None,
            "PYTHONHOME": None,
            **self.spec.env,
        }

    def _health_timeout_s(self) -> float:
        return HEALTH_TIMEOUT_S

    def _healthy(self, http: httpx.Client) -> bool:
        try:
            return http.get(f"{self.base_url}/health").status_code == 200
        except httpx.TransportError:  # refused until the scheduler is up; slow while it warms up
            return False

    def _lost_a_port(self) -> bool:
        """Whether the server died because a port that was chosen for it, not by the recipe, was taken."""
        if self.process is None or self.process.alive() or self.spec.port is not None:
            return False
        return re.search(ADDRESS_IN_USE, "\n".join(self.process.last_lines(50))) is not None

    def _show_new_lines(self, on_line: Callable[[str], None] | None) -> None:
        if on_line is not None and self.process is not None:
            for line in self.process.new_lines():
                on_line(line)

    def _refuse_stranger(self) -> None:
        """Our server may still be loading while somebody else, who took the port meanwhile, answers."""
        assert self.process is not None and self.port is not None
        listener = listening_process(self.port)
        if listener is not None and listener.pid not in self.process.pids():
            self.stop()
            raise ServerError(
                self.base_url,
                f"process {listener.pid} ({listener.name()}) answers there",
                "our own server",
                "Leave server.port out to get a free port.",
            )

    def _give_up(self, deadline_s: float) -> None:
        assert self.process is not None
        stacks = self.save_stacks()
        tail = "\n    ".join(self.process.last_lines(15))
        self.stop()
        raise ServerError(
            f"SGLang ({self.spec.log_path})",
            f"not ready after {deadline_s:g} s, and ended",
            None,
            f"{stacks} shows what every thread was doing. If it was only loading, raise server.ready_deadline_s. "
            f"Its last lines:\n    {tail}",
        )


class AttachedServer(SGLangServer):
    """A server that somebody else runs: watched by its answers, never started or ended."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.process = None

    @property
    def base_url(self) -> str:
        return self._url

    def start(self) -> Self:
        return self

    def alive(self) -> bool:
        with httpx.Client(timeout=self._health_timeout_s(), trust_env=False) as http:
            return self._healthy(http)

    def ensure_alive(self) -> None:
        """Nothing to see from outside; `wait_ready` waits for its answer."""

    def stop(self) -> None:
        """Not ours to end."""

    def _health_timeout_s(self) -> float:
        return 30.0  # its health check may be a real prefill, behind other people's requests

    def _show_new_lines(self, on_line: Callable[[str], None] | None) -> None:
        pass

    def _lost_a_port(self) -> bool:
        return False

    def _refuse_stranger(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def _give_up(self, deadline_s: float) -> None:
        raise ServerError(
            self._url, f"no healthy server within {deadline_s:g} s", None, "Is server.url right, and does it run?"
        )


def attach(url: str) -> SGLangServer:
    """A server that already runs at this address."""
    return AttachedServer(url)


def flag_arguments(flags: Mapping[str, Any]) -> list[str]:
    """SGLang's command line from a mapping, sorted by nothing: the order given is kept."""
    arguments: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{key}")
        if isinstance(value, Mapping):
            arguments.append(json.dumps(value))
        elif isinstance(value, (list, tuple)):
            arguments += [str(item) for item in value]
        elif value is not True:
            arguments.append(str(value))
    return arguments


def _model_folder(where: str, path: Path | str) -> Path:
    folder = Path(path).resolve()
    if not (folder / "config.json").is_file():
        raise RecipeError(where, f"{path} holds no config.json", "a Hugging Face model folder", "Correct the path.")
    return folder


def _stacks(spy: str | None, pid: int) -> str:
    if spy is None:
        return "py-spy is not installed beside this interpreter"
    try:
        dump = subprocess.run(
            [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=STACKS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"py-spy gave no answer within {STACKS_TIMEOUT_S:g} s"
    return dump.stdout if dump.returncode == 0 else f"{dump.stdout}py-spy: {dump.stderr.strip()}"
