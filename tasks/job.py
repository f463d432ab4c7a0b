"""One run of a recipe: where its things are, how long each step took, what it has found out so far."""

import contextlib
import json
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hidden_states.dataset import Dataset
from hidden_states.dataset_writer import DatasetWriter
from hidden_states.plan import Batch
from hidden_states.store import Store
from hidden_states.validate import Expectation
from infra.recipe import Recipe

if TYPE_CHECKING:
    from tasks.capture_pool import CapturePool
    from tasks.comparison import Side
    from tasks.evaluation import Evaluation
    from tasks.ledger import Ledger
    from tasks.planning import Plan
    from tasks.proof import Judges
    from tasks.replies import RunSamples
    from tasks.serving import Plain
    from tasks.tracking import Tracker
    from tasks.training import Trained


EVENTS = "events.jsonl"
T = TypeVar("T")


def new_run_id(recipe: Recipe) -> str:
    """`20261129-174501-demo-smollm2-3f9a`: sorts by time, says what ran, and no two are the same."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{recipe.name}-{secrets.token_hex(2)}"


@dataclass(eq=False)
class Job:
    """Shared by the steps of one run. Steps put what later steps need into its fields.

    Attributes:
        runs: this run's own folder, kept: summary, logs of the servers, exported drafter.
        state: folder shared by runs: services' data, checkpoints.
        figures: every measured figure of the summary, put in by the step that measured it.
        seconds: wall seconds by step name; a step that ran several times is summed.
    """

    recipe: Recipe
    run_id: str
    folder: Path
    state: Path
    store: Store
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    # filled by the steps, in this order
    tracker: "Tracker | None" = None
    stage: "Tracker | None" = None  # the nested run of the part that is at work
    plan: "Plan | None" = None
    ledger: "Ledger | None" = None
    capture: "CapturePool | None" = None
    samples: "RunSamples | None" = None
    expectation: Expectation | None = None
    judges: "Judges | None" = None
    writer: DatasetWriter | None = None
    batches: dict[str, Batch] | None = None
    quarantined: int = 0
    objects_before: set[str] = field(default_factory=set)
    dataset: Dataset | None = None
    trained: "Trained | None" = None
    plain: "Plain | None" = None
    evaluation: "Evaluation | None" = None
    champion: "Side | None" = None  # the drafter in production, served beside this run's own

    @contextlib.contextmanager
    def clock(self, step: str) -> Iterator[None]:
        """Add the wall time of the block to `seconds[step]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - start

    def own_order(self, items: Sequence[T]) -> list[T]:
        """The order in which this run does what is missing of a dataset.

        Another run may be at work on the same version, on a host of its own: each leaves out what it finds done when it
        gets there. In one order two of them would meet and then do everything twice, side by side; so only the run that
        began the version keeps the order, every other one has its own.
        """
        order = list(items)
        if self.ledger is not None and self.ledger.state != "new":
            random.Random(self.run_id).shuffle(order)
        return order

    def note(self, event: str, **facts: Any) -> None:
        """Append a line to the run's `events.jsonl`: what was in work when a run died, and what was done again."""
        line = json.dumps({"at": round(time.time(), 3), "event": event, **facts})
        with (self.folder / EVENTS).open("a") as file:
            file.write(line + "\n")

    @property
    def wall(self) -> dict[str, float]:
        """Seconds by step, and `total`, to a tenth."""
        parts = {name: round(value, 1) for name, value in self.seconds.items()}
        return {**parts, "total": round(time.monotonic() - self.started, 1)}

    @property
    def short_id(self) -> str:
        """The end of the run's id, which tells runs apart where the whole would be cut off."""
        return self.run_id.rpartition("-")[2]

    @property
    def target_name(self) -> str:
        """Last part of the target's path: what people call the model."""
        return Path(self.recipe.target.model_path).name

    def __repr__(self) -> str:  # shown by Prefect as the task's parameter
        return f"Job({self.run_id})"


def read_events(run: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a run's `events.jsonl` of one kind, oldest first; none when it has not begun."""
    path = run / EVENTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


class Stopwatch:
    """Seconds of each part of a piece of work, in `laps`."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The time since the last lap was `name`'s."""
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 4)
        self._last = now


def need(value: T | None, what: str) -> T:
    """A field an earlier step fills; its absence is a mistake in the flow's order, not the user's."""
    if value is None:
        raise RuntimeError(f"{what} is not there yet: the flow's steps are out of order")
    return value
