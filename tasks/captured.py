"""Capturing samples: sent, awaited, matched and checked until each has a dump or a reason why not."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas_capture import contract
from hidden_states.dump import Dump
from hidden_states.errors import Refusal, ServerError
from hidden_states.match import Reconciliation, reconcile
from hidden_states.plan import Batch
from hidden_states.record import BadDump
from hidden_states.samples import Sample
from hidden_states.validate import Expectation, check_dump
from infra.client import Generation
from tasks.job import Job, need

SENDS = 3  # a sample whose dump is not right is captured again this often in all, then quarantined


@dataclass
class Captured:
    """What a batch's samples came to, sample id -> its dump, or why it has none."""

    dumps: dict[str, Dump] = field(default_factory=dict)
    next_tokens: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    foreign: int = 0
    gaps: int = 0


def capture_batch(job: Job, batch: Batch) -> Captured:
    """Send the batch's samples until each has a dump that passes every check, or has failed SENDS times.

    Raises:
        ServerError: the server died; the whole batch is done again by the next try.
    """
    capture, expectation = need(job.capture, "capture server"), need(job.expectation, "expectation")
    result = Captured()
    pending = {sample.id: sample for sample in batch.samples}
    for _ in range(SENDS):
        requests = {f"{contract.OPT_IN_PREFIX}{secrets.token_hex(4)}-{s.id}": s for s in pending.values()}
        failed = _send(job, requests, result)
        expected = requests.keys() - failed.keys()
        capture.dumps.wait_for(expected, job.recipe.extract.dump_timeout_s, keep_waiting=capture.may_still_write)
        if capture.owned and not capture.alive:
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


def _send(job: Job, requests: Mapping[str, Sample], result: Captured) -> dict[str, Refusal]:
    """Prefill every sample with its own cache key; the requests the server would not answer, by id."""
    capture, server = need(job.capture, "capture server"), job.recipe.server
    client = need(capture.client, "client")
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
