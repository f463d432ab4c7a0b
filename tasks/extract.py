"""One batch through the whole road: send, await, match, check, prove, pack, upload, verify, delete local files."""

from prefect.logging import get_run_logger

from hidden_states.shard import pack_shard
from tasks.captured import capture_batch
from tasks.dataset import kept, teacher_head
from tasks.job import Job, need
from tasks.proof import judge_batch
from tasks.step import step


@step("extract batch", retries=2, run_name="extract batch {batch_id}")
def extract_batch(job: Job, batch_id: str) -> None:
    """Capture, prove and store one batch. Done twice it is the same object; killed half-way it is done again."""
    capture, writer = need(job.capture, "capture server"), need(job.writer, "dataset writer")
    batch = need(job.batches, "batches")[batch_id]
    log = get_run_logger()
    capture.revive()
    capture.clear()
    captured = capture_batch(job, batch)
    agreement = judge_batch(job, batch, captured)
    shard = job.folder / f"{batch.id}.safetensors"
    try:
        encoding = kept(job.recipe)
        head = teacher_head(job.recipe.target.model_path) if encoding.top_k else None
        info = pack_shard(
            batch, captured.dumps, shard, left_out=captured.reasons, encoding=encoding, head_VH=head
        )
        report = {
            "teacher_positions": agreement.total,
            "teacher_agreed": agreement.agree,
            "teacher_strict": agreement.strict,
            "foreign_dumps": captured.foreign,
            "counter_gaps": captured.gaps,
        }
        need(job.ledger, "ledger").keep_report(batch.id, report)
        writer.commit_batch(info)
    finally:
        shard.unlink(missing_ok=True)
    capture.dumps.clear()
    job.quarantined += len(captured.reasons)
    for sample_id, reason in captured.reasons.items():
        log.warning("sample %s quarantined: %s", sample_id, reason)
    log.info("%d samples, %d tokens, %.1f MB; teacher agrees at %d of %d positions", len(captured.dumps),
             info.layout.tokens, info.bytes / 1e6, agreement.agree, agreement.total)  # fmt: skip
