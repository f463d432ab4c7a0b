"""What keeping less of the states costs: per storage option the bytes a token, the loss, and the served acceptance.

    .venv/bin/python -m benchmarks.storage_options --work .eyas/storage-options

The demo target is captured once by `eyas run`, into a folder. Each option is that dataset written again (reencode.py),
a drafter trained on it for the same steps from the same first weights, judged on the held-out split of the dataset as
it was captured, and served by SGLang on held-out prompts. What is done is kept in the work folder: the same command
goes on after an interruption, and `--options` does some of them at a time.

The last line is one JSON object: `options`, per option `bytes_per_token`, `share` (of the bytes as captured),
`loss_train`, `loss_held_out`, `top1_held_out`, `predicted_acceptance`, `served_acceptance`.
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from drafter.acceptance import simulated_acceptance_length
from drafter.config import DrafterConfig, read_target_config
from drafter.export import export_drafter
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.trainer import Trainer
from hidden_states.dataset import Dataset, list_datasets
from hidden_states.encoding import BFLOAT16, FLOAT8, INT8, PLAIN, TAUGHT, TOP_K, Encoding
from hidden_states.manifest import HELD_OUT, TRAIN
from hidden_states.reencode import reencode
from hidden_states.store import open_store
from hidden_states.stream import SampleStream
from infra.client import SGLangClient, acceptance_length
from infra.recipe import Recipe
from infra.recipe_file import load_recipe
from infra.server import CPU_ENV, CPU_FLAGS, ServerSpec, SGLangServer
from tasks.training import train_config

OPTIONS = {
    "captured": PLAIN,
    "bfloat16": Encoding(BFLOAT16, BFLOAT16),
    "bfloat16, final where taught": Encoding(BFLOAT16, BFLOAT16, TAUGHT),
    "float8": Encoding(FLOAT8, FLOAT8),
    "int8": Encoding(INT8, INT8),
    "int8, final where taught": Encoding(INT8, INT8, TAUGHT),
    "bfloat16, top 32": Encoding(BFLOAT16, TOP_K, TAUGHT, 32),
    "bfloat16, top 128": Encoding(BFLOAT16, TOP_K, TAUGHT, 128),
    "int8, top 32": Encoding(INT8, TOP_K, TAUGHT, 32),
}


def captured(work: Path, conversations: int) -> Dataset:
    """The dataset as captured, by the pipeline itself, once."""
    store = open_store((work / "data").absolute().as_uri())
    found = [dataset for dataset in list_datasets(store) if dataset.name.startswith("captured-v")]
    if not found:
        overrides = [
            "name=captured", f"store.uri={store.uri}", f"data.max_conversations={conversations}",
            "evaluate.enabled=false", "train.max_seconds=5", "dataset.on_complete=reuse",
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "flows.cli", "run", "demo-smollm2", *overrides], check=True)
        found = [dataset for dataset in list_datasets(store) if dataset.name.startswith("captured-v")]
    return found[0]


def train(recipe: Recipe, plain: Dataset, kept: Dataset, folder: Path) -> dict[str, float]:
    """Train on `kept`, judge on the held-out split of `plain`, export to `folder`."""
    target = TargetWeights.load(recipe.target.model_path)
    vocab = plain.vocab_map()
    shape = read_target_config(recipe.target.model_path)
    drafter = Eagle3Drafter(DrafterConfig.from_target(shape, plain.manifest.after_block, len(vocab.d2t)), vocab.d2t)
    drafter.initialise(target.head, recipe.train.seed)

    def stream(dataset: Dataset, split: str, epoch: int) -> SampleStream:
        tokens = recipe.train.batch_tokens
        return SampleStream(dataset, split=split, epoch=epoch, batch_tokens=tokens, top_logits=True)

    losses: list[float] = []
    trainer = Trainer(
        train_config(recipe), drafter, target, lambda epoch: stream(kept, TRAIN, epoch),
        on_step=lambda metrics: losses.append(metrics.loss),
    )  # fmt: skip
    trainer.run()
    figures = trainer.evaluate(stream(plain, HELD_OUT, 0))
    export_drafter(drafter, folder, dtype=torch.float32)
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "loss_train": round(sum(last) / len(last), 4),
        "loss_held_out": round(figures.loss, 4),
        "top1_held_out": round(figures.top1[0], 4),
        "predicted_acceptance": round(
            simulated_acceptance_length(figures.conditional_acceptance[: recipe.evaluate.num_steps]), 4
        ),
    }


def served_acceptance(recipe: Recipe, dataset: Dataset, drafter: Path, prompts: int) -> float:
    """Accepted tokens a verification + 1, over held-out prompts."""
    table = dataset.samples.to_pylist()
    ids = sorted(row["id"] for row in table if row["split"] == HELD_OUT)[:prompts]
    spec = ServerSpec(
        python=Path(recipe.server.python or ""), model_path=recipe.target.model_path,
        flags={**CPU_FLAGS, "tp-size": 1, "dtype": recipe.target.dtype}, env=dict(CPU_ENV),
        log_path=drafter.parent / f"{drafter.name}.log", pid_file=drafter.parent / "sglang.pid",
        draft_path=drafter, num_steps=recipe.evaluate.num_steps,
    )  # fmt: skip
    with SGLangServer(spec) as server:
        server.wait_ready(recipe.server.ready_deadline_s)
        with SGLangClient(server.base_url, timeout_s=recipe.server.request_timeout_s) as client:
            requests = []
            for sample_id in ids:
                tokens, mask = dataset.read_tokens(sample_id)
                prompt = tokens[: mask.index(1)]
                requests.append(client.request(prompt, max_new_tokens=recipe.evaluate.max_new_tokens))
            answers = list(client.generate_many(requests, max_in_flight_tokens=8192, max_in_flight=8))
    histogram = [sum(column) for column in zip_longest(*(a.spec_histogram or [] for a in answers), fillvalue=0)]
    return round(acceptance_length(histogram), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".eyas/storage-options"), help="folder that remembers")
    parser.add_argument("--conversations", type=int, default=160, help="conversations captured")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps of each course")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts served")
    parser.add_argument("--options", nargs="*", default=list(OPTIONS), choices=list(OPTIONS), help="some of them only")
    parser.add_argument("--no-serving", action="store_true", help="bytes and losses only")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(
        "demo-smollm2", [f"train.steps={args.steps}", "train.max_seconds=null", "train.eval_every=100000"]
    )
    plain = captured(args.work, args.conversations)
    head = TargetWeights.load(recipe.target.model_path).head
    store = open_store((args.work / "kept").absolute().as_uri())
    results: dict[str, dict[str, Any]] = {}
    for name in args.options:
        slug = name.replace(", ", "-").replace(" ", "-")
        done = args.work / f"{slug}-{args.steps}.json"
        result = json.loads(done.read_text()) if done.is_file() else {}
        encoding = OPTIONS[name]
        if "loss_held_out" not in result:
            kept = plain if encoding.plain else reencode(plain, store, slug, encoding, head)
            per_token = kept.manifest.total_bytes / kept.manifest.tokens
            result = {
                "bytes_per_token": round(per_token, 1),
                "share": round(per_token / (plain.manifest.total_bytes / plain.manifest.tokens), 3),
                **train(recipe, plain, kept, args.work / f"drafter-{slug}"),
            }
            done.write_text(json.dumps(result))
        if "served_acceptance" not in result and not args.no_serving:
            result["served_acceptance"] = served_acceptance(recipe, plain, args.work / f"drafter-{slug}", args.prompts)
            done.write_text(json.dumps(result))
        results[name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)
    figures = {"steps": args.steps, "tokens": plain.manifest.tokens, "dtype": plain.manifest.dtype}
    print(json.dumps({"options": results, **figures}))


if __name__ == "__main__":
    main()
