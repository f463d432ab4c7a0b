"""The whole road as one Prefect flow, and its first half alone."""

from collections.abc import Sequence
from typing import Any

from flows.flow import eyas_flow, name_run
from flows.workshop import workshop
from infra.recipe_file import load_recipe
from tasks.assets import show_dataset, show_drafter
from tasks.begin import plan_run
from tasks.capture import clear_warm_up, launch_servers, stop_servers
from tasks.champion import decide, measure_champion
from tasks.dataset import commit_dataset, open_dataset, use_dataset
from tasks.extract import extract_batches
from tasks.extraction_report import report_extraction
from tasks.job import Job, need
from tasks.prediction import compare_prediction
from tasks.proof import prove_states
from tasks.registry import finish, finish_extraction, register_drafter
from tasks.replies import regenerate_replies
from tasks.serving import judge, measure, measure_plain
from tasks.stage import stage
from tasks.training import export_drafters, train_drafter
from tasks.verdict_report import report_verdict


@eyas_flow("drafter_pipeline")
def drafter_pipeline(recipe: str = "demo-smollm2", overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Capture hidden states, prove and store them, train an EAGLE-3 drafter, serve, measure and register it.

    Args:
        recipe: a recipe file, or the name of one that is shipped (infra/recipes).
        overrides: `dotted.key=value` strings that change the recipe, for example `train.lr=1e-4`.

    Returns:
        The run's summary.
    """
    with workshop(load_recipe(recipe, list(overrides))) as job:
        plan_run(job)
        name_run(job)
        with stage(job, "extraction"):
            make_dataset(job)
        with stage(job, "training"):
            train_drafter(job)
            export_drafters(job)
        if job.recipe.evaluate.enabled:
            with stage(job, "evaluation"):
                measure_plain(job)
                measure(job, "drafter")
                compare_prediction(job, job.folder / "drafter")
                if job.recipe.evaluate.control:
                    measure(job, "control")
                measure_champion(job)
        register_drafter(job)
        show_drafter(job)
        decide(job)
        report_verdict(job)
        summary = finish(job)
        judge(job)
        return summary


@eyas_flow("extract")
def extract(recipe: str = "demo-smollm2", overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Capture hidden states, prove and store them; no training. A later `drafter_pipeline` run goes on from there.

    Args:
        recipe: a recipe file, or the name of one that is shipped (infra/recipes).
        overrides: `dotted.key=value` strings that change the recipe, for example `extract.in_flight=2`.

    Returns:
        The run's summary.
    """
    with workshop(load_recipe(recipe, list(overrides))) as job:
        plan_run(job)
        name_run(job)
        with stage(job, "extraction"):
            make_dataset(job)
        return finish_extraction(job)


def make_dataset(job: Job) -> None:
    """From prompts to a committed dataset, unless it is committed already. The servers are ended whatever happens."""
    if need(job.ledger, "ledger").state != "complete":
        try:
            launch_servers(job)
            clear_warm_up(job)
            regenerate_replies(job)
            missing = open_dataset(job)
            if missing:
                prove_states(job)
                extract_batches(job, missing)
        finally:
            stop_servers(job)
        commit_dataset(job)
    use_dataset(job)
    show_dataset(job)
    report_extraction(job)
