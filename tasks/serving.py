"""Measuring drafters where it counts: served by SGLang, on every prompt set, against plain decoding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect.logging import get_run_logger

from hidden_states.errors import GateError
from infra.client import Generation, SGLangClient, acceptance_length
from infra.server import SGLangServer, attach
from tasks.capture_session import server_spec
from tasks.engine import engine_settings, refuse_other_server
from tasks.evaluation import GREEDY, Answer, Evaluation, SetRecord, set_key
from tasks.job import Job, need
from tasks.prompt_sets import HELD_OUT, PromptSet, describe, prompt_sets
from tasks.stage import current
from tasks.step import step

Kind = Literal["drafter", "control", "plain", "champion"]


@dataclass(frozen=True)
class Pass:
    """A prompt set served at one sampling."""

    prompts: PromptSet
    sampling: dict[str, Any]

    @property
    def key(self) -> str:
        """See `set_key`."""
        return set_key(self.prompts.name, self.sampling)


@dataclass(frozen=True)
class Plain:
    """Plain decoding: what every drafter is held against. `answers`: by `Pass.key`, in the order of the prompts."""

    passes: list[Pass]
    answers: dict[str, list[Generation]]
    settings: dict[str, Any]


def passes_of(job: Job, sets: list[PromptSet]) -> list[Pass]:
    """Every set greedily, and then as production samples, where the recipe says how."""
    own = job.recipe.evaluate.sampling
    passes = [Pass(found, GREEDY) for found in sets]
    return passes if own is None else [*passes, *(Pass(found, own.model_dump()) for found in sets)]


@step("measure plain decoding", retries=1)
def measure_plain(job: Job) -> None:
    """Choose the prompts, and serve the target without a drafter: its outputs, and its speed."""
    sets = prompt_sets(job.recipe, need(job.dataset, "dataset"))
    job.figures["prompt_sets"] = describe(sets)
    need(job.tracker, "MLflow run").tags({f"prompt_set.{s.name}": f"{s.version} {s.digest}" for s in sets})
    passes = passes_of(job, sets)
    answers, settings = serve(job, "plain", passes)
    job.plain = Plain(passes, answers, settings)


@step("serve and measure", retries=1, run_name="serve and measure {kind}")
def measure(job: Job, kind: Kind) -> None:
    """Serve one drafter and put its figures into the job's, named `served_...` or `control_...`.

    The control is served the held-out prompts only: it is there to show what training adds.
    """
    found = evaluate(job, kind, only=HELD_OUT if kind == "control" else None)
    prefix = "served" if kind == "drafter" else kind
    put_figures(job, prefix, found)
    if kind == "drafter":
        job.evaluation = found


def evaluate(job: Job, kind: Kind, drafter: Path | None = None, only: str | None = None) -> Evaluation:
    """A drafter's serving record on the prompts of plain decoding; outputs that differ are reported first.

    Args:
        drafter: its folder; left out = this run's own of that kind.
        only: one set alone, by `Pass.key`.
    """
    plain = need(job.plain, "plain decoding")
    passes = [one for one in plain.passes if only in (None, one.key)]
    answers, settings = serve(job, kind, passes, drafter)
    records = [set_record(one, answers[one.key], plain.answers[one.key]) for one in passes]
    found = Evaluation.of(kind, settings, records)
    log = get_run_logger()
    for line in found.differences:
        log.warning("%s answers otherwise than plain decoding: %s", kind, line)
    for key, record in found.sets.items():
        equal = f"; {record.outputs_equal} of {len(record.answers)} outputs equal" if record.greedy else ""
        log.info("%s, %s: %.3f accepted + 1 per verification; %.2f times as fast as plain decoding%s", kind, key,
                 record.acceptance_length, record.speed_up, equal)  # fmt: skip
    return found


def serve(
    job: Job, kind: Kind, passes: list[Pass], drafter: Path | None = None
) -> tuple[dict[str, list[Generation]], dict[str, Any]]:
    """Start the target (with a drafter unless `plain`) or attach to it, answer the prompts of every pass, end it.

    Returns:
        answers by `Pass.key`, and what was measured with (`tasks.engine`).
    """
    recipe = job.recipe
    given = {"plain": recipe.evaluate.plain_url, "drafter": recipe.evaluate.url}.get(kind)
    if given:
        server = attach(given)
    else:
        spec = server_spec(recipe, recipe.server, job.folder / f"sglang-{kind}.log", job.state / "sglang.pid")
        spec.num_steps = recipe.evaluate.num_steps
        spec.draft_path = None if kind == "plain" else drafter or job.folder / kind
        server = SGLangServer(spec)
    with server:
        server.wait_ready(recipe.server.ready_deadline_s)
        info = server.info()
        if given:
            refuse_other_server(recipe, given, info, None if kind == "plain" else job.folder / kind)
        settings = engine_settings(recipe, info)
        with SGLangClient(server.base_url, timeout_s=recipe.server.request_timeout_s) as client:
            return {one.key: _answers(client, one, job) for one in passes}, settings


def _answers(client: SGLangClient, one: Pass, job: Job) -> list[Generation]:
    recipe, sampling = job.recipe, dict(one.sampling)
    temperature = sampling.pop("temperature")
    requests = []
    for prompt in one.prompts.prompts:
        rid = f"evaluate-{job.run_id}-{one.key}-{prompt.digest[:16]}"
        # a key of its own: no request finds another's prompt in the prefix cache, whichever order they come in
        requests.append(client.request(prompt.ids, rid=rid, extra_key=rid, temperature=temperature, sampling=sampling,
                                       max_new_tokens=recipe.evaluate.max_new_tokens))  # fmt: skip
    by_rid = {
        answer.rid: answer
        for answer in client.generate_many(
            requests,
            max_in_flight_tokens=recipe.server.max_in_flight_tokens,
            max_in_flight=recipe.evaluate.concurrency,
        )
    }
    return [by_rid[request.rid] for request in requests]


def set_record(one: Pass, answers: list[Generation], plain: list[Generation]) -> SetRecord:
    """What serving a set showed, prompt by prompt."""
    made = [
        Answer(
            prompt.digest, prompt.source, len(prompt.ids), list(a.spec_histogram or []), len(a.output_ids),
            round(a.e2e_latency, 4), len(p.output_ids), round(p.e2e_latency, 4),
            first_difference(a.output_ids, p.output_ids),
        )
        for prompt, a, p in zip(one.prompts.prompts, answers, plain, strict=True)
    ]  # fmt: skip
    found = one.prompts
    return SetRecord(found.name, found.version, found.digest, found.domain, one.sampling, found.in_training, made)


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """First position at which two outputs are not the same; None when they are equal."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def put_figures(job: Job, prefix: str, found: Evaluation) -> None:
    """A drafter's figures into the job's (the held-out set's by name, every set's in `<prefix>_sets`) and to MLflow."""
    record = found.sets[HELD_OUT]
    job.figures |= {f"{prefix}_{name}": value for name, value in record.figures().items()}
    job.figures |= {
        f"{prefix}_histogram": record.histogram,
        f"{prefix}_by_prompt": [round(acceptance_length(a.histogram), 4) for a in record.answers],
        f"{prefix}_sets": {key: one.figures() for key, one in found.sets.items()},
        f"{prefix}_differences": found.differences,
    }
    metrics = {
        f"{prefix}/{key}/{name}": value
        for key, one in found.sets.items()
        for name, value in one.figures().items()
        if not isinstance(value, list)
    }
    for tracker in {id(t): t for t in (need(job.tracker, "MLflow run"), current(job))}.values():
        tracker.metrics(metrics)


def judge(job: Job) -> None:
    """Refuse a drafter that misses the recipe's bound.

    Raises:
        GateError: served acceptance below `evaluate.min_acceptance_length`.
    """
    least, found = job.recipe.evaluate.min_acceptance_length, job.figures.get("served_acceptance_length")
    if least is not None and found is not None and found < least:
        predicted = job.figures["predicted_acceptance_length"]
        diagnosis = job.figures.get("prediction", {}).get("diagnosis")
        raise GateError(
            "served acceptance", f"an acceptance length of {found:.3f} (predicted {predicted:.3f})",
            f"at least {least:g}",
            "It is registered all the same: train longer or on more data."
            + (f" Prediction and serving differ: {diagnosis['in_words']}." if diagnosis else ""),
        )  # fmt: skip
