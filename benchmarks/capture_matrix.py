"""Are captured states right? Tiny models of each family, every shape of prefill, against transformers in float32.

    python -m benchmarks.capture_matrix [--kinds deepseek_v3 llama ...]

The last line is one JSON object: `cases` compared, `failed` (max abs diff above 1e-5, or a dump that is missing,
incomplete without cause, or of other tokens), `max_abs_diff`, and `bfloat16_different`: values that differ from what
SGLang's own return of hidden states gives for the same prompts, bit for bit.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import tiny_kimi
from benchmarks.capture_server import Served, capture_server, max_abs_diff, prompt
from eyas_capture import contract
from tests.tiny_models import BLOCKS, KINDS, make_tiny

TOLERANCE = 1e-5
AFTER_BLOCK = (1, 2, 4)
ENV = {contract.ENV_AFTER_BLOCK: ",".join(map(str, AFTER_BLOCK))}
LENGTHS = (7, 33, 64, 65, 130, 190, 257, 1)  # on, before and behind the edges of chunks of 64
TP2_ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

Case = tuple[str, float]


def compare(served: Served, model: Path, name: str, prompts: dict[str, list[int]]) -> Iterator[Case]:
    """One case per prompt: its dump, complete, against the reference."""
    for rid, dump in served.wait_for(prompts).items():
        diff = max_abs_diff(dump, model, prompts[rid], AFTER_BLOCK) if dump.record["complete"] else float("inf")
        yield f"{name} {rid}", diff


def whole_prompts(served: Served, model: Path) -> Iterator[Case]:
    """Alone, eight at once, and the prefix cache with shared prefixes."""
    alone = {f"alone-{n}": prompt(n, 1) for n in (1, 96)}
    for rid, ids in alone.items():
        served.ask(ids, rid)
    yield from compare(served, model, "alone", alone)

    eight = {f"eight-{n}": prompt(n, 2) for n in LENGTHS}
    served.ask_at_once(eight, new_tokens=3)
    yield from compare(served, model, "8 at once", eight)

    base = prompt(120, 3)
    shared = {f"{contract.OPT_IN_PREFIX}shared-{n}": base[:80] + prompt(n, 4) for n in (5, 40)}
    served.ask(base, "base")
    # With a key of its own a request hits nothing, though the cache holds its prefix; without one it does, and says so.
    for rid, ids in shared.items():
        served.ask(ids, rid, extra_key=rid)
    yield from compare(served, model, "radix, own key", shared)
    served.ask(base + prompt(9, 5), "hit")
    hit = served.wait_for(["hit"])["hit"]
    honest = not hit.record["complete"] and hit.record["incomplete_reason"] == contract.PREFIX_CACHE
    honest &= hit.record["prefix_cached"] > 0 and hit.record["spans"][0][0] == hit.record["prefix_cached"]
    yield "radix, hit", max_abs_diff(hit, model, base + prompt(9, 5), AFTER_BLOCK) if honest else float("inf")


def chunked_and_mixed(served: Served, model: Path) -> Iterator[Case]:
    """Chunks of 64, and prefill chunks in the same pass as other requests' decoding."""
    chunked = {f"chunked-{n}": prompt(n, 6) for n in LENGTHS}
    served.ask_at_once(chunked)
    yield from compare(served, model, "chunked at 64", chunked)

    mixed = {f"mixed-{n}": prompt(n, 7) for n in LENGTHS}
    with ThreadPoolExecutor(3) as pool:  # requests that decode while the others' chunks are prefilled
        decoding = [pool.submit(served.ask, prompt(12, n), f"decoding-{n}", 120) for n in range(3)]
        served.ask_at_once(mixed, new_tokens=8)
        for future in decoding:
            future.result()
    yield from compare(served, model, "mixed", mixed | {f"decoding-{n}": prompt(12, n) for n in range(3)})


