"""Capturing through a server against plain transformers. Run: .venv/bin/python -m benchmarks.extraction

The same samples, the same model, the same machine, batch by batch in turns:

    ours           the pipeline's own `extract batch`: send, await, match, check, prove (teacher, norm, statistics, one
                   sample against a reference forward), pack, upload to an S3 server, verify
    transformers   what a Hugging Face back end does: a forward with `output_hidden_states=True`, the same blocks and
                   the final state picked, one file per sample with `torch.save`. Once sample by sample, once in padded
                   batches of 8; the faster of the two over the whole run counts. Nothing is proved or uploaded.

While one works, the other idles. Samples are prompts of the demo with the target's own greedy replies. Prints one JSON
object: `tokens_per_s`, `transformers_tokens_per_s`, `ratio`, and `seconds_by_phase`: where our time goes.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from transformers import AutoModelForCausalLM, PreTrainedModel

from flows.environment import settle, state_dir
from flows.workshop import workshop
from hidden_states.samples import Sample
from infra.recipe import Recipe
from infra.recipe_file import load_recipe
from infra.services import embedded_prefect
from tasks.begin import plan_run
from tasks.capture import clear_warm_up, launch_servers, stop_servers
from tasks.dataset import open_dataset
from tasks.extract import extract_batch
from tasks.job import need, read_events
from tasks.proof import prove_states
from tasks.replies import regenerate_replies

PADDED = 8


class Plain:
    """Transformers, as other trainers capture with it."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        path = recipe.target.model_path
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.blocks, self.folder = recipe.capture.blocks, folder
        folder.mkdir()

    @torch.no_grad()
    def one_by_one(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            states = self.model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
            self._save(sample, [state[0] for state in states])

    @torch.no_grad()
    def padded(self, samples: Sequence[Sample]) -> None:
        ordered = sorted(samples, key=len)
        for start in range(0, len(ordered), PADDED):
            group = ordered[start : start + PADDED]
            longest = max(map(len, group))
            ids = torch.tensor([s.input_ids + [0] * (longest - len(s)) for s in group])
            mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in group])
            states = self.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            for row, sample in enumerate(group):
                self._save(sample, [state[row, : len(sample)] for state in states])

    def _save(self, sample: Sample, states: Sequence[torch.Tensor]) -> None:
        # Entry i is what block i reads, so the output of block b is entry b + 1; the last one is after the final norm.
        kept = {f"after_block_{block}": states[block + 1].clone() for block in self.blocks}
        kept |= {"final": states[-1].clone(), "input_ids": torch.tensor(sample.input_ids)}
        torch.save(kept, self.folder / f"{sample.id}.pt")


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@flow(name="benchmark extraction", persist_result=False)
def compare(recipe: str, overrides: list[str], batches: int, folder: str) -> dict[str, Any]:
    """Both, batch by batch."""
    seconds = {"ours": 0.0, "one by one": 0.0, f"padded batches of {PADDED}": 0.0}
    tokens = done = 0
    with workshop(load_recipe(recipe, overrides)) as job:
        plan_run(job)
        try:
            launch_servers(job)
            clear_warm_up(job)
            regenerate_replies(job)
            ids = open_dataset(job)[: batches + 1]
            prove_states(job)
            plain = Plain(job.recipe, Path(folder) / "plain")
            for number, batch_id in enumerate(ids):
                batch = need(job.batches, "batches")[batch_id]

                parts: list[tuple[str, Callable[[], Any]]] = [
                    ("ours", partial(extract_batch, job, batch_id)),
                    ("one by one", partial(plain.one_by_one, batch.samples)),
                    (f"padded batches of {PADDED}", partial(plain.padded, batch.samples)),
                ]
                turn = number % len(parts)  # nobody is always first
                took = {name: timed(work) for name, work in parts[turn:] + parts[:turn]}
                if number:  # the first batch warms everybody up
                    tokens += batch.tokens
                    done += 1
                    seconds = {name: seconds[name] + took[name] for name in seconds}
        finally:
            stop_servers(job)
        stored = [entry["seconds"] for entry in read_events(job.folder, "batch stored")][1:]
        need(job.tracker, "MLflow run").close("FINISHED")
    fastest = min(list(seconds)[1:], key=lambda name: seconds[name])
    inside = {phase: round(sum(laps[phase] for laps in stored), 2) for phase in stored[0]}
    inside["orchestration"] = round(seconds["ours"] - sum(inside.values()), 2)
    return {
        "target": job.target_name, "batches": done, "tokens": tokens,
        "tokens_per_s": round(tokens / seconds["ours"], 1),
        "transformers_tokens_per_s": round(tokens / seconds[fastest], 1),
        "ratio": round(seconds[fastest] / seconds["ours"], 3),
        "transformers_was": fastest,
        "seconds": {name: round(value, 2) for name, value in seconds.items()}, "seconds_by_phase": inside,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo-smollm2")
    parser.add_argument("--batches", type=int, default=8, help="measured; one more warms up")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    torch.set_num_threads(2)
    samples = 40 * (options.batches + 1)
    overrides = [
        f"data.max_conversations={samples}", "dataset.name=benchmark-extraction", "dataset.on_complete=new",
        "store.uri=s3://eyas/benchmarks",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EYAS_HOME"] = str(Path(folder) / "state")  # a store without an earlier run's batches
        settle()
        with embedded_prefect(state_dir()) as url, temporary_settings({PREFECT_API_URL: url}):
            os.environ["PREFECT_API_URL"] = url  # the threads of a run do not know the setting
            answer = compare(options.recipe, [*overrides, *options.overrides], options.batches, folder)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
