"""A real SGLang server on the CPU with the capture plugin, and what tests and benchmarks ask of it."""

import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eyas_capture import contract
from infra.server import CPU_ENV, CPU_FLAGS, ServerSpec, SGLangServer

SGLANG_PYTHON = Path(os.environ.get("EYAS_SGLANG_PYTHON", ".venv-sglang/bin/python")).absolute()
READY_S = 300.0
_NUDGE, _NUDGES, _SETTLED = 2e-6, 7, 1e-3  # relative; how often; a token that changes its expert moves by 1e-2 or more
VOCAB = range(8, 1024)  # the tiny models' tokens that mean nothing special


@dataclass(frozen=True)
class FoundDump:
    """A published dump, read whole: `tensors` as in states.safetensors."""

    path: Path
    record: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(eq=False)
class Served:
    """A running server and the dump folder of its plugin."""

    server: SGLangServer
    dump_dir: Path
    http: httpx.Client
    seen: dict[Path, FoundDump] = field(default_factory=dict)

    def post(self, body: dict[str, Any], path: str = "/generate") -> Any:
        """One request; raises when the answer is not 200."""
        answer = self.http.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()

    def ask(self, ids: Sequence[int], rid: str, new_tokens: int = 1, **more: Any) -> Any:
        """Prefill `ids`, greedily decode `new_tokens`, also past an end token."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        return self.post({"input_ids": list(ids), "rid": rid, "sampling_params": sampling} | more)

    def ask_at_once(self, prompts: Mapping[str, Sequence[int]], new_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """All prompts at the same time; the answer by request id."""
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            running = {rid: pool.submit(self.ask, ids, rid, new_tokens, **more) for rid, ids in prompts.items()}
            return {rid: future.result() for rid, future in running.items()}

    def workers(self) -> list[psutil.Process]:
        """The processes that run the model and write dumps."""
        lifeline = json.loads(self.server.spec.pid_file.read_text())["lifeline"]["pid"]
        found = psutil.Process(lifeline).children(recursive=True)
        # The kernel keeps 15 letters of a name.
        return [each for each in found if each.name().startswith("sglang::schedul") or is_publisher(each)]

    def worker_cpu(self) -> float:
        """Processor seconds of the workers; other programs hardly count."""
        return sum(sum(process.cpu_times()[:2]) for process in self.workers())

    def writers(self) -> list[dict[str, Any]]:
        """Every writer.json, oldest first."""
        return [json.loads(file.read_text()) for file in sorted(self.dump_dir.glob(f"*/{contract.WRITER_FILE}"))]

    def dumps(self) -> list[FoundDump]:
        """Every published dump, by writer and counter."""
        for path in self.dump_dir.glob("*/req_*"):
            if path not in self.seen:
                record = json.loads((path / contract.RECORD_FILE).read_text())
                self.seen[path] = FoundDump(path, record, load_file(path / contract.STATES_FILE))
        return sorted(self.seen.values(), key=lambda dump: (dump.path.parent, dump.record["counter"]))

    def wait_for(self, rids: Iterable[str], timeout_s: float = 30.0) -> dict[str, FoundDump]:
        """The dumps of these requests: a dump appears shortly after the answer, not before it."""
        wanted, ends = set(rids), time.monotonic() + timeout_s
        while True:
            found = {dump.record["request_id"]: dump for dump in self.dumps() if dump.record["request_id"] in wanted}
            if len(found) == len(wanted):
                return found
            if time.monotonic() > ends:
                raise TimeoutError(f"no dump of {sorted(wanted - found.keys())} within {timeout_s} s: {self.writers()}")
            time.sleep(0.02)

    def wait_for_totals(self, timeout_s: float = 30.0, **least: int) -> dict[str, Any]:
        """Totals of the one writer once nothing is pending and the named ones are at least so high."""
        ends = time.monotonic() + timeout_s
        while True:
            (writer,) = self.writers()
            totals: dict[str, Any] = writer["totals"]
            if not totals["pending"] and all(totals[name] >= value for name, value in least.items()):
                return totals
            if time.monotonic() > ends:
                raise TimeoutError(f"totals stay at {totals}, expected {least}")
            time.sleep(0.1)


def is_publisher(process: psutil.Process) -> bool:
    """Whether this process writes a server's dumps; one that has ended does not."""
    try:
        return "eyas_capture.publisher" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@contextmanager
