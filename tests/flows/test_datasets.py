"""`eyas datasets`: lists, shows, verifies, and removes only what was confirmed and nothing rests on."""

import io
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from mlflow import MlflowClient

from flows import datasets
from flows.cli import main
from hidden_states.dataset import Dataset
from hidden_states.store import Store, open_store
from tests.hidden_states.stored import Made, make_dataset


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def made(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> Made:
    """A committed dataset `data` and an unfinished one, `half`; an MLflow of its own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    store.put_bytes("half/shards/x-0000000000000000.json", b"{}")
    return make_dataset(store, tmp_path, [5, 6, 9], shard_tokens=10)


def asked(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, object], str]:
    """Exit code, the JSON answer and what was said to the user."""
    code = main(["datasets", *args, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else {}, said.err


def test_datasets_are_listed_shown_and_verified(made: Made, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer, _ = asked(capsys, "list", store.uri)
    rows = {row["name"]: row for row in answer["datasets"]}  # type: ignore[attr-defined]
    assert code == 0 and set(rows) == {"data", "half"}
    assert rows["data"]["committed"] and rows["data"]["samples"] == 3 and not rows["half"]["committed"]
    code, answer, _ = asked(capsys, "show", f"{store.uri}/data")
    assert code == 0 and answer["manifest"] == made.dataset.digest and answer["kept"] == "aux captured, final captured"
    for flags in ([], ["--sample"]):
        code, answer, _ = asked(capsys, "verify", f"{store.uri}/data", *flags)
        assert code == 0 and answer["ok"] and answer["bytes_read"]
    key = made.dataset.key(made.dataset.manifest.shards[0])
    store.put_bytes(key, store.get_bytes(key)[:-1])
    code, answer, _ = asked(capsys, "verify", f"{store.uri}/data")
    assert code == 1 and key in str(answer["problems"])
    code, _, said = asked(capsys, "show", f"{store.uri}/half")
    assert code == 7 and "no manifest, 1 batches there" in said
    assert main(["datasets", "list", store.uri]) == main(["datasets", "show", f"{store.uri}/data"]) == 0
    shown = capsys.readouterr().out
    assert "not committed, 1 objects" in shown and made.dataset.digest in shown


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_removed_unasked_or_under_a_registered_drafter(
    made: Made, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [info.key for info in store.list()]
    code, _, said = asked(capsys, "rm", f"{store.uri}/data")
    assert code == 7 and "nobody can be asked here" in said
    for typed in ("something else\n", "\n", ""):  # the last is Ctrl-D
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        assert main(["datasets", "rm", f"{store.uri}/data", "--json"]) == 7
        found = capsys.readouterr()
        assert "not confirmed" in found.err and json.loads(found.out)["ok"] is False
    client = MlflowClient(tracking_uri=None)
    client.create_registered_model("eagle3-x")
    for number, digest in enumerate(["0" * 64, made.dataset.digest]):
        client.create_model_version("eagle3-x", f"file:///nowhere/{number}", tags={"manifest.sha256": digest})
    code, _, said = asked(capsys, "rm", f"{store.uri}/data", "--yes")
    assert code == 7 and "eagle3-x/2 in MLflow was trained on it" in said and "--force" in said
    assert [info.key for info in store.list()] == before
    monkeypatch.setattr("sys.stdin", Terminal("half\n"))
    assert main(["datasets", "rm", f"{store.uri}/half"]) == 0  # never committed: nothing can rest on it
    capsys.readouterr()
    code, answer, _ = asked(capsys, "rm", f"{store.uri}/data", "--yes", "--force")
    assert code == 0 and answer["removed_objects"] == len(before) - 1 and list(store.list()) == []


@pytest.mark.parametrize("what", ["", "data/shards", "mine", "data"])
def test_what_is_not_a_dataset_is_not_removed(
    made: Made, store: Store, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """A store of datasets, a part of one, a folder of somebody's, a dataset in which somebody has put a file."""
    store.put_bytes("data/thesis.txt" if what == "data" else "mine/thesis.txt", b"years of work")
    before = [info.key for info in store.list()]
    for options in (["--yes"], ["--yes", "--force"]):
        code, _, said = asked(capsys, "rm", f"{store.uri}/{what}".rstrip("/"), *options)
        assert code == 7 and "not a dataset" in said and "eyas datasets list" in said
    assert [info.key for info in store.list()] == before


def test_a_dataset_is_kept_when_nobody_can_say_what_rests_on_it(
    made: Made, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    code, _, said = asked(capsys, "rm", f"{store.uri}/data", "--yes")
    assert code == 7 and "does not say which drafters" in said and "--force" in said
    assert made.dataset.verify().problems == []
    assert datasets.list_all(store.uri, None)["datasets"]


def test_a_dataset_goes_out_and_comes_back_by_command(
    made: Made, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything the files leave unsaid is told here; that it is found is tested with the formats."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"vocab_size": 1000, "rms_norm_eps": 1e-5}))
    safetensors.torch.save_file({"model.norm.weight": torch.full((8,), 2.0)}, target / "model.safetensors")
    told = ["--target", str(target), "--after-block", "1", "3", "6", "--no-reference"]
    assert main(["export", f"{store.uri}/data", "speculators", str(tmp_path / "out"), "--target", str(target)]) == 0
    assert "the norm cancels" in capsys.readouterr().out
    assert main(["import", "speculators", str(tmp_path / "out"), f"{store.uri}/back", *told, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["samples"] == 3 and "outputs of blocks 1, 3, 6; final state pre-norm" in answer["convention"]
    for sample_id, sample in made.samples.items():
        assert torch.equal(made.dataset.read(sample_id).aux, Dataset.open(store, "back").read(sample_id).aux)
        assert Dataset.open(store, "back").read_tokens(sample_id) == (sample.input_ids, sample.loss_mask)
    assert main(["import", "specforge", str(tmp_path / "out"), f"{store.uri}/no", *told]) == 3
    assert "no file of this format" in capsys.readouterr().err
