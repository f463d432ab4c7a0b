"""Are captured states right? Tiny models of each family, every shape of prefill, against transformers in float32.

    python -m benchmarks.capture_matrix [--kinds deepseek_v3 llama ...]

The last line is one JSON object: `cases` compared, `failed` (max abs diff above 1e-5, or a dump that is missing,
incomplete without cause, or of other tokens), `max_abs_diff`, and `bfloat16_different`: values that are not, bit for
bit, what SGLang's own return of hidden states gives for the same prompts (of `bfloat16_compared`). A family with such
values counts as a failed case. Prompts are such that float32 decides which experts a token goes to (`settled_prompt`).
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
from benchmarks.capture_server import Served, capture_server, max_abs_diff, prompt, settled_prompt
from eyas_capture import contract
from tests.tiny_models import BLOCKS, KINDS, make_tiny

TOLERANCE = 1e-5
AFTER_BLOCK = (1, 2, 4)
ENV = {contract.ENV_AFTER_BLOCK: ",".join(map(str, AFTER_BLOCK))}
LENGTHS = (7, 33, 64, 65, 130, 190, 257, 1)  # on, before and behind the edges of chunks of 64
TWO_RANKS_ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # without it SGLang wants a NUMA node for each rank
ALL_KINDS = (*KINDS, *tiny_kimi.KINDS)
INFINITE = float("inf")

Case = tuple[str, float]


def compare(served: Served, model: Path, name: str, prompts: dict[str, list[int]]) -> Iterator[Case]:
    """One case per prompt: its dump, complete, against the reference."""
    for rid, dump in served.wait_for(prompts).items():
        diff = max_abs_diff(dump, model, prompts[rid], AFTER_BLOCK) if dump.record["complete"] else INFINITE
        yield f"{name} {rid}", diff


def whole_prompts(served: Served, model: Path) -> Iterator[Case]:
    """Alone, eight at once, and the prefix cache with shared prefixes."""
    alone = {f"alone-{n}": settled_prompt(model, n, 1) for n in (1, 96)}
    for rid, ids in alone.items():
        served.ask(ids, rid)
    yield from compare(served, model, "alone", alone)

    eight = {f"eight-{n}": settled_prompt(model, n, 2) for n in LENGTHS}
    # One message, so that all eight are in the same pass however busy the machine is.
    served.post({"input_ids": [*eight.values()], "rid": [*eight], "sampling_params": {"max_new_tokens": 3}})
    yield from compare(served, model, "8 in a pass", eight)

    several = {f"several-{n}": settled_prompt(model, n, 10) for n in LENGTHS}
    served.ask_at_once(several, new_tokens=3)
    yield from compare(served, model, "8 clients", several)

    base = settled_prompt(model, 120, 3)
    shared = {f"{contract.OPT_IN_PREFIX}shared-{n}": settled_prompt(model, n, 4, base[:80]) for n in (5, 40)}
    served.ask(base, "base")
    # With a key of its own a request hits nothing, though the cache holds its prefix; without one it does, and says so.
    for rid, ids in shared.items():
        served.ask(ids, rid, extra_key=rid)
    yield from compare(served, model, "radix, own key", shared)
    hit_ids = settled_prompt(model, 9, 5, base)
    served.ask(hit_ids, "hit")
    hit = served.wait_for(["hit"])["hit"]
    honest = not hit.record["complete"] and hit.record["incomplete_reason"] == contract.PREFIX_CACHE
    honest &= hit.record["prefix_cached"] > 0 and hit.record["spans"][0][0] == hit.record["prefix_cached"]
    yield "radix, hit", max_abs_diff(hit, model, hit_ids, AFTER_BLOCK) if honest else INFINITE


def chunked_and_mixed(served: Served, model: Path) -> Iterator[Case]:
    """Chunks of 64, and prefill chunks in the same pass as other requests' decoding."""
    chunked = {f"chunked-{n}": settled_prompt(model, n, 6) for n in LENGTHS}
    served.ask_at_once(chunked)
    yield from compare(served, model, "chunked at 64", chunked)

    mixed = {f"mixed-{n}": settled_prompt(model, n, 7) for n in LENGTHS}
    decoding = {f"decoding-{n}": settled_prompt(model, 12, n) for n in range(3)}
    with ThreadPoolExecutor(3) as pool:  # requests that decode while the others' chunks are prefilled
        running = [pool.submit(served.ask, ids, rid, 120) for rid, ids in decoding.items()]
        served.ask_at_once(mixed, new_tokens=8)
        for future in running:
            future.result()
    yield from compare(served, model, "mixed", mixed | decoding)


def two_ranks(served: Served, model: Path) -> Iterator[Case]:
    """Tensor parallel, without overlap scheduling: one writer, whole rows.

    The final state is also compared, bit for bit, with what the server itself returns: where both differ from the
    reference alike, it is the server's arithmetic and not the capture.
    """
    both = {f"tp2-{n}": settled_prompt(model, n, 8) for n in LENGTHS}
    answers = served.ask_at_once(both, new_tokens=2, return_hidden_states=True)
    yield from compare(served, model, "tp 2", both)
    for rid, dump in served.wait_for(both).items():
        returned = torch.tensor(answers[rid]["meta_info"]["hidden_states"][0])  # one entry a pass, the prompt's first
        same = torch.equal(dump.tensors[contract.FINAL].flatten(), returned.flatten())
        yield f"tp 2, as returned {rid}", 0.0 if same else INFINITE
    yield "tp 2, one writer", 0.0 if len(served.writers()) == 1 else INFINITE


