"""Measuring a drafter where it counts: served by SGLang, on held-out prompts, against plain decoding."""

from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from prefect.logging import get_run_logger

from hidden_states.errors import GateError
from hidden_states.manifest import HELD_OUT
from infra.client import Generation, SGLangClient, acceptance_length
from infra.recipe import Recipe
from infra.server import SGLangServer
from tasks.capture_session import server_spec
from tasks.job import Job, need
from tasks.step import step

Kind = Literal["drafter", "control", "plain", "champion"]


@dataclass(frozen=True)
class ServedPrompt:
    """A held-out prompt; `reply` is the target's own plain greedy reply, None when it is not known yet."""

    ids: list[int]
    reply: list[int] | None


@dataclass(frozen=True)
class Served:
    """What serving showed.

    Attributes:
        acceptance_length: accepted drafted tokens per verification + 1, from the histogram.
        histogram: verifications by accepted drafted tokens, 0 to num_steps.
        histograms: the same per prompt, for paired comparisons; each may end early.
        by_prompt: acceptance length of each prompt.
        outputs_equal: prompts whose output is token for token that of plain decoding.
        tokens_per_s: output tokens over the servers' seconds per request.
    """

    acceptance_length: float
    histogram: list[int]
    histograms: list[list[int]]
    by_prompt: list[float]
    prompts: int
    outputs_equal: int
    tokens: int
    tokens_per_s: float


def held_out_prompts(job: Job) -> list[ServedPrompt]:
    """The first held-out samples of the dataset, cut where their reply begins."""
    recipe, dataset = job.recipe, need(job.dataset, "dataset")
    table = dataset.samples
    ids = sorted(
        i for i, split in zip(table["id"].to_pylist(), table["split"].to_pylist(), strict=True) if split == HELD_OUT
    )
    own = recipe.regenerate
    known = own.enabled and own.temperature == 0 and own.max_new_tokens >= recipe.evaluate.max_new_tokens
    prompts = []
    for sample_id in ids[: recipe.evaluate.prompts]:
        tokens, mask = dataset.read_tokens(sample_id)
        start = mask.index(1)
        reply = tokens[start:][: recipe.evaluate.max_new_tokens] if known else None
        prompts.append(ServedPrompt(tokens[:start], reply))
    return prompts


def serve(
    job: Job, kind: Kind, prompts: list[ServedPrompt], drafter: Path | None = None
) -> tuple[Served, list[Generation]]:
    """Start the target (with a drafter unless `plain`), answer the prompts, end it.

    Args:
        drafter: its folder; left out = this run's own of that kind.
    """
    recipe = job.recipe
    spec = server_spec(recipe, recipe.server, job.folder / f"sglang-{kind}.log", job.state / "sglang.pid")
    spec.num_steps = recipe.evaluate.num_steps
    spec.draft_path = None if kind == "plain" else drafter or job.folder / kind
    with SGLangServer(spec) as server:
        server.wait_ready(recipe.server.ready_deadline_s)
        with SGLangClient(server.base_url, timeout_s=recipe.server.request_timeout_s) as client:
            answers = _answers(client, prompts, recipe)
    # SGLang ends each histogram at the longest acceptance that request had: they differ in length
    histogram = [sum(column) for column in zip_longest(*(a.spec_histogram or [] for a in answers), fillvalue=0)]
    equal = sum(p.reply is None or a.output_ids == p.reply for p, a in zip(prompts, answers, strict=True))
    tokens = sum(len(a.output_ids) for a in answers)
    return Served(
        acceptance_length=round(acceptance_length(histogram), 4),
        histogram=histogram,
        histograms=[list(a.spec_histogram or []) for a in answers],
        by_prompt=[round(a.acceptance_length or 1.0, 4) for a in answers],
        prompts=len(prompts),
        outputs_equal=equal,
        tokens=tokens,
        tokens_per_s=round(tokens / sum(a.e2e_latency for a in answers), 2),
    ), answers


def _answers(client: SGLangClient, prompts: list[ServedPrompt], recipe: Recipe) -> list[Generation]:
    requests = [client.request(p.ids, max_new_tokens=recipe.evaluate.max_new_tokens) for p in prompts]
    by_rid = {
        answer.rid: answer
        for answer in client.generate_many(
            requests,
            max_in_flight_tokens=recipe.server.max_in_flight_tokens,
            max_in_flight=recipe.evaluate.concurrency,
        )
    }
    return [by_rid[request.rid] for request in requests]


@step("measure plain decoding", retries=1)
def measure_plain(job: Job) -> None:
    """The held-out prompts with the target's plain replies: from the dataset, or by serving it without a drafter."""
    prompts = held_out_prompts(job)
    if any(p.reply is None for p in prompts):
        _, answers = serve(job, "plain", prompts)
        prompts = [ServedPrompt(p.ids, a.output_ids) for p, a in zip(prompts, answers, strict=True)]
    job.prompts = prompts


@step("serve and measure", retries=1, run_name="serve and measure {kind}")
def measure(job: Job, kind: Kind) -> None:
    """Serve one drafter and put its figures into the job's, named `served_...` or `control_...`."""
    served, _ = serve(job, kind, need(job.prompts, "prompts"))
    prefix = "served" if kind == "drafter" else kind
    job.figures |= {f"{prefix}_{name}": value for name, value in asdict(served).items()}
    get_run_logger().info("%s: %.3f accepted + 1 per verification; %d of %d outputs as in plain decoding", kind,
                          served.acceptance_length, served.outputs_equal, served.prompts)  # fmt: skip


def judge(job: Job) -> None:
    """Refuse a drafter that misses the recipe's bound.

    Raises:
        GateError: served acceptance below `evaluate.min_acceptance_length`.
    """
    least, found = job.recipe.evaluate.min_acceptance_length, job.figures.get("served_acceptance_length")
    if least is not None and found is not None and found < least:
        predicted = job.figures["predicted_acceptance_length"]
        raise GateError(
            "served acceptance", f"an acceptance length of {found:.3f} (predicted {predicted:.3f})",
            f"at least {least:g}",
            "It is registered all the same: train longer or on more data. If predicted and served differ, one of "
            "layers, norm, rope, vocabulary map, template and dtype differs between training and serving.",
        )  # fmt: skip
