"""One batch through the whole road: send, await, match, check, prove, pack, upload, verify, delete local files."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect.logging import get_run_logger

from eyas_capture import contract
from hidden_states.dump import Dump
from hidden_states.errors import GateError, Refusal, ServerError
from hidden_states.match import Reconciliation, reconcile
from hidden_states.plan import Batch
from hidden_states.record import BadDump
from hidden_states.samples import Sample
from hidden_states.shard import pack_shard
from hidden_states.teacher import Agreement, reply_positions
from hidden_states.validate import Expectation, check_dump
from infra.client import Generation
from tasks.capture import CaptureSession
from tasks.job import Job, need
from tasks.step import step

SENDS = 3  # a sample whose dump is not right is captured again this often in all, then quarantined


@dataclass
class Captured:
    """What a batch's samples came to, sample id -> its dump, or why it has none."""

    dumps: dict[str, Dump] = field(default_factory=dict)
    next_tokens: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    foreign: int = 0
    gaps: int = 0


@step("extract batch", retries=2, run_name="extract batch {batch_id}")
def extract_batch(job: Job, batch_id: str) -> None:
    """Capture, prove and store one batch. Done twice it is the same object; killed half-way it is done again."""
    capture, writer = need(job.capture, "capture server"), need(job.writer, "dataset writer")
    batch = need(job.batches, "batches")[batch_id]
    log = get_run_logger()
    capture.revive()
    capture.clear()
    captured = capture_batch(capture, batch, need(job.expectation, "expectation"), job)
    agreement = prove_batch(job, batch, captured)
    shard = job.folder / f"{batch.id}.safetensors"
    try:
        info = pack_shard(batch, captured.dumps, shard, left_out=captured.reasons)
        writer.commit_batch(info)
    finally:
        shard.unlink(missing_ok=True)
    capture.dumps.clear()
    job.count(
        samples_valid=len(captured.dumps), samples_quarantined=len(captured.reasons), tokens=info.layout.tokens,
        teacher_positions=agreement.total, teacher_agreed=agreement.agree, teacher_strict=agreement.strict,
        foreign_dumps=captured.foreign, counter_gaps=captured.gaps,
    )  # fmt: skip
    for sample_id, reason in captured.reasons.items():
        log.warning("sample %s quarantined: %s", sample_id, reason)
    log.info("%d samples, %d tokens, %.1f MB; teacher agrees at %d of %d positions", len(captured.dumps),
             info.layout.tokens, info.bytes / 1e6, agreement.agree, agreement.total)  # fmt: skip


def capture_batch(capture: CaptureSession, batch: Batch, expectation: Expectation, job: Job) -> Captured:
    """Send the batch's samples until each has a dump that passes every check, or has failed SENDS times.

    Raises:
        ServerError: the server died; the whole batch is done again by the next try.
    """
    result = Captured()
    pending = {sample.id: sample for sample in batch.samples}
    for _ in range(SENDS):
        requests = {f"{contract.OPT_IN_PREFIX}{secrets.token_hex(4)}-{s.id}": s for s in pending.values()}
        failed = _send(capture, requests, result, job)
        expected = requests.keys() - failed.keys()
        capture.dumps.wait_for(expected, job.recipe.extract.dump_timeout_s, keep_waiting=lambda: capture.alive)
        if not capture.alive:
            need(capture.server, "server").ensure_alive()
        refs = capture.dumps.dumps()
        found = reconcile(requests, refs, capture.base_line, capture.dumps.seen())
        result.foreign += len(found.foreign)
        result.gaps += sum(gap.last - gap.first + 1 for gap in found.gaps)
        result.reasons = {}
        for rid, sample in requests.items():
            reason = str(failed[rid]) if rid in failed else _flaw(found, rid, sample, expectation)
            if reason is None:
                result.dumps[sample.id] = found.matched[rid]
                del pending[sample.id]
            else:
                result.reasons[sample.id] = reason
        capture.base_line = capture.dumps.base_line()
        keep = {dump.ref for dump in result.dumps.values()}
        capture.dumps.remove(ref for ref in refs if ref not in keep)
        if not pending:
            break
    return result


def _send(capture: CaptureSession, requests: Mapping[str, Sample], result: Captured, job: Job) -> dict[str, Refusal]:
    """Prefill every sample with its own cache key; the requests the server would not answer, by id."""
    server, client = job.recipe.server, need(capture.client, "client")
    failed: dict[str, Refusal] = {}
    answers = client.generate_each(
        (client.request(s.input_ids, rid=rid, extra_key=rid, max_new_tokens=1) for rid, s in requests.items()),
        max_in_flight_tokens=server.max_in_flight_tokens,
        max_in_flight=server.max_in_flight_requests,
    )
    for request, answer in answers:
        if isinstance(answer, Generation):
            result.next_tokens[requests[request.rid].id] = answer.output_ids[0]
        elif isinstance(answer, ServerError) and not capture.alive:
            raise answer  # a dead server fails the batch, not its samples
        else:
            failed[request.rid] = answer
    return failed


def _flaw(found: Reconciliation, rid: str, sample: Sample, expectation: Expectation) -> str | None:
    """Why a request's dump cannot be used; None when it passes every check."""
    reason = found.reason(rid)
    if reason is not None:
        return reason
    if rid not in found.matched:
        return next((str(error) for _, error in found.unreadable), "its dump cannot be read")
    try:
        check_dump(found.matched[rid], sample, expectation)
    except BadDump as error:
        return str(error)
    return None


def prove_batch(job: Job, batch: Batch, captured: Captured) -> Agreement:
    """The teacher check on some samples of the batch, the same ones every time.

    The arg-max of `lm_head(final)` must be the token the server chose: after the last token for every sample asked, and
    along the whole reply where the target wrote it greedily.

    Raises:
        GateError: the states do not reproduce the server's tokens; the dumps are kept as evidence.
    """
    recipe = job.recipe
    head = need(job.teacher, "teacher head")
    samples = [s for s in batch.samples if s.id in captured.dumps][: recipe.extract.teacher_samples]
    greedy = recipe.regenerate.enabled and recipe.regenerate.temperature == 0
    total = Agreement(0, 0, 0)
    for sample in samples:
        final = captured.dumps[sample.id].tensor(contract.FINAL)
        positions, tokens = reply_positions(sample) if greedy else ([], [])
        total += head.agreement(final, [*positions, len(sample) - 1], [*tokens, captured.next_tokens[sample.id]])
    if total.share < recipe.extract.min_teacher_agreement:
        raise GateError(
            f"batch {batch.id}",
            f"the teacher reproduces {total.agree} of {total.total} tokens the server chose ({total.share:.1%})",
            f"at least {recipe.extract.min_teacher_agreement:.1%}",
            f"The final state is not what the target's head reads (norm, layer, shift or another model's weights). The "
            f"dumps are kept in {captured.dumps[samples[0].id].ref.path.parent}; nothing of this batch was stored.",
        )
    return total
