"""`eyas datasets`: what lies in a store, whether it is intact, and its removal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from flows.environment import state_dir
from flows.workshop import open_section, split_uri
from hidden_states.dataset import Dataset, remove_dataset
from hidden_states.dataset_writer import MANIFEST, PARTS_OF_WRITER, check_name
from hidden_states.errors import DatasetError, RecipeError
from hidden_states.store import Store
from infra.recipe import Store as StoreSection
from infra.recipe_file import load_recipe
from tasks.ledger import PARTS_OF_LEDGER, PLAN
from tasks.words import bytes_in_words, number

PARTS = PARTS_OF_WRITER | PARTS_OF_LEDGER


@contextlib.contextmanager
def opened(place: str, recipe: str | None, *, whole: bool = False) -> Iterator[tuple[Store, str]]:
    """The store and the dataset's name behind a URI, or a bare name in the recipe's store (else the local one).

    Args:
        whole: `place` is a store's URI, not a dataset's; the name is "".
    """
    if not place and not whole:
        raise RecipeError("eyas datasets", "no dataset is named", "its URI, or its name in the recipe's store",
                          "`eyas datasets list` shows what is there.")  # fmt: skip
    given = load_recipe(recipe).store.model_dump() if recipe else {}
    uri, name = given.get("uri", StoreSection().uri), place
    if "://" in place:
        uri, name = (place, "") if whole else split_uri(place)
    name = "" if whole else check_name(name)
    with open_section(StoreSection(**{**given, "uri": uri})) as store:
        yield store, name


def list_all(place: str, recipe: str | None) -> dict[str, Any]:
    """Every dataset under a store's prefix, committed or not; `ok` is false when a manifest is damaged."""
    with opened(place, recipe, whole=True) as (store, _):
        sizes: dict[str, list[int]] = {}
        committed = set()
        for info in store.list():
            name, _, rest = info.key.partition("/")
            if rest and not name.startswith("."):
                sizes.setdefault(name, []).append(info.bytes)
                if rest == MANIFEST:
                    committed.add(name)
        rows = []
        for name in sorted(sizes):
            row: dict[str, Any] = {"name": name, "objects": len(sizes[name]), "bytes": sum(sizes[name])}
            if name in committed:
                try:
                    manifest = Dataset.open(store, name).manifest
                    row |= {"committed": True, "samples": manifest.samples, "tokens": manifest.tokens}
                    row |= {"manifest": manifest.digest, "kept": manifest.encoding.in_words()}
                except DatasetError as error:  # no reason to hide the others
                    row["damaged"] = str(error)
            rows.append({"committed": False, **row})
        return {"store": store.uri, "datasets": rows, "ok": not any("damaged" in row for row in rows)}


def show(place: str, recipe: str | None) -> dict[str, Any]:
    """What a dataset is, from its manifest alone."""
    with opened(place, recipe) as (store, name):
        dataset = Dataset.open(store, name)
        m = dataset.manifest
        return {
            "uri": dataset.uri,
            "manifest": dataset.digest,
            "samples": m.samples,
            "held_out_samples": m.held_out_samples,
            "left_out": m.left_out,
            "tokens": m.tokens,
            "loss_tokens": m.loss_tokens,
            "shards": len(m.shards),
            "bytes": m.total_bytes,
            "bytes_per_token": round(m.total_bytes / max(1, m.tokens), 1),
            "after_block": list(m.after_block),
            "hidden_size": m.hidden_size,
            "dtype": m.dtype,
            "final_norm": m.final_norm,
            "kept": m.encoding.in_words(),
            "coverage": m.coverage,
            "fingerprint": dict(m.fingerprint.fields),
            "fingerprint_sha256": m.fingerprint.digest,
        }


def verify(place: str, recipe: str | None, full: bool) -> dict[str, Any]:
    """Re-read sidecars, sizes and checksums: every byte, or a sample of it."""
    with opened(place, recipe) as (store, name):
        dataset = Dataset.open(store, name)
        found = dataset.verify(full)
        return {
            "uri": dataset.uri, "ok": not found.problems, "full": full, "shards": found.shards,
            "samples_read": found.samples_read, "bytes_read": found.bytes_read, "problems": found.problems,
        }  # fmt: skip


