"""Prediction against reality: what training says a drafter accepts, beside what the server counted on the same prompts.

The prediction for served prompts is a replay: the drafter over the captured states of the very replies the server gave,
stepping as a server steps. It agrees with serving within 0.05; a larger gap means that serving runs the drafter in
another way than training did, and `drafter.diagnosis` names the choice.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from prefect.logging import get_run_logger

from drafter.batch import Row
from drafter.diagnosis import Diagnosis, as_served, as_trained, diagnose, differing, read_weights, replayed
from drafter.model import TargetWeights
from hidden_states.dataset import Dataset
from hidden_states.errors import Refusal
from hidden_states.final_norm import FinalNorm
from hidden_states.fingerprint import Fingerprint, target_fields
from hidden_states.gate import Reference, block_in_words
from infra.client import acceptance_length
from infra.recipe import Recipe
from tasks.evaluation import Evaluation
from tasks.job import Job, need
from tasks.prompt_sets import HELD_OUT
from tasks.step import step

REFERENCE_SHARE = 0.5  # of the free memory a forward pass of the target may take


@step("compare prediction")
def compare_prediction(job: Job, folder: Path) -> None:
    """Replay the drafter on the replies that were served, and look for the cause when the two figures differ.

    Args:
        folder: the drafter's.
    """
    found, log = prediction(job, folder), get_run_logger()
    evaluation = need(job.evaluation, "evaluation")
    evaluation.prediction.update(found)
    job.figures["prediction"] = found
    if "replayed" not in found:
        log.info("prediction and serving are not compared: %s", found["why_not"])
        return
    log.info("%s prompts whose replies are in the dataset: replayed %.3f, served %.3f; gap %+.3f, %s allowed",
             found["prompts"], found["replayed"], found["served"], found["gap"], found["bound"])  # fmt: skip
    if found.get("diagnosis"):
        log.warning("serving is not as training was: %s", found["diagnosis"]["in_words"])


def prediction(job: Job, folder: Path) -> dict[str, Any]:
    """`simulated`, `replayed`, `served`, `gap`, `bound`, `prompts`, `differs` (choices that serving does not share with
    training); with a gap beyond the bound, or where something differs, also `diagnosis`, `cause` and `stale_dataset`
    (what of the target is no longer as it was captured). `why_not` in place of figures."""
    recipe, dataset = job.recipe, need(job.dataset, "dataset")
    bound, steps = recipe.evaluate.max_prediction_gap, recipe.evaluate.num_steps
    simulated = job.figures.get("predicted_acceptance_length")
    rows, histograms = served_rows(job, need(job.evaluation, "evaluation"))
    if not rows:
        return {"simulated": simulated, "why_not": "the server's replies are not those in the dataset"}
    measured = acceptance_length([sum(column) for column in zip(*histograms, strict=True)])
    known = {dataset.manifest.after_block: rows}

    def rows_of(blocks: tuple[int, ...]) -> list[Row] | None:
        if blocks not in known:
            states = other_blocks(recipe, rows, blocks)
            if states is None:
                return None
            known[blocks] = states
        return known[blocks]

    target = recipe.target.model_path
    served_dtype = need(job.evaluation, "evaluation").settings.get("dtype")
    dtype = dataset.manifest.layout(0).dtype
    try:
        served = as_served(
            folder, target, served_dtype if served_dtype in ("float32", "bfloat16", "float16") else dtype
        )
        trained = as_trained(served, folder, target, dataset.manifest.after_block, dataset.vocab_map().d2t, dtype)
        weights, borrowed = read_weights(folder), TargetWeights.load(target)
        predicted = replayed(trained, weights, borrowed, rows, steps)
    except Refusal as error:  # a folder that no choice of ours can run; the server ran it all the same
        return {"simulated": simulated, "served": round(measured, 4), "why_not": str(error)}
    gap = predicted - measured
    found: dict[str, Any] = {
        "simulated": simulated, "replayed": round(predicted, 4), "served": round(measured, 4), "gap": round(gap, 4),
        "bound": bound, "prompts": len(rows), "differs": differing(served, trained),
        "diagnosis": None, "cause": None, "stale_dataset": [],
    }  # fmt: skip
    if abs(gap) > bound or found["differs"]:
        result: Diagnosis = diagnose(served, trained, weights, borrowed, rows_of, steps, measured, bound)
        stale = changed_since_capture(dataset, Path(target))
        cause = result.cause or (stale[0].partition(":")[0] if stale else None)
        found |= {"diagnosis": result.as_dict(), "cause": cause, "stale_dataset": stale}
    return found


def served_rows(job: Job, evaluation: Evaluation) -> tuple[list[Row], list[list[int]]]:
    """The held-out samples whose reply is what the server answered, with their histograms (all of one length).

    A dataset whose replies came with the data, or were sampled, has few or none: its states are those of other texts.
    """
    dataset, steps = need(job.dataset, "dataset"), job.recipe.evaluate.num_steps
    plain = need(job.plain, "plain decoding").answers[HELD_OUT]
    norm = FinalNorm.load(job.recipe.target.model_path) if dataset.manifest.final_norm == "pre" else None
    rows, histograms = [], []
    for answer, reply in zip(evaluation.sets[HELD_OUT].answers, plain, strict=True):
        tokens, _ = dataset.read_tokens(answer.source)
        stored = tokens[answer.prompt_tokens :]
        length = min(len(stored), len(reply.output_ids))
        if answer.differs_at is not None or length < 2 or stored[:length] != reply.output_ids[:length]:
            continue
        sample = dataset.read(answer.source)
        end = answer.prompt_tokens + len(reply.output_ids)
        final = sample.final if norm is None or sample.top is not None else norm.behind(sample.final)
        mask = sample.loss_mask.clone()
        mask[end:] = 0
        count = len(mask)
        rows.append(Row(sample.input_ids, mask, sample.aux, final, torch.zeros(count, dtype=torch.int64),
                        torch.arange(count), [answer.source], sample.top))  # fmt: skip
        histograms.append([*answer.histogram, *[0] * (steps + 1 - len(answer.histogram))])
    return rows, histograms


def other_blocks(recipe: Recipe, rows: Iterable[Row], blocks: tuple[int, ...]) -> list[Row] | None:
    """The rows with the outputs of other blocks, from a forward pass of the target; None where it does not fit here, or
    has no such blocks."""
    path = recipe.target.model_path
    if Reference.bytes_needed(path) > REFERENCE_SHARE * psutil.virtual_memory().available:
        return None
    reference = Reference.load(path, trust_remote_code=recipe.target.trust_remote_code)
    last, made = len(reference.blocks) - 1, []
    for row in rows:
        states = reference.states(row.input_ids.tolist())
        named = {block: states.get(block_in_words(block)) for block in range(last)}
        named[last] = states[f"the final state without its norm ({block_in_words(last)})"]
        found = [named.get(block) for block in blocks]
        wanted = [state for state in found if state is not None]
        if len(wanted) < len(blocks):
            return None
        made.append(Row(**{**vars(row), "aux": torch.stack(wanted, dim=1)}))
    return made


def changed_since_capture(dataset: Dataset, target: Path) -> list[str]:
    """What of the target is no longer as it was when the states were captured, `name: then / now`."""
    now = target_fields(target)
    then = {name: dataset.manifest.fingerprint.fields.get(name) for name in now}
    return Fingerprint(then).differences(Fingerprint(now))  # type: ignore[arg-type]
