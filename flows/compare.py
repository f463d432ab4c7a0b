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
from tasks.words import number


def compare_drafters(one: str, other: str) -> dict[str, Any]:
    """Two drafters on the prompts both were served.

    Args:
        one, other: `MODEL/VERSION` in MLflow, or a drafter's folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = [_evaluation(name, Path(folder) / str(number)) for number, name in enumerate((one, other))]
    result = compare(*found)
    return {
        **asdict(result), "names": [one, other],
        "tokens_per_s": [evaluation.tokens_per_s for evaluation in found], "settings": found[0].settings,
        "better": result.low > 0, "worse": result.high < 0,
        "prompts_better": result.better, "prompts_worse": result.worse,
    }  # fmt: skip


def _evaluation(name: str, folder: Path) -> Evaluation:
    if Path(name).is_dir():
        return Evaluation.read(Path(name), name)
    model, _, version = name.rpartition("/")
    folder.mkdir()
    return Evaluation.read(Champions(_client(), model).download(version, folder), name)


def _client() -> MlflowClient:
    return MlflowClient(tracking_uri=tracking_uri(state_dir()))


def print_comparison(answer: dict[str, Any]) -> None:
    """The comparison as a table, and in one sentence."""
    console = Console(highlight=False)
    table = Table(title=f"Acceptance length on {answer['prompts']} common prompts", title_justify="left")
    for column in ("drafter", "acceptance length", "tokens/s in the server"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for key, name, speed in zip(("one", "other"), answer["names"], answer["tokens_per_s"], strict=True):
        table.add_row(name, number(answer[key], 3), number(speed, 1))
    console.print(table)
    words = "better" if answer["better"] else "worse" if answer["worse"] else "not told apart"
    console.print(
        f"difference {answer['difference']:+.3f}, 95% interval [{answer['low']:+.3f}, {answer['high']:+.3f}]: {words}; "
        f"better on {answer['prompts_better']} prompts, worse on {answer['prompts_worse']}"
    )
    for position, value in enumerate(answer["by_position"], start=1):
        console.print(f"  verifications that accept at least {position}: {value:+.3f}")


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