def capture_server(
    model: Path,
    work: Path,
    *,
    flags: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    capture: bool = True,
    dump_dir: Path | None = None,
) -> Iterator[Served]:
    """Start a server for a model folder and stop it in the end. Without `capture` the plugin stays unconfigured."""
    work.mkdir(parents=True, exist_ok=True)
    dump_dir = dump_dir or work / "dump"
    spec = ServerSpec(
        python=SGLANG_PYTHON,
        model_path=model,
        log_path=work / "server.log",
        pid_file=work / "server.pid",
        flags={**CPU_FLAGS, "dtype": "float32", "skip-server-warmup": True, "random-seed": 1} | (flags or {}),
        env={**CPU_ENV, **({contract.ENV_DUMP_DIR: str(dump_dir)} if capture else {}), **(env or {})},
    )
    # Any number at once, and no proxy meant for the outside world.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    with SGLangServer(spec) as server:
        server.wait_ready(READY_S)
        with httpx.Client(base_url=server.base_url, timeout=120, limits=limits, trust_env=False) as http:
            yield Served(server, dump_dir, http)


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens; another seed shares no prefix worth mentioning."""
    return random.Random(f"{length}-{seed}").choices(VOCAB, k=length)


def settled_prompt(folder: Path, length: int, seed: int, before: Sequence[int] = ()) -> list[int]:
    """`before` and `length` random tokens behind it, such that float32 decides which experts they go to.

    Where two experts have the same score but for its last bits, rounding chooses, differently in two right programs
    (and in one, from one batch to another), and the states of that token have nothing in common. Judged by the
    reference alone: nudged in the last bits of its embeddings it must stay where it is.
    """
    for another in range(50):
        ids = [*before, *prompt(length, seed + 1000 * another)]
        if _is_settled(folder, tuple(ids)):
            return ids
    raise RuntimeError(f"no settled prompt of {length} tokens behind {len(before)}")


def _is_settled(folder: Path, ids: tuple[int, ...]) -> bool:
    model = reference_model(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(torch.tensor([ids]))
        nudges = [0.0, *[_NUDGE] * _NUDGES]
        nudged = torch.cat([embeddings * (1 + n * torch.randn(embeddings.shape, generator=generator)) for n in nudges])
        states = torch.stack(model(inputs_embeds=nudged, output_hidden_states=True).hidden_states)
    return bool((states - states[:, :1]).abs().max() < _SETTLED)


@cache
def reference_model(folder: Path) -> Any:
    """The same weights in transformers, float32."""
    # Beside a server on the same few cores, threads that wait for each other make a tiny model a hundred times slower.
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_states(folder: Path, ids: Sequence[int], after_block: Sequence[int]) -> dict[str, torch.Tensor]:
    """What a dump of `ids` must hold: each block's output and the normed final state, [S, H] float32.

    transformers' hidden_states[k + 1] is the output of block k, except that the last entry is after the final norm.
    """
    with torch.no_grad():
        states = reference_model(folder)(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return {contract.block_tensor(k): states[k + 1][0] for k in after_block} | {contract.FINAL: states[-1][0]}


def max_abs_diff(dump: FoundDump, folder: Path, ids: Sequence[int], after_block: Sequence[int]) -> float:
    """Largest difference of any captured value from the reference; infinite for other tokens, shapes or NaN."""
    if dump.tensors[contract.INPUT_IDS].tolist() != list(ids):
        return float("inf")
    rows = torch.cat([torch.arange(start, stop) for start, stop in dump.record["spans"]])
    worst = 0.0
    for name, expected in reference_states(folder, ids, after_block).items():
        found = dump.tensors[name]
        if found.shape != expected[rows].shape or not found.isfinite().all():
            return float("inf")
        worst = max(worst, (found - expected[rows]).abs().max().item())
    return worst
