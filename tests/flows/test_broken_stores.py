"""An MLflow that is away, other trainers' damaged files and damaged datasets: named in a refusal, never a traceback."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hidden_states.formats import ForeignSample, formats
from hidden_states.store import Store, open_store
from tests.flows.house import Break, House, config, text, without
from tests.hidden_states.stored import make_dataset
from tests.tiny_models import make_tiny

# --- MLflow ----------------------------------------------------------------------------------------------------------


WORD = "secret-word"  # never to be shown
AWAY = {
    "nobody listens": "http://127.0.0.1:9", "a word": "nonsense", "a folder": "file:///tmp/x", "a scheme": "foo://x",
    "no host": "http:///x", "half an address": "http://[::1", "somebody named": f"http://me:{WORD}@127.0.0.1:9",
    "no driver": f"mysql://me:{WORD}@127.0.0.1:9/x",
}  # fmt: skip


@pytest.fixture(params=AWAY)
def cut_off(house: House, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> House:
    """A house whose MLflow is not there."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", AWAY[request.param])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return house


def test_an_mlflow_that_is_not_there_is_no_missing_version(cut_off: House) -> None:
    for command in (["champion", "x"], ["champion", "x", "--back"], ["compare", "x/1", "x@champion"]):
        said = cut_off.refused(*command, code=4, says="no answer")
        assert "MLFLOW_TRACKING_URI" in said and "no such" not in said and WORD not in said
    _, said = cut_off.run("doctor", cut_off.recipe, f"store.uri={cut_off.store}", "server.python=/bin/false")
    assert "FAIL  MLflow " in said and WORD not in said


def test_a_dataset_is_kept_while_nobody_can_say_who_was_trained_on_it(cut_off: House) -> None:
    store = cut_off.folder / "kept"
    make_dataset(open_store(store.as_uri()), cut_off.folder / "made", [5, 6], shard_tokens=8)
    said = cut_off.refused(
        "datasets", "rm", f"{store.as_uri()}/data", "--yes", code=7, says="does not say which drafters"
    )
    assert "--force" in said and WORD not in said
    assert (store / "data" / "manifest.json").exists()


@pytest.mark.parametrize("model", ["", " ", "a/b", "../x", "/", "a:b", "x" * 3000, "nobody"])
@pytest.mark.parametrize("how", [[], ["--back"], ["--set", "1"]], ids=["show", "back", "set"])
def test_a_model_that_cannot_be_is_refused_by_name(house: House, model: str, how: list[str]) -> None:
    says = "no registered model of this name" if model in ("nobody", "x" * 3000) else "a name without / and :"
    found, said = house.run("champion", *how, "--", model)
    assert found == 7 and says in said


@pytest.mark.parametrize("name", ["", "/", "@", "x/", "/1", "@champion", "a/b/1", "x/y", "x@a/b", "../x", "n" * 5000])
def test_a_drafter_that_cannot_be_is_refused_by_name(house: House, name: str) -> None:
    found, said = house.run("compare", "--", name, name)
    assert found == 7
    assert any(words in said for words in ("no such version in MLflow", "neither a folder nor a version", "was served"))


def a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("content", [a_folder, "", "{", "[]", "3", '{"format": "eyas-evaluation/2", "sets": 3}'])
def test_an_evaluation_that_is_none_is_refused_by_its_path(house: House, content: Any) -> None:
    folder = house.folder / "drafter"
    folder.mkdir()
    path = folder / "evaluation.json"
    content(path) if callable(content) else path.write_text(content)
    house.refused("compare", str(folder), str(folder), code=7, says=str(path))


def test_a_page_that_cannot_be_written_is_refused_before_the_comparison(house: House) -> None:
    page = house.folder / "nowhere" / "page.html"
    house.refused("compare", "x/1", "x/2", "--html", str(page), code=2, says="no such folder")


# --- import, export and the list of datasets -------------------------------------------------------------------------


@pytest.fixture
def foreign(house: House) -> Path:
    """A folder of SpecForge's, of states of the tiny target's size; and a target of another."""
    samples = [
        ForeignSample(str(n), torch.arange(5) + n, torch.ones(5).long(), torch.randn(5, 3, 128), torch.randn(5, 128))
        for n in range(3)
    ]
    formats()["specforge"].write(house.folder / "foreign", iter(samples), 3, None)
    return house.folder / "foreign"


