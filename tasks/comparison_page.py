"""A comparison as one HTML file that needs nothing beside it: no script, no network, for light and for dark screens."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tasks import plots

TEMPLATE = "comparison_page.html.jinja"


def comparison_page(answer: dict[str, Any]) -> str:
    """The page.

    Args:
        answer: of `tasks.comparison.compare_sides`.
    """
    pages = Environment(  # names of models and sets are people's own words: escaped
        loader=PackageLoader("tasks", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    model, labels = short_names(answer["names"])
    drawn = {name: Markup(svg) for name, svg in figures(answer, labels).items()}
    return pages.get_template(TEMPLATE).render(**answer, model=model, labels=labels, plots={"losses": None, **drawn})


def short_names(names: Sequence[str]) -> tuple[str | None, list[str]]:
    """What both have in common, and what tells them apart: `MODEL/2` and `MODEL/1` are versions 2 and 1 of MODEL."""
    (model, _, one), (other_model, _, other) = (name.rpartition("/") for name in names)
    if model and model == other_model and one.isdigit() and other.isdigit():
        return model, [f"version {one}", f"version {other}"]
    return None, list(names)


def figures(answer: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    """The plots as SVG, by name; no `losses` where MLflow does not know the trainings."""
    sets = answer["sets"]
    found = {}
    if sets:
        found["differences"] = plots.differences(sets)
        both = [{k: [p[side] for p in row["positions"]] for k, row in sets.items()} for side in ("one", "other")]
        found["by_position"] = plots.by_position(both, names)
    keys = [key for key in answer["figures"][0] if key in answer["figures"][1]]
    found["throughput"] = plots.throughput(answer["figures"], keys, names)
    if any(answer["curves"]):
        found["losses"] = plots.losses(answer["curves"], names)
    return found
