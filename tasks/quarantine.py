"""What could not be used: samples left out of their batch, batches without a usable sample. Bounded; never for good.

A sick disk or server would put everything that follows into quarantine, so the bound is looked at after every batch.
A run that goes on tries what is quarantined once more where it is too much: its cause may have been cured.
"""

from collections.abc import Mapping

from prefect.logging import get_run_logger

from hidden_states.errors import GateError
from hidden_states.manifest import Manifest, Sidecar
from tasks.job import Job, need


def unusable_batches(job: Job) -> dict[str, dict[str, str]]:
    """Batch id -> sample id -> reason. A batch that any run has committed is not among them, whoever gave it up."""
    writer = need(job.writer, "dataset writer")
    given_up = need(job.ledger, "ledger").quarantined_batches()
    return {batch: reasons for batch, reasons in given_up.items() if writer.committed(batch) is None}


def quarantined(job: Job, manifest: Manifest) -> dict[str, str]:
    """Sample id -> reason, of a committed dataset."""
    stored = {shard.batch for shard in manifest.shards}
    given_up = need(job.ledger, "ledger").quarantined_batches()
    return {
        **manifest.left_out,
        **{
            sample: why for batch, reasons in given_up.items() if batch not in stored for sample, why in reasons.items()
        },
    }


def try_again(job: Job, done: Mapping[str, Sidecar], unusable: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Take back what earlier runs have quarantined if it is more than the recipe allows; the ids of those batches."""
    lost = sum(len(sidecar.info.left_out) for sidecar in done.values()) + sum(map(len, unusable.values()))
    if not _too_many(job, lost):
        return set()
    writer, ledger = need(job.writer, "dataset writer"), need(job.ledger, "ledger")
    again = [batch for batch, sidecar in done.items() if sidecar.info.left_out]
    for batch in again:
        writer.discard(batch)
    for batch in unusable:
        ledger.forget_quarantined(batch)
    get_run_logger().warning(
        "%d samples were quarantined by earlier runs, more than extract.max_quarantined_share allows: their %d batches "
        "are captured again", lost, len(again) + len(unusable),
    )  # fmt: skip
    return {*again, *unusable}


def refuse_many_quarantined(job: Job) -> None:
    """Raises GateError when more samples are quarantined than the recipe allows."""
    if _too_many(job, job.quarantined):
        planned = len(need(job.samples, "samples").samples)
        raise GateError(
            "extraction", f"{job.quarantined} of {planned} samples are quarantined",
            f"at most a share of {job.recipe.extract.max_quarantined_share:g}",
            "The log names each with its reason. Cure the cause and run again: their batches are then captured once "
            "more. Or raise extract.max_quarantined_share.",
        )  # fmt: skip


def _too_many(job: Job, lost: int) -> bool:
    return lost > job.recipe.extract.max_quarantined_share * len(need(job.samples, "samples").samples)
