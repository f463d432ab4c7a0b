"""Capturing samples: sent, awaited, matched and checked until each has a dump or a reason why not."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas_capture import contract
from hidden_states.dump import Dump, DumpRef
from hidden_states.errors import Refusal, ServerError
from hidden_states.match import Reconciliation, reconcile
from hidden_states.plan import Batch
from hidden_states.record import BadDump
from hidden_states.samples import Sample
from hidden_states.validate import Expectation, check_dump
from infra.client import Generation
from tasks.capture_session import CaptureSession
from tasks.job import Job, need

SENDS = 3  # a sample whose dump is not right is captured again this often in all, then quarantined


@dataclass
class Captured:
    """What a batch's samples came to, by sample id.

    Attributes:
        dumps: those that passed every check.
        next_tokens: the token the server chose after the sample.
        input_top: per position the tokens the server thought likeliest there, where it was asked.
        reasons: why a sample has no dump, as `kind: in words`.
        foreign: dumps of requests that are not ours.
        gaps: dumps that the counters say were written and nobody saw.
    """

    dumps: dict[str, Dump] = field(default_factory=dict)
    next_tokens: dict[str, int] = field(default_factory=dict)
    input_top: dict[str, list[list[int]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    foreign: int = 0
    gaps: int = 0

    @property
    def refs(self) -> set[DumpRef]:
        """The dumps that passed."""
        return {dump.ref for dump in self.dumps.values()}


def capture_batch(job: Job, capture: CaptureSession, batch: Batch, *, input_top: bool = False) -> Captured:
    """Send the batch's samples until each has a dump that passes every check, or has failed SENDS times.

    The dumps that pass are held in the session: `capture.release(captured.refs)` when they are done with.

    Args:
        input_top: ask the server too what it thinks likeliest at every position of the prompt.

    Raises:
        ServerError: the server died; the whole batch is done again by the next try.
    """
    expectation = need(job.expectation, "expectation")
    result = Captured()
    pending = {sample.id: sample for sample in batch.samples}
    for _ in range(SENDS):
        requests = {f"{contract.OPT_IN_PREFIX}{secrets.token_hex(4)}-{s.id}": s for s in pending.values()}
        failed = _send(capture, requests, result, input_top)
        expected = requests.keys() - failed.keys()
        capture.dumps.wait_for(expected, job.recipe.extract.dump_timeout_s, keep_waiting=capture.may_still_write)
        if capture.owned and not capture.alive:
            need(capture.server, "server").ensure_alive()
        refs = capture.unheld()
        found = reconcile(requests, refs, capture.base_line, capture.dumps.seen())
        result.foreign += len(found.foreign)
        result.gaps += sum(gap.last - gap.first + 1 for gap in found.gaps)
        result.reasons = {}
        for rid, sample in requests.items():
            reason = (
                f"refused by the server: {failed[rid]}" if rid in failed else _flaw(found, rid, sample, expectation)
            )
            if reason is None:
                result.dumps[sample.id] = found.matched[rid]
                del pending[sample.id]
            else:
                result.reasons[sample.id] = reason
        capture.base_line = capture.dumps.base_line()
        capture.hold(result.refs)
        capture.dumps.remove(ref for ref in refs if ref not in result.refs)
        if not pending:
            break
    return result


def _send(
    capture: CaptureSession, requests: Mapping[str, Sample], result: Captured, input_top: bool
) -> dict[str, Refusal]:
    """Prefill every sample with its own cache key; the requests the server would not answer, by id."""
    server = capture.settings
    client = need(capture.client, "client")
    failed: dict[str, Refusal] = {}
    asked = {"top_tokens": 1, "prompt_from": 0} if input_top else {}
    answers = client.generate_each(
        (client.request(s.input_ids, rid=rid, extra_key=rid, max_new_tokens=1, **asked) for rid, s in requests.items()),
        max_in_flight_tokens=server.max_in_flight_tokens,
        max_in_flight=server.max_in_flight_requests,
    )
    for request, answer in answers:
        if isinstance(answer, Generation):
            sample = requests[request.rid].id
            result.next_tokens[sample] = answer.output_ids[0]
            if answer.prompt_top is not None:
                result.input_top[sample] = answer.prompt_top
        elif isinstance(answer, ServerError) and not capture.alive:
            raise answer  # a dead server fails the batch, not its samples
        else:
            failed[request.rid] = answer
    return failed


def _flaw(found: Reconciliation, rid: str, sample: Sample, expectation: Expectation) -> str | None:
    """Why a request's dump cannot be used, its kind first; None when it passes every check."""
    reason = found.reason(rid)
    if reason is not None:
        return reason
    if rid not in found.matched:
        return next((f"unreadable: {e}" for _, e in found.unreadable), "unreadable: its dump cannot be read")
    try:
        check_dump(found.matched[rid], sample, expectation)
    except BadDump as error:
        return f"fails {error.check}: {error}"
    return None
