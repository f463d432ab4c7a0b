"""`eyas import` and `eyas export`: other trainers' folders from and to datasets."""

from pathlib import Path
from typing import Any

from flows.datasets import opened
from hidden_states.dataset import Dataset
from hidden_states.errors import RecipeError
from hidden_states.final_norm import FinalNorm
from hidden_states.formats import format_of
from hidden_states.formats_export import export_folder
from hidden_states.formats_import import ImportOptions, import_folder
from infra.recipe_file import load_recipe


def import_dataset(
    format: str, folder: str, place: str, recipe: str | None, target: str | None, options: ImportOptions
) -> dict[str, Any]:
    """Make a dataset of a folder; says which convention its states follow.

    Raises:
        Refusal: what the folder leaves unsaid is neither found nor told.
    """
    with opened(place, recipe) as (store, name):
        made = import_folder(
            format_of(format), Path(folder), Path(_target(target, recipe)), store, name, options, lambda said: None
        )
        manifest = made.dataset.manifest
        return {
            "uri": made.dataset.uri,
            "manifest": made.dataset.digest,
            "convention": made.convention.in_words(),
            "samples": manifest.samples,
            "tokens": manifest.tokens,
            "duplicates_left_out": len(made.duplicates),
        }


def export_dataset(place: str, format: str, folder: str, recipe: str | None, target: str | None) -> dict[str, Any]:
    """Write a dataset as another trainer's folder.

    Raises:
        Refusal: the dataset keeps less than the format needs, or the target's norm is needed and not given.
    """
    with opened(place, recipe) as (store, name):
        dataset = Dataset.open(store, name)
        chosen = format_of(format)
        needs_norm = dataset.manifest.final_norm != chosen.final_norm and (target or recipe)
        norm = FinalNorm.load(_target(target, recipe)) if needs_norm else None
        said = export_folder(dataset, chosen, Path(folder), norm)
        return {"folder": folder, "format": format, "samples": dataset.manifest.samples, "final_state": said}


def _target(target: str | None, recipe: str | None) -> str:
    if target is not None:
        return target
    if recipe is None:
        raise RecipeError("--target", "missing", "the target's folder", "Give it, or a recipe that names it.")
    return load_recipe(recipe).target.model_path
