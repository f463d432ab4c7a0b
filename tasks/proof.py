"""Are the states right, and not only well-shaped? Asked before the first batch, and of a sample of every batch."""

from dataclasses import dataclass

import psutil
from prefect.logging import get_run_logger
from transformers.utils.logging import disable_progress_bar

from eyas_capture import contract
from hidden_states.dump import Dump
from hidden_states.errors import GateError
from hidden_states.gate import NormCheck, Reference, compare
from hidden_states.plan import Batch
from hidden_states.statistics import History
from hidden_states.teacher import Agreement, TeacherHead, reply_positions
from infra.recipe import Recipe
from tasks.captured import Captured, capture_batch
from tasks.job import Job, need
from tasks.step import step

GOLDEN = 3  # samples captured alone and together before the first batch
REFERENCE_SHARE = 0.5  # of the free memory a reference forward may take


@dataclass
class Judges:
    """What batches of a run are judged by."""

    head: TeacherHead
    norm: NormCheck | None
    history: History

    @classmethod
    def of(cls, recipe: Recipe) -> "Judges":
        """Load the target's head and final norm; no more of the target is needed."""
        path = recipe.target.model_path
        return cls(TeacherHead.load(path), NormCheck.load(path), History())


@step("prove states", retries=1)
def prove_states(job: Job) -> None:
    """The semantic gate: golden samples, captured alone and together, against the target itself.

    Every captured block and the final state must equal a transformers forward (where the target fits this machine), be
    the same alone and in a batch, and reproduce the tokens the server chose.

    Raises:
        GateError: says what the data really looks like; the dumps are kept as evidence.
    """
    capture, log = need(job.capture, "capture server"), get_run_logger()
    capture.revive()
    capture.clear()
    job.judges = Judges.of(job.recipe)
    samples = sorted(need(job.samples, "samples").samples, key=lambda s: (len(s), s.digest))
    middle = len(samples) // 2
    golden = tuple(samples[max(0, middle - 1) : middle - 1 + GOLDEN] or samples[:GOLDEN])
    alone = [capture_batch(job, Batch(sample.id, (sample,))) for sample in golden]
    together = capture_batch(job, Batch("golden", golden))
    refused = [reason for captured in (*alone, together) for reason in captured.reasons.values()]
    if refused:
        raise GateError("golden samples", refused[0], "a dump that passes every check", "See the server's log.")
    for sample, captured in zip(golden, alone, strict=True):
        compare(captured.dumps[sample.id], together.dumps[sample.id])
    findings = _against_reference(job.recipe, [together.dumps[sample.id] for sample in golden])
    agreement = judge_batch(job, Batch("golden", golden), together)
    said = (
        "equal to a transformers forward" if findings else "too large for a reference forward here; head and norm only"
    )
    job.figures["reference_checked_tensors"] = findings
    log.info("%d golden samples: %s; alone = in a batch; teacher agrees at %d of %d positions", len(golden), said,
             agreement.agree, agreement.total)  # fmt: skip
    capture.clear()


def _against_reference(recipe: Recipe, dumps: list[Dump]) -> int:
    """Tensors compared with a reference forward: 0 when the target does not fit."""
    path = recipe.target.model_path
    if Reference.bytes_needed(path) > REFERENCE_SHARE * psutil.virtual_memory().available:
        return 0
    disable_progress_bar()  # a bar between log lines
    reference = Reference.load(path, trust_remote_code=recipe.target.trust_remote_code)
    return sum(len(reference.check(dump)) for dump in dumps)


def judge_batch(job: Job, batch: Batch, captured: Captured) -> Agreement:
    """The checks on some samples of a batch, the same ones every time: teacher, final norm, statistics.

    The arg-max of `lm_head(final)` must be the token the server chose: after the last token for every sample asked, and
    along the whole reply where the target wrote it greedily.

    Raises:
        GateError: the states do not fit the target; the dumps are kept as evidence.
    """
    recipe, judges = job.recipe, need(job.judges, "judges")
    samples = [s for s in batch.samples if s.id in captured.dumps][: recipe.extract.teacher_samples]
    greedy = recipe.regenerate.enabled and recipe.regenerate.temperature == 0
    total = Agreement(0, 0, 0)
    for sample in samples:
        dump = captured.dumps[sample.id]
        positions, tokens = reply_positions(sample) if greedy else ([], [])
        chosen = [*tokens, captured.next_tokens[sample.id]]
        total += judges.head.agreement(dump.tensor(contract.FINAL), [*positions, len(sample) - 1], chosen)
        if judges.norm is not None:
            judges.norm.check(dump)
        judges.history.check(dump)
    if total.share < recipe.extract.min_teacher_agreement:
        raise GateError(
            f"batch {batch.id}",
            f"the teacher reproduces {total.agree} of {total.total} tokens the server chose ({total.share:.1%})",
            f"at least {recipe.extract.min_teacher_agreement:.1%}",
            "The final state is not what the target's head reads (norm, layer, shift, or another model's weights). The "
            f"dumps are kept in {captured.dumps[samples[0].id].ref.path.parent}; nothing of this batch was stored.",
        )
    return total
