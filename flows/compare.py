"""`eyas compare` and `eyas champion`: drafters side by side, and which one is in production."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.environment import state_dir
from hidden_states.errors import DatasetError, RecipeError
from tasks.begin import tracking_uri
from tasks.champion import Champions
from tasks.comparison import Side, compare_sides
from tasks.comparison_page import comparison_page
from tasks.evaluation import Evaluation
from tasks.mlflow_client import asking, mlflow_client
from tasks.verdict_report import interval
from tasks.words import number


def compare_drafters(
    one: str, other: str, sets: Sequence[str] = (), html: Path | None = None, client: MlflowClient | None = None
) -> dict[str, Any]:
    """Two drafters on the prompts both were served; see `tasks.comparison.compare_sides`.

    Args:
        one, other: `MODEL/VERSION` or `MODEL@ALIAS` in MLflow, or a drafter's folder.
        sets: only these prompt sets; none = all that both were served.
        html: where to write the page.

    Raises:
        DatasetError: no such drafter, not served, or not comparable.
        ServerError: MLflow is needed and does not answer.
        RecipeError: the page cannot be written there.
    """
    if html is not None and not html.resolve().parent.is_dir():
        raise RecipeError(str(html), "there is no such folder", "a file in a folder that exists", "Make the folder.")
    client = client or _client(ask=not (os.path.isdir(one) and os.path.isdir(other)))
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (_side(name, Path(folder) / str(n), client) for n, name in enumerate((one, other)))
        answer = compare_sides(ours, theirs, sets)
    if html is not None:
        try:
            html.write_text(comparison_page(answer), encoding="utf-8")
        except OSError as error:
            raise RecipeError(str(html), f"it cannot be written ({error.strerror})", None, "Name another.") from error
        answer["page"] = str(html.resolve())
    return answer


def _side(name: str, folder: Path, client: MlflowClient) -> Side:
    if os.path.isdir(name):  # False, too, for a name no file can have
        return Side.of(Evaluation.read(Path(name), name), Path(name), client)
    model, version = _version(name, client)
    folder.mkdir()
    found = Champions(client, model).download(version, folder)  # with its newest evaluation
    return Side.of(Evaluation.read(found, f"{model}/{version}"), found, client)


def _version(name: str, client: MlflowClient) -> tuple[str, str]:
    model, at, version = name.rpartition("@" if "@" in name else "/")
    do = "MLflow's page lists the versions: `eyas up`."
    if not model:
        raise DatasetError(
            name, "neither a folder nor a version", "a drafter's folder, MODEL/VERSION or MODEL@ALIAS", do
        )
    with asking(client.tracking_uri, DatasetError(name, "no such version in MLflow", None, do)):
        if at == "@":
            version = client.get_model_version_by_alias(model, version).version
        return model, str(client.get_model_version(model, str(version)).version)


def _client(*, ask: bool = True) -> MlflowClient:
    return mlflow_client(tracking_uri(state_dir()), ask=ask)


def print_comparison(answer: dict[str, Any]) -> None:
    """Tables: a row a set (and domain), a row a position; then what differs in the making."""
    console = Console(highlight=False)
    one, other = answer["names"]
    console.print(f"one: {one}\nother: {other}\n", markup=False)
    _print_rows(console, answer)
    for key, count in answer["too_few"].items():
        console.print(f"{key}: {count} prompts in common, too few for an interval", markup=False)
    for note in answer["notes"]:
        console.print(note, markup=False)
    table = Table(title="\nShare of verifications that accept so many tokens", title_justify="left", box=SIMPLE)
    for column in ("set", "tokens", "one", "other", "lead, 95% interval"):
        table.add_column(column, justify="left" if column == "set" else "right", no_wrap=True)
    for key, found in answer["sets"].items():
        for n, row in enumerate(found["positions"]):
            table.add_row("" if n else Text(key), str(row["position"]), number(row["one"], 3), number(row["other"], 3),
                          interval(row))  # fmt: skip
    console.print(table)
    for kind, lines in answer["differs"].items():
        console.print(f"{kind}: " + ("; ".join(lines) or "the same"), markup=False)
    if "page" in answer:
        print(f"page: {answer['page']}")  # whole: a path broken at the terminal's width cannot be opened


def _print_rows(console: Console, answer: dict[str, Any]) -> None:
    table = Table(title="Accepted tokens per verification + 1", title_justify="left", box=SIMPLE)
    for column in ("set", "prompts", "one", "other", "lead, 95% interval", "speed-up"):
        table.add_column(column, justify="left" if column == "set" else "right")
    rows = dict(answer["sets"])
    if 1 < len(answer["domains"]) < len(rows):
        rows |= {f"domain {key}": row for key, row in answer["domains"].items()}
    if answer["overall"]:
        rows["all together"] = answer["overall"]
    for key, row in rows.items():
        speeds = " / ".join(number(value, 2) for value in row.get("speed_up", ())) or "-"
        lead = f"{row['verdict']} {interval(row)}".replace(" [", "\n[")
        table.add_row(Text(key), str(row["prompts"]), number(row["one"], 3), number(row["other"], 3), lead, speeds)
    console.print(table)


def champion(model: str, *, to: str | None, back: bool, reason: str | None) -> dict[str, Any]:
    """Show the champion of a model, or move it by hand.

    Raises:
        DatasetError: no such model or version, or nothing to go back to.
        ServerError: MLflow does not answer.
    """
    if not model.strip() or set(model) & set("/:"):
        raise DatasetError(f"model {model!r}", "no model of MLflow is called so", "a name without / and :",
                           "MLflow's page lists them: `eyas up`.")  # fmt: skip
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
