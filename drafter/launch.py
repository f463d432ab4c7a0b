"""Trains a drafter on a committed dataset, on as many ranks as it is started on.

    torchrun --nproc-per-node 8 -m drafter.launch course.json        one machine
    python -m drafter.launch course.json                             one process

course.json, paths as every machine sees them:

    {"dataset": "s3://bucket/prefix/name", "target": "/models/target", "checkpoints": "/shared/training",
     "export": "/shared/drafter", "batch_tokens": 8192, "seed": 0,
     "train": {"ttt_steps": 7, "epochs": 2, "dtype": "bfloat16", "schedule": {"lr": 1e-4, "kind": "wsd"}},
     "drafter": {"latent_attention": true}, "store": {"endpoint_url": "..."}, "cache_dir": "/local/cache"}

The last four may be left out. Asked to end (SIGTERM), it saves and ends with exit code 75; the same command goes on,
with any number of ranks. The best drafter by simulated acceptance is exported; the last line on stdout is one JSON
object.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drafter.acceptance import Figures
from drafter.config import DrafterConfig, read_target_config
from drafter.course import StepMetrics, TrainConfig
from drafter.export import export_drafter
from drafter.loss import LossConfig
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.ranks import leave
from drafter.schedule import Schedule
from drafter.trainer import STOPPED_EXIT_CODE, Trainer, stop_on_sigterm
from hidden_states.dataset import Dataset
from hidden_states.errors import Refusal, TrainingError
from hidden_states.final_norm import FinalNorm
from hidden_states.manifest import HELD_OUT, TRAIN
from hidden_states.stream import SampleStream

_NEEDED = ("dataset", "target", "checkpoints", "export", "batch_tokens", "train")
_OPTIONAL = ("seed", "drafter", "store", "cache_dir")


def read_course(path: Path) -> dict[str, Any]:
    """The file's values, the optional ones filled in.

    Raises: TrainingError for a file that is none, or keys that are missing or unknown.
    """
    try:
        course = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(str(path), f"it cannot be read ({error})", "a course: a JSON object", "") from error
    if not isinstance(course, dict):
        raise TrainingError(str(path), f"no object ({type(course).__name__})", "a course: a JSON object", "")
    wrong = [f"{k} is missing" for k in _NEEDED if k not in course]
    wrong += [f"{k} is not known" for k in course if k not in _NEEDED + _OPTIONAL]
    if wrong:
        raise TrainingError(str(path), "; ".join(wrong), f"{', '.join(_NEEDED)}; perhaps {', '.join(_OPTIONAL)}", "")
    return {"seed": 0, "drafter": {}, "store": {}, "cache_dir": None, **course}


def train_config(given: dict[str, Any]) -> TrainConfig:
    """A `TrainConfig` from JSON: `loss` and `schedule` are objects of their own fields.

    Raises: TrainingError for a field that is unknown or of another kind.
    """
    try:
        nested = {"loss": LossConfig(**given.get("loss", {})), "schedule": Schedule(**given.get("schedule", {}))}
        return TrainConfig(**{**given, **nested, "betas": tuple(given.get("betas", TrainConfig.betas))})
    except (TypeError, AttributeError) as error:
        raise TrainingError(
            "course, train", f"{given} ({error})", "fields of TrainConfig, LossConfig and Schedule", ""
        ) from error


def train(course: dict[str, Any], device: torch.device) -> int:
    """One rank's share of the training; the process's exit code."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dataset = Dataset.open_uri(course["dataset"], **course["store"])
    target, vocab = TargetWeights.load(course["target"]), dataset.vocab_map()
    shape = read_target_config(course["target"])
    config = DrafterConfig.from_target(shape, dataset.manifest.after_block, len(vocab.d2t), **course["drafter"])
    drafter = Eagle3Drafter(config, vocab.d2t)
    drafter.initialise(target.head, course["seed"])
    norm = FinalNorm.load(course["target"]) if dataset.manifest.final_norm == "pre" else None

    def stream(split: str, epoch: int) -> SampleStream:
        return SampleStream(
            dataset, split=split, seed=course["seed"], epoch=epoch, rank=rank, world=ranks, norm=norm, top_logits=True,
            batch_tokens=course["batch_tokens"], cache_dir=course["cache_dir"] and Path(course["cache_dir"]),
        )  # fmt: skip

    def say(metrics: StepMetrics) -> None:
        if rank == 0:
            print(f"step {metrics.step}: loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s", flush=True)

    def say_held_out(step: int, figures: Figures) -> None:
        if rank == 0:
            print(f"step {step}: held out: simulated acceptance {figures.acceptance_length:.3f}", flush=True)

    with stop_on_sigterm() as stop:
        trainer = Trainer(
            train_config(course["train"]), drafter.to(device), target, lambda epoch: stream(TRAIN, epoch),
            course["checkpoints"], validation=lambda: stream(HELD_OUT, 0), on_step=say, on_validation=say_held_out,
            stop=stop,
        )  # fmt: skip
        result = trainer.run()
    if result.stopped:
        return STOPPED_EXIT_CODE
    if rank == 0:
        assert trainer.folder is not None
        best = trainer.folder.load_best()
        if best is None:
            raise TrainingError(
                course["dataset"], "no held-out samples", "some", "Commit the dataset with a held-out share."
            )
        finished = Eagle3Drafter(config, vocab.d2t)
        finished.load_state_dict(best[0])
        export_drafter(finished, course["export"], dtype=dataset.manifest.layout(0).torch_dtype)
        print(json.dumps({"ranks": ranks, "export": course["export"], **asdict(result)}), flush=True)
    return 0


def main() -> None:
    """Joins the group that torchrun describes, if any, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("course", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        code = train(read_course(args.course), device)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        code = 1
    leave(code)


if __name__ == "__main__":
    main()
