"""The parts of a pipeline run that MLflow shows as runs nested under it: extraction, training, evaluation."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from tasks.job import Job, need
from tasks.tracking import Tracker

Stage = Literal["extraction", "training", "evaluation"]

# Sections of the recipe that a stage's run shows as its parameters: what to compare two trainings by, say.
SECTIONS: dict[Stage, tuple[str, ...]] = {
    "extraction": ("target", "server", "capture", "data", "regenerate", "extract", "dataset", "store"),
    "training": ("target", "capture", "dataset", "train"),
    "evaluation": ("target", "server", "evaluate"),
}


@contextlib.contextmanager
def stage(job: Job, name: Stage) -> Iterator[Tracker]:
    """A nested run for the block; it ends as the block ends. A step that is tried again goes on in it.

    Figures that the block's steps find are its metrics, their wall seconds too.
    """
    tracker = need(job.tracker, "MLflow run").child(
        f"{name} {job.short_id}",
        {"eyas.stage": name, "eyas.run": job.run_id, "eyas.recipe": job.recipe.name},
    )
    found, seconds = dict(job.figures), dict(job.seconds)
    job.stage = tracker
    try:
        tracker.params({k: v for k, v in job.recipe.flat().items() if k.partition(".")[0] in SECTIONS[name]})
        yield tracker
        new = {key: value for key, value in job.figures.items() if key not in found or found[key] != value}
        spent = {key: value - seconds.get(key, 0.0) for key, value in job.seconds.items()}
        tracker.metrics({**numbers(new), **wall_seconds({key: value for key, value in spent.items() if value > 0})})
    except BaseException as error:
        tracker.close_after(error)
        raise
    finally:
        job.stage = None
    tracker.close()


def short_name(job: Job) -> str:
    """Of a run in MLflow's lists and legends, where the whole id would be cut off: `demo-smollm2 3f9a`."""
    return f"{job.recipe.name} {job.short_id}"


def current(job: Job) -> Tracker:
    """The run that figures of the moment belong to: the stage's, else the whole run's."""
    return job.stage or need(job.tracker, "MLflow run")


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """Those that a metric can hold."""
    return {key: float(value) for key, value in figures.items() if type(value) in (int, float)}  # True is no figure


def wall_seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Wall seconds by step, as metrics."""
    return {f"wall_s/{name.replace(' ', '_')}": round(value, 1) for name, value in seconds.items()}