BLIND = ["--no-reference", "--after-block", "1", "2", "4"]
WRONG_OPTIONS: dict[str, tuple[list[str], str]] = {
    "batch-tokens 0": (["--batch-tokens", "0"], "--batch-tokens: 0"),
    "batch-tokens -1": (["--batch-tokens=-1"], "--batch-tokens: -1"),
    "share nan": (["--held-out-share", "nan"], "--held-out-share: nan"),
    "share inf": (["--held-out-share", "inf"], "--held-out-share: inf"),
    "share -1": (["--held-out-share=-1"], "--held-out-share: -1"),
    "share 7": (["--held-out-share", "7"], "--held-out-share: 7"),
    "share 1": (["--held-out-share", "1"], "--held-out-share: 1"),
    "vocabulary 0": (["--draft-vocab-size", "0"], "--draft-vocab-size: 0"),
    "blocks backwards": (["--after-block", "4", "1"], "--after-block: (4, 1)"),
    "blocks below 0": (["--after-block=-1"], "--after-block: (-1,)"),
}


@pytest.mark.parametrize("wrong", WRONG_OPTIONS)
def test_an_option_of_import_that_cannot_be_is_refused(house: House, foreign: Path, wrong: str) -> None:
    options, says = WRONG_OPTIONS[wrong]
    place = f"{house.store}/made"
    house.refused("import", "specforge", str(foreign), place, "--target", str(house.model), *options, code=2, says=says)
    assert not (house.folder / "store" / "made").exists()


@pytest.mark.parametrize("blind", [True, False], ids=["blind", "reference"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (config(hidden_size=64), "64, the target's hidden size"),
        (config(hidden_size="x"), "`hidden_size` is 'x'"),
        (config(vocab_size=3), "ids from 0 to 2, the target's vocabulary"),
        (config(vocab_size="x"), "`vocab_size` is 'x'"),
        (text("config.json", "[]"), "no object (list)"),
        (without("config.json"), "no such file"),
        (without("model.safetensors"), "--no-reference|its weights cannot be read"),
        (text("model.safetensors", "x" * 100), "--no-reference|its weights cannot be read"),
        (config(model_type=...), "--no-reference|-"),
        (text("tokenizer_config.json", "{"), "none of this target's|-"),
    ],
    ids=["size", "size-x", "vocabulary", "vocabulary-x", "list", "no-config", "no-weights", "cut", "type", "tokenizer"],
)
def test_a_target_that_is_not_that_of_the_states_is_refused_by_import(
    house: House, foreign: Path, change: Break, says: str, blind: bool
) -> None:
    change(house.model)
    place, target = f"{house.store}/made", ["--target", str(house.model)]
    seeing, _, blindly = says.partition("|")
    says = blindly or seeing if blind else seeing
    if says == "-":  # what made-up states look like without a reference is chance
        return
    house.refused("import", "specforge", str(foreign), place, *target, *(BLIND if blind else []), code=3, says=says)


def test_a_target_of_another_size_without_its_size_in_the_config_is_refused(house: House, foreign: Path) -> None:
    other = make_tiny("llama", house.folder / "other")
    config(hidden_size=...)(Path(other))
    weights = {"model.norm.weight": torch.ones(64)}
    safetensors.torch.save_file(weights, Path(other) / "model.safetensors")
    place = f"{house.store}/made"
    said = house.refused("import", "specforge", str(foreign), place, "--target", str(other), *BLIND, code=8, says="64")
    assert "128 values a row" in said


