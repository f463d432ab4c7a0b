"""Speed of one training step: forward pass, loss, backward pass, clipping and AdamW on one packed row.

    .venv/bin/python -m benchmarks.train_step --ttt 3
    .venv/bin/python -m benchmarks.train_step --ttt 7 --share 0.1           # 10% of the tokens to learn
    .venv/bin/python -m benchmarks.train_step --batch B --weights W --target DIR --peer-loss automodel

Without files it makes a batch of the reported configuration (hidden 576, intermediate 1536, 9 query and 3 key/value
heads of 64, draft vocabulary 8192 of 49152, 2 documents of 512 tokens, 45% of them to learn) from random numbers: time
does not depend on the values. With files, any trainer can be run on the very same tensors:

    batch file     input_ids [B,S], loss_mask [B,S], aux [B,S,3H], final_postnorm or final [B,S,H], unshifted
                   (or all of them without B)
    weights file   midlayer.*, fc.weight, norm.weight, lm_head.weight, d2t
    target         Hugging Face folder: the frozen embedding and head

`--peer-loss automodel` uses that trainer's definition, so that the losses of every step can be compared: slot i counts
at step k when token i+1+k is to learn, and the step weights are divided by their sum.

The last line is one JSON object: tokens_per_s (median), peak_rss_mb (since the end of warm-up), losses (every step,
warm-up included), and the floor: the time the matrix products alone need at the rate measured just before.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.machine import matrix_rate, peak_rss_mb, reset_peak_rss
from drafter.batch import Row
from drafter.config import DrafterConfig
from drafter.loss import LossConfig
from drafter.memory import freed_memory_kept
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.objective import Teacher, Work, batch_loss, plan_work, work_for

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
TARGET_VOCAB, DRAFT_VOCAB = 49152, 8192


def packed(ids: Tensor, mask: Tensor, aux: Tensor, final: Tensor) -> Row:
    """[B, S] tensors as one row of B documents; without the first axis one document."""
    if ids.dim() == 1:
        ids, mask, aux, final = ids[None], mask[None], aux[None], final[None]
    batch, length = ids.shape
    return Row(
        ids.reshape(-1), mask.reshape(-1), aux.reshape(batch * length, -1, final.shape[-1]),
        final.reshape(batch * length, -1), torch.arange(batch).repeat_interleave(length),
        torch.arange(length).repeat(batch), [f"document-{i}" for i in range(batch)],
    )  # fmt: skip


def learn_share(mask: Tensor, share: float) -> Tensor:
    """Another mask [B, S] of which the last `share` of every document is to learn (a long prompt, one reply)."""
    out = torch.zeros_like(mask)
    length = mask.shape[1]
    out[:, round(length * (1 - share)) :] = 1
    return out


def made_up(batch: int, length: int, hidden: int = HIDDEN, vocab: int = TARGET_VOCAB) -> tuple[Tensor, ...]:
    """input_ids, loss_mask, aux, final of random documents with 45% of their tokens to learn, in turns."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (batch, length), generator=generator)
    turn = torch.arange(length) % 100
    mask = (turn >= 55).long().repeat(batch, 1)
    aux = torch.randn(batch, length, 3 * hidden, generator=generator)
    return ids, mask, aux, torch.randn(batch, length, hidden, generator=generator)


def fresh(config: DrafterConfig, vocab: int) -> tuple[Eagle3Drafter, TargetWeights]:
    """A drafter and a target of random numbers."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab, config.hidden_size, generator=generator) * 0.1
    # Every other id: a draft vocabulary that holds the arg-max of every token would be too kind, none of them useless.
    target = TargetWeights(embedding, embedding)
    chosen = torch.arange(config.draft_vocab_size) * (vocab // config.draft_vocab_size)
    drafter = Eagle3Drafter(config, chosen - torch.arange(len(chosen)))
    drafter.initialise(target.head, seed=0)
    return drafter, target


def default_config(draft_vocab: int = DRAFT_VOCAB) -> DrafterConfig:
    """The configuration to report."""
    return DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, rms_norm_eps=1e-5, vocab_size=TARGET_VOCAB, draft_vocab_size=draft_vocab,
        max_position_embeddings=32768, rope={"rope_type": "default", "rope_theta": 100000.0}, after_block=(1, 14, 26),
        target_architecture="LlamaForCausalLM", target_blocks=30,
    )  # fmt: skip


def automodel_counted(row: Row, steps: int) -> Tensor:
    """bool [K, N]: that trainer's rule, which asks only for the token the teacher sits on."""
    n = len(row.loss_mask)
    counted = torch.zeros(steps, n, dtype=torch.bool)
    for k in range(steps):
        counted[k, : n - 1 - k] = row.loss_mask[1 + k :].bool() & (row.doc_ids[1 + k :] == row.doc_ids[: n - 1 - k])
    return counted


