"""The whole road, as one Prefect flow."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.workshop import workshop
from infra.recipe_file import load_recipe
from tasks.begin import plan_run
from tasks.capture import clear_warm_up, launch_server, stop_server
from tasks.dataset import commit_dataset, open_dataset, use_dataset
from tasks.extract import extract_batch
from tasks.job import Job, need
from tasks.proof import prove_states
from tasks.registry import finish, register_drafter
from tasks.replies import regenerate_replies
from tasks.serving import judge, measure, measure_plain
from tasks.training import export_drafters, train_drafter


def run_name() -> str:
    """What the run is called in Prefect's list: the recipe it runs."""
    return str(flow_run.parameters.get("recipe", "drafter-pipeline"))


@flow(name="drafter_pipeline", flow_run_name=run_name, persist_result=False)
def drafter_pipeline(recipe: str = "demo-smollm2", overrides: list[str] | None = None) -> dict[str, Any]:
    """Capture hidden states, prove and store them, train an EAGLE-3 drafter, serve, measure and register it.

    Args:
        recipe: a recipe file, or the name of one that is shipped (infra/recipes).
        overrides: `dotted.key=value` strings that change the recipe, for example `train.lr=1e-4`.

    Returns:
        The run's summary.
    """
    with workshop(load_recipe(recipe, overrides or [])) as job:
        plan_run(job)
        if need(job.ledger, "ledger").state != "complete":
            extract(job)
        use_dataset(job)
        train_drafter(job)
        export_drafters(job)
        if job.recipe.evaluate.enabled:
            measure_plain(job)
            measure(job, "drafter")
            if job.recipe.evaluate.control:
                measure(job, "control")
        register_drafter(job)
        summary = finish(job)
        judge(job)
        return summary


def extract(job: Job) -> None:
    """From prompts to a committed dataset. The server is ended whatever happens in between."""
    try:
        launch_server(job)
        clear_warm_up(job)
        regenerate_replies(job)
        missing = open_dataset(job)
        if missing:
            prove_states(job)
        for batch_id in missing:
            extract_batch(job, batch_id)
    finally:
        stop_server(job)
    commit_dataset(job)
