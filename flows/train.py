"""Training alone, on a dataset that is in the bucket already."""

from collections.abc import Sequence
from typing import Any

from flows.flow import eyas_flow, name_run
from flows.workshop import workshop
from infra.recipe_file import load_recipe
from tasks.assets import show_drafter
from tasks.committed import find_dataset
from tasks.dataset import use_dataset
from tasks.registry import finish_training, register_drafter
from tasks.stage import stage
from tasks.training import export_drafters, train_drafter


@eyas_flow("train")
def train(recipe: str = "demo-smollm2", overrides: Sequence[str] = (), dataset: str | None = None) -> dict[str, Any]:
    """Train an EAGLE-3 drafter on a committed dataset, export it for SGLang and register it. Nothing is served.

    Args:
        recipe: a recipe file, or the name of one that is shipped (infra/recipes).
        overrides: `dotted.key=value` strings that change the recipe, for example `train.lr=1e-4`.
        dataset: name of a dataset in the recipe's store, for example `demo-smollm2-v2`; left out = the newest version.

    Returns:
        The run's summary.
    """
    with workshop(load_recipe(recipe, list(overrides))) as job:
        find_dataset(job, dataset)
        name_run(job)
        use_dataset(job)
        with stage(job, "training"):
            train_drafter(job)
            export_drafters(job)
        register_drafter(job)
        show_drafter(job)
        return finish_training(job)