def floor_seconds(config: DrafterConfig, row: Row, work: Work, rate: float) -> float:
    """Seconds the matrix products of one step need at `rate` operations a second: three products per weight (forward,
    and two gradients), each multiply-add two operations, no operand made twice, nothing else."""
    h, i, d = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    plan = work.plan
    context, computed, scored = len(plan.context), sum(map(len, plan.rows)), sum(work.scored())
    seen = len(row.input_ids.unique())
    products: float = 2 * 2 * context * config.states_width * h  # fc: its input needs no gradient
    products += 3 * 2 * context * h * 2 * kv + 2 * 2 * seen * h * (q + 2 * kv)  # step 0 keys, values; embedding half
    products += 3 * 2 * computed * (h * q + q * h + 3 * h * i) + 3 * 2 * (computed - len(plan.rows[0])) * h * 2 * kv
    products += 3 * 2 * scored * h * d + 2 * (scored // plan.steps + plan.steps) * h * d  # head; teacher
    keys = sum((e - b) * (last - first) for blocks in plan.blocks for b, e, first, last in blocks)
    products += 2 * 2 * 3.5 * keys * q / 2  # half of each block lies in the future at most
    return products / rate


def main() -> None:
    """Runs the steps and prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ttt", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--share", type=float, help="share of the tokens to learn, at the end of each document")
    parser.add_argument("--batch", type=Path, metavar="FILE")
    parser.add_argument("--weights", type=Path, metavar="FILE")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--peer-loss", choices=["automodel"])
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    with freed_memory_kept():
        measure(args, parser)


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Takes the steps."""
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)

    config = default_config()
    drafter, target = fresh(config, TARGET_VOCAB)
    if args.batch:
        if not (args.weights and args.target):
            parser.error("--batch needs --weights and --target")
        tensors, weights = load_file(args.batch), load_file(args.weights)
        final = tensors["final_postnorm"] if "final_postnorm" in tensors else tensors["final"]
        parts = (tensors["input_ids"], tensors["loss_mask"], tensors["aux"], final)
        drafter = Eagle3Drafter(config.with_draft_vocab(len(weights["d2t"])), weights["d2t"])
        drafter.load_state_dict({n: v for n, v in weights.items() if n != "t2d"})
        target = TargetWeights.load(args.target)
        config = drafter.config
    else:
        parts = made_up(args.documents, args.length)  # type: ignore[assignment]
    ids, mask, aux, final = parts
    if args.share is not None:
        mask = learn_share(mask, args.share)
    row = packed(ids, mask, aux, final)
    teacher = Teacher(target.to("cpu", dtype), drafter.draft_ids)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    # Random states' arg-max is seldom in the draft vocabulary; the made-up batch must not be dropped for that.
    loss = LossConfig(out_of_vocab="drop" if args.batch else "renormalise")

    def plan() -> Work:
        if args.peer_loss == "automodel":
            return work_for(automodel_counted(row, args.ttt), row, teacher, loss)
        return plan_work(row, teacher, args.ttt, loss)

    scale = 1.0 / sum(loss.decay**j for j in range(args.ttt)) if args.peer_loss == "automodel" else 1.0

    def step() -> float:
        work = plan()
        weights = [w * scale for w in loss.step_weights(work.scored())]
        value, _ = batch_loss(drafter, row, work, teacher, weights, loss, dtype)
        value.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return float(value.detach())

    rate = matrix_rate(dtype)
    losses, seconds, cpu_seconds = [], [], []
    for n in range(args.warmup + args.steps):
        if n == args.warmup:
            reset_peak_rss()
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(round(step(), 6))
        if n >= args.warmup:
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.process_time() - cpu_began)
    peak = peak_rss_mb()
    work = plan()
    floor = floor_seconds(config, row, work, rate)
    tokens, median = ids.numel(), statistics.median(seconds)
    print(
        json.dumps(
            {
                "benchmark": "train_step", "tokens_per_s": round(tokens / median, 1),
                "best_tokens_per_s": round(tokens / min(seconds), 1),
                "tokens_per_cpu_s": round(tokens / statistics.median(cpu_seconds), 1), "peak_rss_mb": peak,
                "losses": losses, "ttt": args.ttt, "dtype": args.dtype, "batch": int(row.doc_ids[-1]) + 1,
                "length": ids.shape[-1],
                "counted_share": round(float(work.counted[0].float().mean()), 4), "scored_per_step": work.scored(),
                "step_s": [round(s, 4) for s in seconds], "threads": args.threads,
                "matrix_gflops": round(rate / 1e9, 1),
                "floor_s": round(floor, 4), "share_of_floor": round(floor / min(seconds), 3),
                "parameters": sum(p.numel() for p in drafter.parameters()), "torch": torch.__version__,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
