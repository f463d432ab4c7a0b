"""`eyas compare` and `eyas champion`: drafters side by side, and which one is in production."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from rich.console import Console
from rich.table import Table

from flows.environment import state_dir
from tasks.begin import tracking_uri
from tasks.champion import Champions
from tasks.evaluation import Evaluation, compare
from tasks.intervals import Paired
from tasks.words import number


def compare_drafters(one: str, other: str) -> dict[str, Any]:
    """Two drafters on the prompts both were served.

    Args:
        one, other: `MODEL/VERSION` in MLflow, or a drafter's folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = [_evaluation(name, Path(folder) / str(number)) for number, name in enumerate((one, other))]
    result = compare(found[0], found[1])
    return {
        "names": [one, other],
        "settings": found[0].settings,
        "overall": None if result.overall is None else _in_figures(result.overall),
        "sets": {key: _in_figures(paired) for key, paired in result.sets.items()},
        "too_few": result.too_few,
        "notes": result.notes,
        "figures": [{key: record.figures() for key, record in evaluation.sets.items()} for evaluation in found],
    }


def _in_figures(result: Paired) -> dict[str, Any]:
    return {
        **asdict(result),
        "verdict": "better" if result.low > 0 else "worse" if result.high < 0 else "not told apart",
    }


def _evaluation(name: str, folder: Path) -> Evaluation:
    if Path(name).is_dir():
        return Evaluation.read(Path(name), name)
    model, _, version = name.rpartition("/")
    folder.mkdir()
    return Evaluation.read(Champions(_client(), model).download(version, folder), name)


def _client() -> MlflowClient:
    return MlflowClient(tracking_uri=tracking_uri(state_dir()))


def print_comparison(answer: dict[str, Any]) -> None:
    """The comparison as a table, a row a set, and what each accepts at every position."""
    console = Console(highlight=False)
    one, other = answer["names"]
    table = Table(title=f"Acceptance length: {one} / {other}", title_justify="left")
    for column in ("set", "prompts", "one", "other", "difference, 95% interval", "verdict", "speed-up, one / other"):
        table.add_column(column, justify="left" if column in ("set", "verdict") else "right")
    rows = answer["sets"] | ({"all together": answer["overall"]} if answer["overall"] else {})
    for key, found in rows.items():
        speeds = " / ".join(number(f[key]["speed_up"], 2) if key in f else "-" for f in answer["figures"])
        interval = f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
        table.add_row(key, str(found["prompts"]), number(found["one"], 3), number(found["other"], 3), interval,
                      found["verdict"], speeds if key in answer["sets"] else "-")  # fmt: skip
    console.print(table)
    for key, count in answer["too_few"].items():
        console.print(f"{key}: {count} prompts in common, too few for an interval")
    for note in answer["notes"]:
        console.print(note, markup=False)
    for key, found in answer["sets"].items():
        positions = ", ".join(f"{value:+.3f}" for value in found["by_position"])
        console.print(f"{key}: share of verifications that accept at least 1, 2, ... drafted tokens: {positions}")


def champion(model: str, *, to: str | None, back: bool, reason: str | None) -> dict[str, Any]:
    """Show the champion of a model, or move it by hand.

    Raises:
        DatasetError: no such model or version, or nothing to go back to.
    """
    known = Champions(_client(), model)
    why = reason or "no reason given"
    if to is not None:
        known.move(to, "hand", why)
    elif back:
        known.back(why)
    return {"model": model, "champion": known.version, "history": [asdict(move) for move in known.history()]}


def print_champion(answer: dict[str, Any]) -> None:
    """The champion, and how it came to be."""
    print(
        f"{answer['model']}: " + (f"version {answer['champion']} is champion" if answer["champion"] else "no champion")
    )
    for move in answer["history"]:
        print(f"  {move['at']}  version {move['version']}, by {move['by']}: {move['why']}")
