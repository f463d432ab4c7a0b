"""Measuring a drafter that exists: on other prompts, after a change of target or engine, or one from elsewhere."""

from collections.abc import Sequence
from typing import Any

from flows.flow import eyas_flow, name_run
from flows.workshop import workshop
from infra.recipe_file import load_recipe
from tasks.candidate import find_drafter, finish_evaluation, keep, open_its_dataset
from tasks.champion import decide, decide_unregistered, measure_champion
from tasks.committed import find_dataset
from tasks.prediction import compare_prediction
from tasks.serving import measure, measure_plain
from tasks.stage import stage
from tasks.verdict_report import report_verdict


@eyas_flow("evaluate")
def evaluate(recipe: str = "demo-smollm2", overrides: Sequence[str] = (), drafter: str | None = None) -> dict[str, Any]:
    """Serve a drafter on every prompt set, beside plain decoding and the champion, and say what became of it.

    Args:
        recipe: a recipe file, or the name of one that is shipped (infra/recipes).
        overrides: `dotted.key=value` strings that change the recipe, for example `register.promote=false`.
        drafter: `MODEL/VERSION` or `MODEL@ALIAS` in MLflow, or a folder on this machine; left out = the champion.

    Returns:
        The run's summary.
    """
    with workshop(load_recipe(recipe, list(overrides))) as job:
        candidate = find_drafter(job, drafter)
        find_dataset(job, candidate.dataset)
        name_run(job)
        open_its_dataset(job, candidate)
        with stage(job, "evaluation"):
            measure_plain(job)
            measure(job, "drafter")
            compare_prediction(job, job.folder / "drafter")
            if not candidate.is_champion:
                measure_champion(job)
        keep(job, candidate)
        if candidate.version is None:
            decide_unregistered(job)
        elif not candidate.is_champion:
            decide(job)
            report_verdict(job)
        return finish_evaluation(job)