def two_replicas(served: Served, model: Path) -> Iterator[Case]:
    """Data parallel: each replica has a writer and a counter of its own."""
    both = {f"dp2-{n}": settled_prompt(model, n, 11) for n in LENGTHS}
    served.ask_at_once(both, new_tokens=2)
    yield from compare(served, model, "dp 2", both)
    ranks = sorted(writer["dp_rank"] for writer in served.writers())
    by_writer: dict[str, list[int]] = {}
    for dump in served.dumps():
        by_writer.setdefault(dump.record["writer_id"], []).append(dump.record["counter"])
    counted = all(counters == list(range(len(counters))) for counters in by_writer.values())
    yield "dp 2, two writers", 0.0 if ranks == [0, 1] and len(by_writer) == 2 and counted else INFINITE


def run_kind(kind: str, work: Path) -> Iterator[Case]:
    """All float32 cases of one family."""
    model, reference = _models(kind, work / kind / "model")
    for name, flags, env, cases in (
        ("whole", {}, {}, whole_prompts),
        ("chunks", {"chunked-prefill-size": 64, "enable-mixed-chunk": True}, {}, chunked_and_mixed),
        (
            "tp2",
            {"tp-size": 2, "disable-overlap-schedule": True, "enable-return-hidden-states": True},
            TWO_RANKS_ENV,
            two_ranks,
        ),
        ("dp2", {"dp-size": 2}, TWO_RANKS_ENV, two_replicas),
    ):
        with capture_server(model, work / kind / name, flags=flags, env=ENV | env) as served:
            yield from ((f"{kind}: {case}", diff) for case, diff in cases(served, reference))


def _models(kind: str, folder: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """What to serve, and what to compare with."""
    if kind in tiny_kimi.KINDS:
        return tiny_kimi.make_tiny_kimi(kind, folder, dtype)
    model = make_tiny(kind, folder, dtype=dtype)
    return model, model


def bfloat16(kind: str, work: Path) -> tuple[int, int]:
    """Values in bfloat16 dumps that are not, bit for bit, what SGLang itself returns; (different, compared).

    The final state comes from the same server (`return_hidden_states`), the blocks' outputs from a second server that
    runs SGLang's own aux return without the plugin.
    """
    model, _ = _models(kind, work / kind / "bfloat16" / "model", "bfloat16")
    prompts = {f"bf16-{n}": prompt(n, 9) for n in (1, 33, 130)}
    flags: dict[str, Any] = {"dtype": "bfloat16", "enable-return-hidden-states": True, "disable-radix-cache": True}
    deepseek = kind.startswith(("deepseek", "kimi"))  # deepseek_v2.py takes ids as they are, the other files add 1
    stock = {
        "enable-return-aux-hidden-states": True,
        "speculative-algorithm": "EAGLE3",
        "return-aux-hidden-state-layer-ids": [k + 1 if deepseek else k for k in AFTER_BLOCK],
    }

    def returned(served: Served) -> dict[str, torch.Tensor]:
        answers = {rid: served.ask(ids, rid, return_hidden_states=True) for rid, ids in prompts.items()}
        # One entry a pass: the prompt's rows come first.
        return {rid: torch.tensor(answer["meta_info"]["hidden_states"][0]) for rid, answer in answers.items()}

    with capture_server(model, work / kind / "bfloat16" / "plugin", flags=flags, env=ENV) as served:
        final = returned(served)
        dumps = served.wait_for(prompts)
    with capture_server(model, work / kind / "bfloat16" / "stock", flags=flags | stock, capture=False) as served:
        aux = returned(served)
    different = compared = 0
    for rid, dump in dumps.items():
        blocks = torch.cat([dump.tensors[contract.block_tensor(k)] for k in AFTER_BLOCK], dim=-1)
        for found, expected in ((dump.tensors[contract.FINAL], final[rid]), (blocks, aux[rid])):
            expected = expected.reshape(found.shape[0], -1)
            compared += found.numel()
            if found.shape != expected.shape or found.dtype != torch.bfloat16:
                different += found.numel()
            else:
                different += int((found.float() != expected).sum())
    return different, compared


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=ALL_KINDS, choices=ALL_KINDS)
    kinds = parser.parse_args().kinds
    assert AFTER_BLOCK[-1] < BLOCKS - 1
    cases: list[Case] = []
    different: dict[str, int] = {}
    values = 0
    with tempfile.TemporaryDirectory() as work:
        for kind in kinds:
            for case, diff in run_kind(kind, Path(work)):
                print(f"{case}: {diff:.1e}", flush=True)
                cases.append((case, diff))
            different[kind], compared = bfloat16(kind, Path(work))
            values += compared
            print(f"{kind}: bfloat16: {different[kind]} of {compared} values differ", flush=True)
    failed = [case for case, diff in cases if not diff <= TOLERANCE]
    failed += [f"{kind}: bfloat16" for kind, count in different.items() if count]
    result = {
        "cases": len(cases) + len(different),
        "failed": len(failed),
        "max_abs_diff": max(diff for _, diff in cases),
        "failed_cases": failed,
        "bfloat16_different": different,
        "bfloat16_compared": values,
        "tolerance": TOLERANCE,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