@pytest.mark.parametrize("damage", ["cut", "folder", "text", "empty", "gzip"])
@pytest.mark.parametrize("format", ["specforge", "speculators"])
def test_a_damaged_file_of_another_trainer_is_refused_by_its_path(
    house: House, format: str, damage: str, tmp_path: Path
) -> None:
    sample = ForeignSample("0", torch.arange(5), torch.ones(5).long(), torch.randn(5, 3, 128), torch.randn(5, 128))
    folder = house.folder / "theirs"
    formats()[format].write(folder, iter([sample]), 1, None)
    (path,) = formats()[format].files(folder)
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "gzip" and format == "specforge":
        path = path.with_name(f"{path.name}.gz")
        path.write_bytes(b"\x1f\x8b\x08\x00" + os.urandom(200))
    else:
        path.write_bytes(
            {"cut": data[: len(data) // 2], "text": b"not a pickle", "empty": b""}.get(damage, b"\x80\x02")
        )
    place = f"{house.store}/made"
    house.refused("import", format, str(folder), place, "--target", str(house.model), code=3, says=str(path))


@pytest.fixture
def store(house: House) -> Store:
    store = open_store((house.folder / "store").as_uri())
    make_dataset(store, house.folder, [5, 6, 9], shard_tokens=10)
    return store


@pytest.mark.parametrize(
    ("folder", "says"),
    [("recipe.yaml", "it cannot be written"), ("recipe.yaml/x", "it cannot be written"), ("n" * 300, "cannot be"),
     ("/proc/x/y", "it cannot be written"), (".", "it is not empty"), ("", "it is not empty")],
)  # fmt: skip
def test_a_place_that_cannot_take_an_export_is_refused(house: House, store: Store, folder: str, says: str) -> None:
    house.refused("export", f"{store.uri}/data", "specforge", folder, code=3, says=says)


def test_an_export_through_the_norm_of_another_target_is_refused(house: House, store: Store) -> None:
    args = ["export", f"{store.uri}/data", "speculators", str(house.folder / "out"), "--target", str(house.model)]
    house.refused(*args, code=3, says="128 values; expected 8")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "eyas-dataset/9"}', b"\xff"])
def test_one_damaged_manifest_does_not_hide_the_other_datasets(house: House, store: Store, content: bytes) -> None:
    store.put_bytes("broken/manifest.json", content)
    store.put_bytes("no name/manifest.json", content)
    found, said = house.run("datasets", "list", store.uri, "--json")
    answer = json.loads(said)
    rows = {row["name"]: row for row in answer["datasets"]}
    assert found == 1 and answer["ok"] is False and rows.keys() == {"broken", "data", "no name"}
    assert rows["data"]["committed"] and "damaged" not in rows["data"]
    assert not rows["broken"]["committed"] and "broken/manifest.json" in rows["broken"]["damaged"]
    found, said = house.run("datasets", "list", store.uri)
    assert found == 1 and "DAMAGED" in said and "3 samples" in said


NO_PLACES = {
    "file://": "no dataset's URI", "file:///": "no dataset's URI", "s3://": "no dataset's URI",
    "s3:///": "no dataset's URI", "s3://bucket": "no dataset's URI", "http://x/y": "no dataset's URI",
    "file://host/x": "not a store", "file://[x/y": "not a URI", "s3://[x/y/z": "not a URI",
    "s3://a b/y/z": "the bucket's", "file:///%00/x": "a zero byte", "file:///a#b/x": "a #", "file:///a?b/x": "a ?",
    "s3://b/p#q/x": "a #", "file:///..": "not a name", "": "no dataset is named", "../x": "not a name",
    "file:///x/%2e%2e": "not a name",
}  # fmt: skip
COMMANDS = (["inspect"], ["datasets", "show"], ["datasets", "verify"], ["datasets", "rm", "--yes"])


@pytest.mark.parametrize("place", NO_PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_can_hold_no_dataset_is_refused_at_once(
    house: House, place: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without starting an object store for it, and without taking another folder for it."""
    monkeypatch.setattr("infra.services.embedded_store", lambda *_: pytest.fail("a store was started"))
    if command == ["inspect"] and "://" not in place:  # a path then
        return
    found, said = house.run(*command[:2], place, *command[2:])
    assert found in (2, 6, 7) and NO_PLACES[place] in said, said
    if "not a name" not in said:
        assert place.rpartition("/")[0].rstrip("/") in said


@pytest.mark.parametrize("name", ["a#b", "a?b", "a b", "a%20b", "ü"])
def test_a_folder_of_any_name_is_a_store_once_it_is_spelled_as_a_uri(house: House, name: str) -> None:
    folder = house.folder / name
    make_dataset(open_store(folder.as_uri()), house.folder / "made", [5, 6], shard_tokens=10)
    assert (folder / "data" / "manifest.json").exists()
    assert house.run("datasets", "verify", f"{folder.as_uri()}/data")[0] == 0


def test_a_dataset_with_a_damaged_manifest_can_still_be_removed(house: House, store: Store) -> None:
    store.put_bytes("data/manifest.json", b"{")
    place = f"{store.uri}/data"
    house.refused("datasets", "rm", place, "--yes", code=7, says="--force removes it all the same")
    assert house.run("datasets", "rm", place, "--yes", "--force")[0] == 0 and list(store.list()) == []


def test_what_is_whole_is_inspected_without_complaint(house: House, store: Store) -> None:
    """The refusals above refuse nothing else."""
    things = [[f"{store.uri}/data"], [f"{store.uri}/data/"], ["conversations.jsonl", "--recipe", house.recipe]]
    for thing in things:
        found, said = house.run("inspect", *thing)
        assert found == 0 and "intact" in said, said


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_no_text_of_a_file_breaks_or_commands_the_terminal(
    house: House, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "\x1b]0;title\x07 \x9b2J \u2603"}, {"role": "assistant", "content": "\x1b[2J!"}]
    path = house.folder / "odd.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ({"\ud800\x1b[5m": 1}, {"messages": talk})))
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", shown)
    assert house.run("inspect", str(path), "--recipe", house.recipe)[0] == 1
    shown.flush()
    said = shown.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"odd.jsonl:1" in said and rb"\ud800" in said and rb"\x1b[2J!" in said
    assert not set("\x1b\x07\x9b") & set(said.decode(encoding))
