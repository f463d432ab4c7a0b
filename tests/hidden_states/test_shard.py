"""A shard holds exactly what was captured, proves it, and explains itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas_capture import contract
from hidden_states import captured_rows
from hidden_states import shard as shard_module
from hidden_states.errors import DatasetError, DumpError
from hidden_states.plan import Batch, plan_batches
from hidden_states.shard import pack_shard
from hidden_states.shard_file import MappedShard, open_shard, rows_from_bytes
from hidden_states.shard_layout import ShardInfo
from hidden_states.store import digest_file
from tests.hidden_states.stored import AFTER_BLOCK, Capture, Made, edits, make_samples


def one_batch(lengths: list[int]) -> Batch:
    (batch,) = plan_batches(make_samples(lengths), 10**9)
    return batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_safetensors_library_reads_what_was_captured(tmp_path: Path, dtype: torch.dtype) -> None:
    batch = one_batch([5, 1, 17])
    dumps = Capture(tmp_path / "dumps", dtype=dtype).dumps(batch.samples)
    info = pack_shard(batch, dumps, tmp_path / "shard")
    tensors = safetensors.torch.load_file(tmp_path / "shard")
    assert set(tensors) == {"input_ids", "loss_mask", "aux", "final", "offsets"}
    order = [sample.id for sample in batch.samples]
    assert [entry.id for entry in info.samples] == order
    assert tensors["aux"].shape == (23, 3, 8) and tensors["final"].shape == (23, 8) and tensors["aux"].dtype == dtype
    assert tensors["loss_mask"].dtype == torch.uint8
    for index, sample in enumerate(batch.samples):
        rows = slice(int(tensors["offsets"][index]), int(tensors["offsets"][index + 1]))
        assert tensors["input_ids"][rows].tolist() == sample.input_ids
        assert tensors["loss_mask"][rows].tolist() == sample.loss_mask
        assert torch.equal(tensors["final"][rows], dumps[sample.id].tensor(contract.FINAL))
        for column, block in enumerate(AFTER_BLOCK):
            assert torch.equal(tensors["aux"][rows, column], dumps[sample.id].tensor(contract.block_tensor(block)))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    hidden_size=st.integers(1, 9),
    copy_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_any_sample_of_any_shard_is_found_by_its_spans(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], hidden_size: int, copy_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("spans")
    batch = one_batch(lengths)
    capture = Capture(folder / "dumps", hidden_size)
    dumps = capture.dumps(batch.samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_rows, "COPY_BYTES", copy_bytes)
        info = pack_shard(batch, dumps, folder / "shard")
    data = (folder / "shard").read_bytes()
    assert len(data) == info.layout.file_bytes == info.bytes
    assert info.digest == digest_file(folder / "shard")
    mapped, again = open_shard(folder / "shard", info.digest)
    assert again == info
    made = Made(None, {sample.id: sample for sample in batch.samples}, dumps, [batch])  # type: ignore[arg-type]
    for entry in info.samples:
        spans = info.layout.sample_spans(entry.row, entry.tokens)
        raw = {name: data[start : start + length] for name, (start, length) in spans.items()}
        for rows in (rows_from_bytes(info.layout, raw), mapped.rows(*entry.span)):
            made.assert_equal(entry.id, rows.decoded())
            assert rows.problem(entry) is None


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("tensor", ["input_ids", "aux", "final", "loss_mask"])
def test_one_flipped_bit_of_a_sample_is_noticed(tmp_path: Path, tensor: str) -> None:
    batch = one_batch([5, 9])
    info = pack_shard(batch, Capture(tmp_path / "dumps").dumps(batch.samples), tmp_path / "shard")
    first, second = info.samples
    start, length = info.layout.sample_spans(second.row, second.tokens)[tensor]
    flip(tmp_path / "shard", start + length - 1)
    mapped = MappedShard(tmp_path / "shard", info.layout)
    assert mapped.rows(first.row, first.tokens).problem(first) is None
    assert mapped.rows(second.row, second.tokens).problem(second) is not None


def test_a_dump_that_rotted_on_the_local_disk_is_not_packed(tmp_path: Path) -> None:
    batch = one_batch([5, 9])
    dumps = Capture(tmp_path / "dumps").dumps(batch.samples)
    states = dumps[batch.samples[1].id].ref.path / contract.STATES_FILE
    flip(states, states.stat().st_size - 3)
    with pytest.raises(DumpError, match=f"sample {batch.samples[1].id}.*final differs from its checksum"):
        pack_shard(batch, dumps, tmp_path / "shard")


def test_a_dump_of_other_tokens_or_lengths_is_not_packed(tmp_path: Path) -> None:
    batch = one_batch([5, 9])
    capture = Capture(tmp_path / "dumps")
    dumps = capture.dumps(batch.samples)
    first, second = batch.samples
    with pytest.raises(DumpError, match="other tokens"):
        pack_shard(batch, {first.id: dumps[first.id], second.id: dumps[first.id]}, tmp_path / "shard")


def test_a_sample_is_packed_or_left_out_with_a_reason(tmp_path: Path) -> None:
    batch = one_batch([5, 9, 3])
    kept, lost, also = batch.samples
    dumps = Capture(tmp_path / "dumps").dumps([kept, also])
    with pytest.raises(DumpError, match=f"1 samples without a dump, {lost.id}"):
        pack_shard(batch, dumps, tmp_path / "shard")
    info = pack_shard(batch, dumps, tmp_path / "shard", left_out={lost.id: "NaN in final, three times"})
    assert [entry.id for entry in info.samples] == [kept.id, also.id]
    assert info.left_out == {lost.id: "NaN in final, three times"}
    assert open_shard(tmp_path / "shard", info.digest)[1] == info
    with pytest.raises(DumpError, match="no usable sample"):
        pack_shard(batch, dumps, tmp_path / "shard", left_out={sample.id: "x" for sample in batch.samples})


def test_dumps_of_two_capture_settings_are_not_mixed(tmp_path: Path) -> None:
    batch = one_batch([5, 9])
    dumps = Capture(tmp_path / "dumps").dumps(batch.samples)
    dumps[batch.samples[1].id].writer = replace(dumps[batch.samples[1].id].writer, final_norm="pre")
    with pytest.raises(DumpError, match="capture different states"):
        pack_shard(batch, dumps, tmp_path / "shard")


@pytest.mark.parametrize("change", ["truncate", "text", "foreign", "empty"])
def test_what_is_no_shard_is_refused_by_name(tmp_path: Path, change: str) -> None:
    batch = one_batch([5])
    info: ShardInfo = pack_shard(batch, Capture(tmp_path / "dumps").dumps(batch.samples), tmp_path / "shard")
    data = (tmp_path / "shard").read_bytes()
    foreign = safetensors.torch.save({"final": torch.zeros(2, 2)})
    changed = {"truncate": data[:-1], "text": b"hello, I am a text", "foreign": foreign, "empty": b""}[change]
    (tmp_path / "shard").write_bytes(changed)
    with pytest.raises(DatasetError, match="shard"):
        open_shard(tmp_path / "shard", info.digest)


@pytest.mark.parametrize("part", ["facts", "tensors"])
def test_an_edited_header_is_refused_by_name(tmp_path: Path, part: str) -> None:
    """Whatever stands in it, and wherever: what is not proved by the samples' own checksums is refused at once."""
    batch = one_batch([5, 3])
    pack_shard(batch, Capture(tmp_path / "dumps").dumps(batch.samples), tmp_path / "shard")
    data = (tmp_path / "shard").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["eyas"])
    free = ("batch", "final_norm", "left_out", "id", "source", "loss_tokens", "digest", "checksums")
    for place, edited in edits(facts if part == "facts" else {k: v for k, v in header.items() if k != "__metadata__"}):
        said = {"eyas": json.dumps(edited if part == "facts" else facts)}
        text = json.dumps({**(header if part == "facts" else edited), "__metadata__": said})
        text += " " * (-len(text) % 8)
        (tmp_path / "edited").write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length :])
        try:
            shard, info = open_shard(tmp_path / "edited", digest_file(tmp_path / "edited"))
        except DatasetError as error:
            assert "edited" in str(error)
        else:
            assert any(name in place for name in free), (place, edited)
            assert all(isinstance(shard.rows(*e.span).problem(e), str | None) for e in info.samples)


