"""Trains a drafter on a committed dataset, on as many ranks as it is started on.

    torchrun --nproc-per-node 8 --shutdown-timeout 300 -m drafter.launch course.json        one machine
    python -m drafter.launch course.json                                                    one process

course.json, paths as every machine sees them:

    {"dataset": "s3://bucket/prefix/name", "target": "/models/target", "checkpoints": "/shared/training",
     "export": "/shared/drafter", "batch_tokens": 8192, "seed": 0,
     "train": {"ttt_steps": 7, "epochs": 2, "dtype": "bfloat16", "schedule": {"lr": 1e-4, "kind": "wsd"}},
     "drafter": {"latent_attention": true}, "store": {"endpoint_url": "..."}, "cache_dir": "/local/cache"}

`seed` and the last three may be left out. In place of `drafter`, `start_from` names a published drafter's folder, to be
trained further: in the layout of SGLang, SpecForge, vLLM, speculators or NeMo Automodel.

Asked to end (SIGTERM), it saves and ends with exit code 75; the same command goes on, with any number of ranks.
torchrun kills its processes 30 s after it passed that on, or as long after as `--shutdown-timeout` says. The best
drafter by simulated acceptance is exported; the last line on stdout is one JSON object.
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
from drafter.course import StepMetrics, TrainConfig
from drafter.export import export_drafter
from drafter.loss import LossConfig
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.ranks import leave
from drafter.schedule import Schedule
from drafter.start import first_drafter
from drafter.trainer import STOPPED_EXIT_CODE, Trainer, stop_on_sigterm
from hidden_states.dataset import Dataset
from hidden_states.errors import Refusal, TrainingError
from hidden_states.final_norm import FinalNorm
from hidden_states.manifest import HELD_OUT, TRAIN
from hidden_states.stream import SampleStream

_NEEDED = ("dataset", "target", "checkpoints", "export", "batch_tokens", "train")
_OPTIONAL = {"seed": 0, "drafter": {}, "start_from": None, "store": {}, "cache_dir": None}
_KINDS = {"batch_tokens": int, "seed": int, "train": dict, "drafter": dict, "store": dict}  # others are paths


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
    wrong += [f"{k} is not known" for k in course if k not in (*_NEEDED, *_OPTIONAL)]
    course = {**_OPTIONAL, **course}
    wrong += [
        f"{k} is {value!r}" for k, value in course.items()
        if type(value) is not _KINDS.get(k, str) and (value is not None or k not in ("cache_dir", "start_from"))
    ]  # fmt: skip
    if not wrong and course["batch_tokens"] < 1:
        wrong = [f"batch_tokens is {course['batch_tokens']}"]
    if wrong:
        kinds = "; ".join(f"{k}: {kind.__name__}" for k, kind in _KINDS.items())
        expected = f"{', '.join(_NEEDED)}; perhaps {', '.join(_OPTIONAL)} ({kinds}; the others text)"
        raise TrainingError(str(path), "; ".join(wrong), expected, "Correct the course.")
    return course


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
    drafter = first_drafter(
        course["target"], target.head, dataset.manifest.after_block, vocab.d2t, course["seed"], course["start_from"],
        course["drafter"],
    )  # fmt: skip
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

    len(stream(HELD_OUT, 0))  # refuses a dataset without held-out samples, before hours of training
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
        assert best is not None
        finished = Eagle3Drafter(drafter.config, drafter.d2t.cpu())
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
