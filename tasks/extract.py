"""Batches through the whole road: send, await, match, check, prove, pack, upload, verify, delete local files.

Several runs on hosts of their own may share a dataset: each leaves out what the others have done when it gets there.

While a batch is proved, packed and uploaded, its server captures the next one. Never more than `extract.in_flight`
batches a server are in work, so a slow bucket slows the servers down instead of filling the disk.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from prefect.futures import PrefectFuture, as_completed
from prefect.logging import get_run_logger

from hidden_states.errors import StoreError
from hidden_states.plan import Batch
from hidden_states.shard import pack_shard
from tasks.captured import Captured, capture_batch
from tasks.dataset import kept, teacher_head
from tasks.job import Job, Stopwatch, need
from tasks.progress import BatchDone, ExtractionProgress
from tasks.proof import judge_batch
from tasks.quarantine import refuse_many_quarantined
from tasks.stage import current
from tasks.step import step


def extract_batches(job: Job, missing: Sequence[str]) -> None:
    """Every missing batch, a bounded number at once. After a failure nothing new is begun; what is in work is finished.

    Raises:
        Refusal: the first batch that failed for good.
    """
    sessions = need(job.capture, "capture servers").sessions
    most = len(sessions) * job.recipe.extract.in_flight
    progress = ExtractionProgress(need(job.batches, "batches"), missing, current(job))
    waiting = _still_missing(job, missing, progress)
    in_work: set[PrefectFuture[Any]] = set()
    failed: list[Exception] = []
    with job.clock("extract batches"):
        while True:
            while len(in_work) < most and not failed and (batch_id := next(waiting, None)):
                in_work.add(extract_batch.submit(job, batch_id))
            if not in_work:
                break
            future = next(as_completed(list(in_work)))
            in_work.remove(future)
            try:
                done: BatchDone = future.result()
                job.quarantined += done.quarantined
                progress.add(done)
                refuse_many_quarantined(job)
            except Exception as error:  # raised below, when the batches in work are through
                failed.append(error)
    if failed:
        raise failed[0]


def _still_missing(job: Job, missing: Sequence[str], progress: ExtractionProgress) -> Iterator[str]:
    """The batches that nobody has done by the time we get to them: another run may be at work on the same dataset."""
    for batch_id in job.own_order(missing):
        if theirs := _done_by_another(job, need(job.batches, "batches")[batch_id]):
            job.quarantined += theirs.quarantined
            progress.add(theirs, ours=False)
        else:
            yield batch_id


def _done_by_another(job: Job, batch: Batch) -> BatchDone | None:
    try:
        if committed := need(job.writer, "dataset writer").committed(batch.id):
            left_out = len(committed.info.left_out)
        elif need(job.ledger, "ledger").is_quarantined(batch.id):
            left_out = len(batch.samples)
        else:
            return None
    except StoreError:  # the batch's own step finds out, and tries again
        return None
    return BatchDone(len(batch.samples) - left_out, left_out, batch.tokens, 0)


@step("extract batch", retries=2, run_name="extract batch {batch_id}", clocked=False)
def extract_batch(job: Job, batch_id: str) -> BatchDone:
    """Capture, prove and store one batch. Done twice it is the same object; killed half-way it is done again."""
    batch = need(job.batches, "batches")[batch_id]
    log, watch = get_run_logger(), Stopwatch()
    with need(job.capture, "capture servers").take() as capture:
        capture.clear()
        job.note("batch begun", batch=batch.id, tokens=batch.tokens, server=capture.number)
        captured = capture_batch(job, capture, batch)
    watch.lap("capture")
    try:
        agreement = judge_batch(job, batch, captured)
        watch.lap("prove")
        report = {
            "teacher_positions": agreement.total,
            "teacher_agreed": agreement.agree,
            "teacher_strict": agreement.strict,
            "foreign_dumps": captured.foreign,
            "counter_gaps": captured.gaps,
        }
        need(job.ledger, "ledger").keep_report(batch.id, report)
        stored = _store(job, batch, captured, watch)
        job.note("batch stored", batch=batch.id, samples=len(captured.dumps), bytes=stored, seconds=watch.laps)
    finally:
        capture.release(captured.refs)
    for sample_id, reason in captured.reasons.items():
        log.warning("sample %s quarantined: %s", sample_id, reason)
    log.info("batch %s: %d samples, %d tokens, %.1f MB; teacher agrees at %d of %d positions", batch.id,
             len(captured.dumps), batch.tokens, stored / 1e6, agreement.agree, agreement.total)  # fmt: skip
    return BatchDone(len(captured.dumps), len(captured.reasons), batch.tokens, stored)


def _store(job: Job, batch: Batch, captured: Captured, watch: Stopwatch) -> int:
    """Pack and upload what was captured; the bytes stored. A batch of which nothing can be used is recorded as such."""
    if not captured.dumps:
        if need(job.writer, "dataset writer").committed(batch.id) is None:  # by a run that had more luck with it
            need(job.ledger, "ledger").keep_quarantined(batch.id, captured.reasons)
        return 0
    shard = job.folder / f"{batch.id}.safetensors"
    try:
        encoding = kept(job.recipe)
        head = teacher_head(job.recipe.target.model_path) if encoding.top_k else None
        info = pack_shard(batch, captured.dumps, shard, left_out=captured.reasons, encoding=encoding, head_VH=head)
        watch.lap("pack")
        need(job.writer, "dataset writer").commit_batch(info)
        watch.lap("upload")
        return info.bytes
    finally:
        shard.unlink(missing_ok=True)
