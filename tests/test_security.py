"""What docs/security.md promises and a program can check."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hidden_states.dataset import Dataset
from hidden_states.dataset_writer import MANIFEST
from hidden_states.errors import DatasetError
from hidden_states.store import open_store
from infra.recipe_file import load_recipe
from tests.test_house import ROOT, python_files, room_of

UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
OURS = ["flows", "tasks", "hidden_states", "drafter", "infra", "server_patch/eyas_capture"]


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Where, what is called, and the call, in every room."""
    for room in OURS:
        for path in python_files(room):
            assert room_of(path) == room
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def test_nothing_that_comes_from_outside_can_run_code_by_being_read() -> None:
    wrong = []
    for where, name, call in calls():
        bad = (
            name in {"pickle.load", "pickle.loads", "yaml.unsafe_load", "eval", "exec", "os.system", "marshal.loads"}
            or (name == "torch.load" and keyword(call, "weights_only") != "True")
            or (name == "yaml.load" and keyword(call, "Loader") != "_Loader")
            or (name.endswith("np.load") and keyword(call, "allow_pickle") not in (None, "False"))
            or keyword(call, "shell") == "True"
        )
        if bad:
            wrong.append(f"{where}: {name}")
    for room in OURS:  # and none of these modules is there to be called under another name
        for path in python_files(room):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and [a.name for a in node.names] != ["UnpicklingError"]:
                    modules = [node.module or ""]
                found = UNPICKLERS & {module.partition(".")[0] for module in modules}
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in found]  # type: ignore[attr-defined]
    assert not wrong
    loader = (ROOT / "infra" / "recipe_file.py").read_text()
    assert "class _Loader(yaml.SafeLoader)" in loader


def test_a_models_own_code_runs_only_where_the_recipe_says_so() -> None:
    given = {(where, value) for where, _, call in calls() if (value := keyword(call, "trust_remote_code")) is not None}
    assert given
    assert all(re.fullmatch(r"(\w+\.)*trust_remote_code", value) for _, value in given), given
    assert load_recipe("demo-smollm2").target.trust_remote_code is False
    assert load_recipe("kimi-k2.5").target.trust_remote_code is True


def test_a_recipe_has_no_key_for_a_secret() -> None:
    keys = load_recipe("demo-smollm2").flat()
    assert not [key for key in keys if re.search(r"password|secret|access_key|api_key|credential", key)]


@pytest.mark.parametrize("key", ["../../outside", "/etc/passwd", "shards/../../other/x", "a//b", "a\\..\\b", ""])
@pytest.mark.parametrize("part", ["shard", "table", "vocab_map"])
def test_a_manifest_that_names_something_outside_of_its_dataset_is_refused(tmp_path: Path, key: str, part: str) -> None:
    store = open_store(f"file://{tmp_path}/store")
    (tmp_path / "outside").write_text("not yours")
    blob = {"key": "samples.parquet", "size": 9, "sha256": "0" * 64}
    shard = {"batch": "b", "key": "shards/b.safetensors", "size": 9, "sha256": "0" * 64, "crc32": 0, "data_start": 8,
             "tokens": 1, "samples": 1}  # fmt: skip
    parts = {"shard": shard, "table": blob, "vocab_map": dict(blob)}
    parts[part]["key"] = key
    manifest = {
        "format": "eyas-dataset/1", "fingerprint": {"weights": "x"}, "after_block": [1], "shards": [shard],
        "table": blob, "vocab_map": parts["vocab_map"],
    }  # fmt: skip
    store.put_bytes(f"planted/{MANIFEST}", json.dumps(manifest).encode())
    with pytest.raises(DatasetError, match="not a key relative to the store"):
        Dataset.open(store, "planted")


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/passwd"])
def test_a_store_reads_and_writes_nothing_outside_of_its_folder(tmp_path: Path, key: str) -> None:
    store = open_store(f"file://{tmp_path}/store")
    (tmp_path / "outside").write_text("not yours")
    for act in (store.get_bytes, store.head, store.delete):
        with pytest.raises(ValueError, match="not a key"):
            act(key)
    with pytest.raises(ValueError, match="not a key"):
        store.put_bytes(key, b"planted")
    assert (tmp_path / "outside").read_text() == "not yours"