def remove(place: str, recipe: str | None, *, yes: bool, force: bool) -> dict[str, Any]:
    """Remove a dataset, once the person has confirmed it and no registered drafter rests on it.

    Raises:
        DatasetError: there is nothing; a registered drafter's lineage names it, or MLflow cannot be asked (without
            `force`); or it was not confirmed.
    """
    with opened(place, recipe) as (store, name):
        objects = {info.key: info.bytes for info in store.list(f"{name}/")}
        uri = store.object_uri(name)
        if not objects:
            raise DatasetError(uri, "nothing there", "a dataset", "See `eyas datasets list`.")
        _refuse_what_is_no_dataset(uri, {key.removeprefix(f"{name}/").partition("/")[0] for key in objects})
        drafters: list[str] = []
        if f"{name}/{MANIFEST}" in objects:
            from tasks.begin import tracking_uri  # MLflow takes 2 s to import
            from tasks.lineage import drafters_of

            if not force:
                try:
                    digest = Dataset.open(store, name).digest
                except DatasetError as error:
                    do = "Which drafters were trained on it cannot be told. --force removes it all the same."
                    raise DatasetError(error.where, error.found, error.expected, do) from error
                drafters = drafters_of(digest, tracking_uri(state_dir()))
            if drafters:
                raise DatasetError(
                    uri, f"{', '.join(drafters)} in MLflow was trained on it", "one nobody's lineage names",
                    "Delete those versions first, or use --force: their lineage then names data that is gone.",
                )  # fmt: skip
        if not yes:
            _confirm(uri, name, len(objects), sum(objects.values()))
        return {"uri": uri, "removed_objects": remove_dataset(store, name), "removed_bytes": sum(objects.values())}


def _refuse_what_is_no_dataset(uri: str, inside: set[str]) -> None:
    """A store, a folder of one's own, a part of a dataset: what Eyas did not write as a dataset it does not remove."""
    foreign = sorted(inside - PARTS)
    if foreign or not inside & {PLAN, MANIFEST, "shards"}:
        found = (
            f"it holds {', '.join(foreign[:3])}{' ...' if len(foreign) > 3 else ''}"
            if foreign
            else "no plan, no shards"
        )
        raise DatasetError(
            uri, f"not a dataset: {found}", "a dataset's own folder and nothing else in it",
            "`eyas datasets list` names the datasets of a store; remove them one by one.",
        )  # fmt: skip


def _confirm(uri: str, name: str, objects: int, size: int) -> None:
    if not sys.stdin.isatty():
        raise DatasetError(uri, "nobody can be asked here", "a terminal", "Add --yes to remove it unasked.")
    print(f"{uri}: {objects} objects, {bytes_in_words(size)}. They will be gone for good.", file=sys.stderr)
    print(f"Type {name} to remove it: ", end="", file=sys.stderr, flush=True)  # stdout is for the answer
    try:
        typed = input("")
    except EOFError:  # Ctrl-D
        typed = ""
    if typed.strip() != name:
        raise DatasetError(uri, "not confirmed", f"{name!r}", "Nothing was removed.")


def print_list(answer: dict[str, Any]) -> None:
    print(answer["store"] + ("" if answer["datasets"] else ": no datasets"))
    width = max((len(row["name"]) for row in answer["datasets"]), default=0)
    for row in answer["datasets"]:
        what = f"{bytes_in_words(row['bytes']):>8}  "
        if row["committed"]:
            what += f"{number(row['samples'])} samples, {number(row['tokens'])} tokens  {row['manifest'][:16]}"
        else:
            what += f"DAMAGED: {row['damaged']}" if "damaged" in row else f"not committed, {row['objects']} objects"
        print(f"  {row['name']:<{width}}  {what}")


def print_facts(answer: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    problems = answer.pop("problems", [])
    flat = {**answer, **{f"fingerprint {k}": v for k, v in answer.pop("fingerprint", {}).items()}}
    width = max(map(len, flat))
    for name, value in flat.items():
        if isinstance(value, int) and not isinstance(value, bool):
            value = number(value)
        if name != "fingerprint":
            console.print(
                f"{name.replace('_', ' '):<{width}}  {value if value not in ({}, None) else '-'}", markup=False
            )
    for problem in problems:
        console.print(f"- {problem}", markup=False)


PRINT: dict[str, Callable[[dict[str, Any]], None]] = {"list": print_list}
