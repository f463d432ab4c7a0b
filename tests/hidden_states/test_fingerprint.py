"""The fingerprint changes with everything that makes states incomparable, and names it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hidden_states import fingerprint
from hidden_states.errors import DataError
from hidden_states.fingerprint import Fingerprint, capture_fingerprint, target_fields
from tests.hidden_states.stored import Capture


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos": "x", "chat_template": "{{ messages }}"}))
    (folder / "model-1.safetensors").write_bytes(bytes(300_000))
    (folder / "model-2.safetensors").write_bytes(bytes(200_000))
    return folder


def flip_weight(folder: Path) -> None:
    data = bytearray((folder / "model-2.safetensors").read_bytes())
    data[123_456] ^= 1
    (folder / "model-2.safetensors").write_bytes(bytes(data))


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": flip_weight,
    "config": lambda folder: (folder / "config.json").write_text('{"hidden_size": 9}'),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"model": {"a": 1}}'),
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{{ other }}"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_the_target_changes_its_field_and_no_other(target: Path, field: str) -> None:
    before = Fingerprint(target_fields(target))
    CHANGES[field](target)
    after = Fingerprint(target_fields(target))
    assert [line.partition(":")[0] for line in before.differences(after)] == [field]
    assert before.digest != after.digest and len(before.short) == 16


def test_a_template_in_the_tokenizers_config_is_the_template_and_not_the_tokenizer(target: Path) -> None:
    before = target_fields(target)
    (target / "tokenizer_config.json").write_text(json.dumps({"eos": "x", "chat_template": "other"}))
    after = target_fields(target)
    assert before["tokenizer"] == after["tokenizer"] and before["template"] != after["template"]
    assert target_fields(target, template="{{ messages }}")["template"] == before["template"]


def test_a_copy_has_the_same_fingerprint(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "copy")
    assert target_fields(target) == target_fields(tmp_path / "copy")


def test_a_huge_target_is_told_apart_by_a_sample_of_its_bytes(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "FULL_HASH_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 64)
    before = str(target_fields(target)["weights"])
    assert before.startswith("sampled:")
    data = bytearray((target / "model-2.safetensors").read_bytes())
    for position in range(0, len(data), 512):  # as a fine-tune does: something everywhere
        data[position : position + 8] = b"changed!"
    (target / "model-2.safetensors").write_bytes(bytes(data))
    assert target_fields(target)["weights"] != before


def test_what_the_writer_says_is_part_of_it(target: Path, tmp_path: Path) -> None:
    writer = Capture(tmp_path / "dumps").writer
    ours = capture_fingerprint(target, mask_rule="replies", writer=writer)
    for name, value in {
        "after_block": (1, 3, 5),
        "final_norm": "pre",
        "sglang_version": "0.6",
        "dtype": "float32",
    }.items():
        theirs = capture_fingerprint(target, mask_rule="replies", writer=replace(writer, **{name: value}))
        assert [line.partition(":")[0] for line in ours.differences(theirs)] == [name]
    other = capture_fingerprint(target, mask_rule="last reply", writer=writer)
    assert ours.differences(other) == ["mask_rule: replies / last reply"]
    with pytest.raises(DataError, match="no final_norm"):
        capture_fingerprint(target, mask_rule="replies", writer=replace(writer, final_norm=None))


def test_a_folder_that_is_no_target_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        target_fields(tmp_path)
    for path in target.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(DataError, match="weights"):
        target_fields(target)
