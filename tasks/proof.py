"""Are the states right, and not only well-shaped? Asked before the first batch, and of samples of every batch."""

import contextlib
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import psutil
from prefect.logging import get_run_logger
from transformers.utils.logging import disable_progress_bar

from eyas_capture import contract
from hidden_states.dump import Dump, read_record
from hidden_states.errors import DataError, GateError
from hidden_states.gate import NormCheck, Reference, compare, has_experts
from hidden_states.mask_rule import MaskRule
from hidden_states.plan import Batch
from hidden_states.samples import Sample
from hidden_states.statistics import History
from hidden_states.teacher import Agreement, TeacherHead, reply_positions
from infra.recipe import Recipe
from tasks.capture_session import CaptureSession
from tasks.captured import Captured, capture_batch
from tasks.job import Job, need
from tasks.step import step

GOLDEN = 3  # samples captured in every way before the first batch
MASKS = 1000  # samples whose loss mask is looked at before the first batch; each batch looks at all of its own
REFERENCE_SHARE = 0.5  # of the free memory a reference forward may take


@dataclass
class Judges:
    """What batches of a run are judged by. One batch at a time is judged: the machine is the server's, mostly.

    Attributes:
        norm: None where the target's final norm is no RMSNorm.
        reference: None where the target does not fit this machine.
        mask_rule: None where the chat template gives no rule to check masks by.
        routed: the target has experts, so 16-bit rounding moves single rows far.
    """

    head: TeacherHead
    norm: NormCheck | None
    reference: Reference | None
    mask_rule: MaskRule | None
    routed: bool
    history: History = field(default_factory=History)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, job: Job) -> "Judges":
        """Load the target's head and final norm, and the whole target where it fits."""
        target = job.recipe.target
        path = target.model_path
        reference = None
        if Reference.bytes_needed(path) <= REFERENCE_SHARE * psutil.virtual_memory().available:
            disable_progress_bar()  # a bar between log lines
            reference = Reference.load(path, trust_remote_code=target.trust_remote_code)
        rule = need(job.plan, "plan").mask_rule
        return cls(TeacherHead.load(path), NormCheck.load(path), reference, rule, has_experts(path))


@step("prove states", retries=1)
def prove_states(job: Job) -> None:
    """The semantic gate, for every server: golden samples, captured in every way the server knows, against the target.

    Every captured block and the final state must equal a transformers forward (where the target fits this machine);
    be the same alone and in a batch, in one piece and in chunks, with and without a prefix from the cache; and the
    target's head on the final state must choose what the server itself chose, at every position.

    Raises:
        GateError: says what the data really looks like; the dumps are kept as evidence.
    """
    log = get_run_logger()
    samples = need(job.samples, "samples").samples
    judges = job.judges = Judges.of(job)
    check_masks(job.recipe, judges, samples[:MASKS])
    by_length = sorted(samples, key=lambda s: (len(s), s.digest))
    middle = len(by_length) // 2
    golden = tuple(by_length[max(0, middle - 1) : middle - 1 + GOLDEN] or by_length[:GOLDEN])
    for session in need(job.capture, "capture servers").sessions:
        session.revive()
        session.clear()
        asked = _prove(job, session, golden, by_length)
        job.figures["gate"] = asked
        log.info("%s: %s", session.name, _in_words(asked, judges.reference is not None))
        session.clear()


def _in_words(asked: dict[str, int], reference: bool) -> str:
    tensors = f"{asked['reference_tensors']} tensors equal a transformers forward"
    no_tensors = "the target is too large for a transformers forward here, so its head and norm alone were asked"
    return "; ".join((
        f"{asked['golden_samples']} golden samples, {tensors if reference else no_tensors}",
        "the same alone and in a batch",
        f"{asked['chunked_samples']} the same in chunks" if asked["chunked_samples"] else "none in chunks",
        f"{asked['prefix_rows']} rows the same after a cached prefix" if asked["prefix_rows"] else "no prefix cached",
        f"the head chooses the server's token at {asked['positions_agreed']} of {asked['positions']} positions",
    ))  # fmt: skip


