"""How a training step's time and memory grow with the document's length, the TTT steps and the draft vocabulary.

    .venv/bin/python -m benchmarks.train_scaling
    .venv/bin/python -m benchmarks.train_scaling --lengths 256,1024 --ttts 3 --vocabs 8192 --recompute

One document per row, 45% of it to learn, sizes of `train_step`. A line per case: seconds of a step (best of `--steps`),
microseconds per token, the process's peak memory, and the query-key pairs of its attention. The
last line is one JSON object with all of them. Time per token may rise with the length only by the
attention: everything else is linear.
"""

import argparse
import json
import multiprocessing
import time
from typing import Any

import torch

from benchmarks.machine import peak_rss_mb, reset_peak_rss
from benchmarks.train_step import DRAFT_VOCAB, TARGET_VOCAB, default_config, fresh, made_up, packed
from drafter.loss import LossConfig
from drafter.objective import Teacher, batch_loss, plan_work


def measure(length: int, ttt: int, vocab: int, steps: int, recompute: bool, threads: int) -> dict[str, Any]:
    """One case, in a process of its own: what an earlier case freed would hide what this one needs."""
    torch.set_num_threads(threads)
    drafter, target = fresh(default_config(vocab), TARGET_VOCAB)
    row = packed(*made_up(1, length))
    teacher, loss = Teacher(target, drafter.draft_ids), LossConfig(out_of_vocab="renormalise")
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        began = time.perf_counter()
        work = plan_work(row, teacher, ttt, loss)
        weights = loss.step_weights(work.scored())
        batch_loss(drafter, row, work, teacher, weights, loss, recompute=recompute)[0].backward()
        optimiser.step()
        optimiser.zero_grad()
        return time.perf_counter() - began

    step()
    reset_peak_rss()
    best = min(step() for _ in range(steps))
    plan = plan_work(row, teacher, ttt, loss).plan
    pairs = sum((end - begin) * (last - first) for blocks in plan.blocks for begin, end, first, last in blocks)
    return {
        "length": length, "ttt": ttt, "draft_vocab": vocab, "step_s": round(best, 4),
        "us_per_token": round(best / length * 1e6, 1), "peak_rss_mb": peak_rss_mb(),
        "slots": sum(map(len, plan.rows)), "attention_pairs": pairs,
    }  # fmt: skip


def main() -> None:
    """Measures every case, one axis at a time from the middle of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--ttts", default="1,3,5,7")
    parser.add_argument("--vocabs", default="2048,8192,32768")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recompute", action="store_true", help="compute each TTT step again in the backward pass")
    args = parser.parse_args()
    lengths, ttts, vocabs = ([int(x) for x in text.split(",")] for text in (args.lengths, args.ttts, args.vocabs))
    cases = [(length, 3, DRAFT_VOCAB) for length in lengths]
    cases += [(512, ttt, DRAFT_VOCAB) for ttt in ttts]
    cases += [(512, 3, vocab) for vocab in vocabs]
    results = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for length, ttt, vocab in dict.fromkeys(cases):
            case = (length, ttt, vocab, args.steps, args.recompute, args.threads)
            results.append(pool.apply(measure, case))
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"benchmark": "train_scaling", "recompute": args.recompute, "cases": results}))


if __name__ == "__main__":
    main()
