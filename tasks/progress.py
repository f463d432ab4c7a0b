"""How far the extraction is, after every batch: a line in the terminal, an artifact in Prefect, metrics in MLflow."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect.logging import get_run_logger

from hidden_states.plan import Batch
from tasks.page import Progress
from tasks.tracking import Tracker
from tasks.words import bytes_in_words, seconds_in_words

ARTIFACT = "extraction-progress"


@dataclass(frozen=True)
class BatchDone:
    """What a batch came to. `samples` are stored; `tokens` are of the batch, `bytes` of its shard."""

    samples: int
    quarantined: int
    tokens: int
    bytes: int


class ExtractionProgress:
    """Counts batches as they are done. Rates are of this run alone; a resumed one begins where the last one ended.

    Args:
        batches: all batches of the dataset, by id.
        missing: ids of those that this run does.
        tracker: the MLflow run that gets the figures, with batches as steps.
    """

    def __init__(self, batches: Mapping[str, Batch], missing: Sequence[str], tracker: Tracker) -> None:
        self._tracker = tracker
        self._all_tokens = sum(batch.tokens for batch in batches.values())
        self._all_samples = sum(len(batch.samples) for batch in batches.values())
        self._all_batches = len(batches)
        self._tokens = self._all_tokens - sum(batches[b].tokens for b in missing)
        self._samples = self._all_samples - sum(len(batches[b].samples) for b in missing)
        self._batches = self._all_batches - len(missing)
        self._run_tokens = self._run_bytes = self._quarantined = 0
        self._started = time.monotonic()
        self._bar = Progress(ARTIFACT, self._percent, self._in_words())

    def add(self, batch: BatchDone, *, ours: bool = True) -> None:
        """Count a batch, and say how far we are. One that another run has done does not count for our rates."""
        self._tokens += batch.tokens
        self._samples += batch.samples + batch.quarantined
        self._quarantined += batch.quarantined
        self._batches += 1
        if ours:
            self._run_tokens += batch.tokens
            self._run_bytes += batch.bytes
        said = self._in_words()
        get_run_logger().info("%s", said)
        self._bar.update(self._percent, said)
        seconds = time.monotonic() - self._started
        self._tracker.metrics(
            {"extraction/samples": self._samples, "extraction/tokens": self._tokens,
             "extraction/quarantined": self._quarantined, "extraction/tokens_per_s": self._run_tokens / seconds,
             "extraction/bytes_per_s": self._run_bytes / seconds},
            step=self._batches,
        )  # fmt: skip

    @property
    def _percent(self) -> float:
        return round(100 * self._tokens / self._all_tokens, 1)

    def _in_words(self) -> str:
        told = (
            f"{self._batches:,} of {self._all_batches:,} batches, {self._samples:,} of {self._all_samples:,} samples, "
            f"{self._percent:.0f}% of the tokens"
        )
        if not self._run_tokens:
            return told
        seconds = time.monotonic() - self._started
        left = (self._all_tokens - self._tokens) * seconds / self._run_tokens
        return (
            f"{told}; {self._run_tokens / seconds:,.0f} tokens/s, "
            f"{bytes_in_words(self._run_bytes / seconds)}/s, {seconds_in_words(left)} left"
        )