def _prove(job: Job, session: CaptureSession, golden: tuple[Sample, ...], by_length: list[Sample]) -> dict[str, int]:
    """Put one server to the test. Returns how much of each was compared."""
    judges = need(job.judges, "judges")
    held: list[Captured] = []

    def capture(samples: tuple[Sample, ...], input_top: bool = False) -> Captured:
        captured = capture_batch(job, session, Batch("golden", samples), input_top=input_top)
        held.append(captured)
        if refused := list(captured.reasons.values()):
            raise GateError("golden samples", refused[0], "a dump that passes every check", "See the server's log.")
        return captured

    with evidence(job, held):
        alone = {sample.id: capture((sample,), input_top=True) for sample in golden}
        together = capture(golden)
        for sample in golden:
            compare(alone[sample.id].dumps[sample.id], together.dumps[sample.id], routed=judges.routed)
        prefix_rows = sum(
            _after_a_prefix(session, sample, alone[sample.id].dumps[sample.id], judges.routed) for sample in golden
        )
        crowd = capture(_enough_to_chunk(session, by_length))
        chunked = [s for s in by_length if s.id in crowd.dumps and len(crowd.dumps[s.id].record.spans) > 1]
        for sample in chunked[:GOLDEN]:
            compare(capture((sample,)).dumps[sample.id], crowd.dumps[sample.id], routed=judges.routed)
        tensors = 0
        if judges.reference is not None:
            tensors = sum(len(judges.reference.check(together.dumps[sample.id])) for sample in golden)
        said = sum((_input_agreement(judges, alone[s.id], s) for s in golden), Agreement(0, 0, 0))
        require_agreement(job.recipe, said, "golden samples")
        _judge(job, Batch("golden", golden), together)
    for captured in held:
        session.release(captured.refs)
    return {
        "golden_samples": len(golden), "reference_tensors": tensors, "chunked_samples": len(chunked),
        "prefix_rows": prefix_rows, "positions": said.total, "positions_agreed": said.agree,
    }  # fmt: skip


def _input_agreement(judges: Judges, captured: Captured, sample: Sample) -> Agreement:
    """The head on every row against what the server itself thought likeliest there."""
    top = captured.input_top[sample.id][1:]  # entry i is what the model expects at position i, having read those before
    tokens = [choices[0] for choices in top]
    return judges.head.agreement(captured.dumps[sample.id].tensor(contract.FINAL), range(len(tokens)), tokens)