def two_ranks(served: Served, model: Path) -> Iterator[Case]:
    """Tensor parallel: one writer, whole rows."""
    both = {f"tp2-{n}": prompt(n, 8) for n in LENGTHS}
    served.ask_at_once(both, new_tokens=2)
    yield from compare(served, model, "tp 2", both)
    yield "tp 2, one writer", 0.0 if len(served.writers()) == 1 else float("inf")


def run_kind(kind: str, work: Path) -> Iterator[Case]:
    """All cases of one family."""
    model, reference = _models(kind, work / kind / "model")
    for name, flags, env, cases in (
        ("whole", {}, {}, whole_prompts),
        ("chunks", {"chunked-prefill-size": 64, "enable-mixed-chunk": True}, {}, chunked_and_mixed),
        ("tp2", {"tp-size": 2}, TP2_ENV, two_ranks),
    ):
        with capture_server(model, work / kind / name, flags=flags, env=ENV | env) as served:
            yield from ((f"{kind}: {case}", diff) for case, diff in cases(served, reference))


def _models(kind: str, folder: Path) -> tuple[Path, Path]:
    """What to serve, and what to compare with."""
    if kind == tiny_kimi.KIND:
        return tiny_kimi.make_tiny_kimi(folder)
    model = make_tiny(kind, folder)
    return model, model


def bfloat16_different(kind: str, work: Path) -> int:
    """Values in bfloat16 dumps that are not, bit for bit, what SGLang itself returns for the same prompt.

    The final state comes from the same server (`return_hidden_states`), the blocks' outputs from a second server that
    runs SGLang's own aux return without the plugin.
    """
    model = make_tiny(kind, work / f"{kind}-bf16" / "model", dtype="bfloat16")
    prompts = {f"bf16-{n}": prompt(n, 9) for n in (1, 33, 130)}
    flags: dict[str, Any] = {"dtype": "bfloat16", "enable-return-hidden-states": True, "disable-radix-cache": True}
    points = [k + 1 for k in AFTER_BLOCK] if kind.startswith("deepseek") else list(AFTER_BLOCK)
    stock = {
        "enable-return-aux-hidden-states": True,
        "speculative-algorithm": "EAGLE3",
        "return-aux-hidden-state-layer-ids": points,
    }

    def returned(served: Served) -> dict[str, torch.Tensor]:
        answers = {rid: served.ask(ids, rid, return_hidden_states=True) for rid, ids in prompts.items()}
        # One entry a pass: the prompt's rows come first.
        return {rid: torch.tensor(answer["meta_info"]["hidden_states"][0]) for rid, answer in answers.items()}

    with capture_server(model, work / f"{kind}-bf16" / "plugin", flags=flags, env=ENV) as served:
        final = returned(served)
        dumps = served.wait_for(prompts)
    with capture_server(model, work / f"{kind}-bf16" / "stock", flags=flags | stock, capture=False) as served:
        aux = returned(served)
    different = 0
    for rid, dump in dumps.items():
        blocks = torch.cat([dump.tensors[contract.block_tensor(k)] for k in AFTER_BLOCK], dim=-1)
        for found, expected in ((dump.tensors[contract.FINAL], final[rid]), (blocks, aux[rid])):
            expected = expected.reshape(found.shape[0], -1)
            if found.shape != expected.shape or found.dtype != torch.bfloat16:
                different += found.numel()
            else:
                different += int((found.float() != expected).sum())
    return different


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, tiny_kimi.KIND])
    kinds = parser.parse_args().kinds
    assert AFTER_BLOCK[-1] < BLOCKS - 1
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as work:
        for kind in kinds:
            for case, diff in run_kind(kind, Path(work)):
                print(f"{case}: {diff:.1e}", flush=True)
                cases.append((case, diff))
        different = {kind: bfloat16_different(kind, Path(work)) for kind in kinds if kind in ("deepseek_v3", "llama")}
    failed = [case for case, diff in cases if not diff <= TOLERANCE]
    result = {
        "cases": len(cases),
        "failed": len(failed),
        "max_abs_diff": max(diff for _, diff in cases),
        "failed_cases": failed,
        "bfloat16_different": different,
        "tolerance": TOLERANCE,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