def test_one_flipped_bit_of_a_header_is_no_traceback(tmp_path: Path) -> None:
    batch = one_batch([5, 3])
    pack_shard(batch, Capture(tmp_path / "dumps").dumps(batch.samples), tmp_path / "shard")
    data = (tmp_path / "shard").read_bytes()
    for position in range(8 + int.from_bytes(data[:8], "little")):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        (tmp_path / "flipped").write_bytes(flipped)
        try:
            shard, info = open_shard(tmp_path / "flipped", digest_file(tmp_path / "flipped"))
        except DatasetError:
            continue
        assert all(isinstance(shard.rows(*e.span).problem(e), str | None) for e in info.samples)


def test_packing_needs_no_second_copy_in_memory(tmp_path: Path) -> None:
    """256 MB of states are packed with 60 MB more of anonymous memory at most."""
    batch = one_batch([4096] * 8)
    dumps = Capture(tmp_path / "dumps", hidden_size=1024).dumps(batch.samples)
    peak = [0]

    class Watched(shard_module._HashedFile):  # the place every written byte passes
        def write(self, data: bytes | memoryview) -> None:
            super().write(data)
            peak[0] = max(peak[0], anonymous_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "_HashedFile", Watched)
        start = anonymous_bytes()
        info = pack_shard(batch, dumps, tmp_path / "shard")
    assert info.bytes > 256 << 20
    assert peak[0] - start < 60 << 20


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")


def test_the_header_is_readable_json_with_what_the_capture_said(tmp_path: Path) -> None:
    batch = one_batch([5, 2])
    dumps = Capture(tmp_path / "dumps").dumps(batch.samples)
    info = pack_shard(batch, dumps, tmp_path / "shard")
    data = (tmp_path / "shard").read_bytes()
    facts = json.loads(json.loads(data[8 : info.layout.data_start])["__metadata__"]["eyas"])
    assert facts["batch"] == batch.id and facts["after_block"] == list(AFTER_BLOCK) and facts["final_norm"] == "post"
    said = dumps[batch.samples[0].id].record.checksums
    assert facts["samples"][0]["checksums"] == {name: said[name] for name in said if name != contract.INPUT_IDS}
