"""Datasets and drafters as assets of Prefect: what was made of what, on its lineage page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.cache_policies import NO_CACHE

from tasks.job import Job, need


def show_dataset(job: Job) -> None:
    """The dataset of this run, made of its conversations by its target."""
    manifest = need(job.dataset, "dataset").manifest
    sources = [Path(path).resolve().as_uri() for path in job.recipe.data.conversations]
    figures = {"samples": manifest.samples, "tokens": manifest.tokens, "manifest": job.figures["manifest_digest"]}
    _show(job.figures["dataset_uri"], f"hidden states of {job.target_name}", sources, figures)


def show_drafter(job: Job) -> None:
    """The registered drafter, trained on its dataset."""
    figures = job.figures
    known = ("predicted_acceptance_length", "served_acceptance_length", "train_steps")
    key = f"mlflow://models/{figures['model_name']}/{figures['model_version']}"
    _show(key, f"drafter for {job.target_name}", [figures["dataset_uri"]], {k: figures.get(k) for k in known})


def _show(key: str, name: str, made_of: Sequence[str], figures: dict[str, Any]) -> None:
    asset = Asset(key=key, properties=AssetProperties(name=name))

    @materialize(asset, asset_deps=list(made_of), name="show lineage", cache_policy=NO_CACHE, persist_result=False)
    def show() -> None:
        add_asset_metadata(key, figures)

    show()