def _after_a_prefix(session: CaptureSession, sample: Sample, whole: Dump, routed: bool) -> int:
    """Capture a sample whose first half lies in the prefix cache, and compare the rest. Returns the rows compared."""
    client = need(session.client, "client")
    ids = sample.input_ids
    rids = [f"{contract.OPT_IN_PREFIX}{secrets.token_hex(4)}-{part}-{sample.id}" for part in ("half", "whole")]
    for rid, tokens in zip(rids, (ids[: len(ids) // 2], ids), strict=True):
        answer = client.generate(tokens, rid=rid, extra_key=rids[0], max_new_tokens=1)
    if not answer.cached_tokens:
        return 0
    session.dumps.wait_for(rids, session.job.recipe.extract.dump_timeout_s, keep_waiting=session.may_still_write)
    for ref in session.unheld():
        if read_record(ref).request_id == rids[1]:
            dump = session.dumps.open(ref)
            compare(whole, dump, routed=routed)
            return dump.record.rows
    raise GateError(f"sample {sample.id}", "no dump came of a prompt whose first half was cached", "an incomplete dump",
                    "The capture plugin missed a pass: see its writer.json and the server's log.")  # fmt: skip


def _enough_to_chunk(session: CaptureSession, by_length: list[Sample]) -> tuple[Sample, ...]:
    """Samples that the server can only prefill in chunks when they come at once; none where no batch is so long."""
    server = session.settings
    chunk = int(need(session.client, "client").server_info().get("chunked_prefill_size") or 0)
    crowd: list[Sample] = []
    tokens = 0
    for sample in reversed(by_length):
        if chunk <= 0 or tokens > 1.5 * chunk or len(crowd) == server.max_in_flight_requests:
            break
        if tokens and tokens + len(sample) + 1 > server.max_in_flight_tokens:
            continue
        crowd.append(sample)
        tokens += len(sample) + 1
    return tuple(crowd) if tokens > chunk > 0 else ()


def judge_batch(job: Job, batch: Batch, captured: Captured) -> Agreement:
    """The checks on samples of a batch, the same ones every time: masks, teacher, norm, history, reference.

    The arg-max of `lm_head(final)` must be the token the server chose: after the last token for every sample asked, and
    along the whole reply where the target wrote it greedily.

    Raises:
        GateError: the states do not fit the target; the dumps are kept as evidence.
    """
    with evidence(job, [captured]):
        return _judge(job, batch, captured)


def _judge(job: Job, batch: Batch, captured: Captured) -> Agreement:
    recipe, judges = job.recipe, need(job.judges, "judges")
    stored = [s for s in batch.samples if s.id in captured.dumps]
    check_masks(recipe, judges, stored)
    samples = stored[: max(recipe.extract.teacher_samples, recipe.extract.reference_samples)]
    greedy = recipe.regenerate.enabled and recipe.regenerate.temperature == 0
    total = Agreement(0, 0, 0)
    with judges.turn:
        for number, sample in enumerate(samples):
            dump = captured.dumps[sample.id]
            positions, tokens = reply_positions(sample) if greedy else ([], [])
            chosen = [*tokens, captured.next_tokens[sample.id]]
            total += judges.head.agreement(dump.tensor(contract.FINAL), [*positions, len(sample) - 1], chosen)
            if judges.norm is not None:
                judges.norm.check(dump)
            judges.history.check(dump)
            if judges.reference is not None and number < recipe.extract.reference_samples:
                judges.reference.check(dump)
        require_agreement(recipe, total, f"batch {batch.id}")
    return total


def check_masks(recipe: Recipe, judges: Judges, samples: Iterable[Sample]) -> None:
    """Every stretch to learn begins after the template's generation prompt and ends where the template ends a reply.

    Raises:
        GateError: a mask is shifted, or another template's.
    """
    if judges.mask_rule is None:
        return
    for sample in samples:
        try:
            judges.mask_rule.check(sample, reasoning_left_out=not recipe.data.learn_reasoning)
        except DataError as error:
            raise GateError(error.where, error.found, error.expected, error.do) from error


def require_agreement(recipe: Recipe, found: Agreement, where: str) -> None:
    """Refuse states from which the target's head does not choose the server's own tokens."""
    if found.share < recipe.extract.min_teacher_agreement:
        raise GateError(
            where,
            f"the teacher reproduces {found.agree} of {found.total} tokens the server chose ({found.share:.1%})",
            f"at least {recipe.extract.min_teacher_agreement:.1%}",
            "The final state is not what the target's head reads (norm, layer, shift, or another model's weights). "
            "Nothing of this batch was stored.",
        )


@contextlib.contextmanager
def evidence(job: Job, captured: list[Captured]) -> Iterator[None]:
    """Copy the dumps into the run's folder when the gate fails: a capture folder is cleared by the next run."""
    try:
        yield
    except GateError as error:
        for ref in sorted({ref for one in captured for ref in one.refs})[: 4 * GOLDEN]:
            target = job.folder / "evidence" / ref.writer_id
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ref.path.parent / contract.WRITER_FILE, target / contract.WRITER_FILE)
            shutil.copytree(ref.path, target / ref.path.name, dirs_exist_ok=True)
        do = f"{error.do} The dumps are kept: `eyas inspect {job.folder / 'evidence'}`.".strip()
        raise type(error)(error.where, error.found, error.expected, do) from error
