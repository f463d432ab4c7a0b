"""Validation: each way a dump can be wrong has a check of its own name, and a right dump passes all of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas_capture import contract
from hidden_states.dump import Dump, DumpFolder
from hidden_states.errors import RecipeError
from hidden_states.record import BadDump
from hidden_states.samples import Sample
from hidden_states.validate import Expectation, check_dump, check_writer
from tests.dump_factory import DumpFactory

IDS = [5, 90, 17, 300, 301, 17, 42, 8, 77, 1000, 3, 250]
SIZE = len(IDS)
SAMPLE = Sample.of(IDS, [0] * 4 + [1] * (SIZE - 4), "x:1")
AFTER_BLOCK = (1, 2, 4)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> DumpFactory:
    return DumpFactory(tmp_path_factory.mktemp("template"), tiny_llama, AFTER_BLOCK, request.param)


@pytest.fixture
def factory(template: DumpFactory, tmp_path: Path) -> DumpFactory:
    return template.elsewhere(tmp_path / "dumps")


def only(factory: DumpFactory) -> Dump:
    folder = DumpFolder(factory.folder)
    (ref,) = folder.dumps()
    return folder.open(ref)


def expectation(factory: DumpFactory, **changes: Any) -> Expectation:
    return replace(Expectation.of_target(factory.target, AFTER_BLOCK, factory.dtype), **changes)


def caught(factory: DumpFactory, sample: Sample = SAMPLE) -> str | None:
    try:
        check_dump(only(factory), sample, expectation(factory))
    except BadDump as error:
        assert str(error).count(f"[{error.check}]") == 1
        return error.check
    return None


def test_a_right_dump_passes(factory: DumpFactory) -> None:
    factory.write("eyas-1", IDS)
    assert caught(factory) is None


def test_a_chunked_prefill_passes(factory: DumpFactory) -> None:
    factory.write("eyas-1", IDS, spans=[[0, 5], [5, 9], [9, SIZE]])
    assert caught(factory) is None


# --- what the writer and the record say ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ("writer-state", {"state": contract.REFUSED, "refused": ["prefill graphs are on"]}),
        ("target", {"config_sha256": "0" * 64}),
        ("target", {"hidden_size": 64}),
        ("target", {"blocks": 7}),
        ("layers", {"after_block": [1, 2, 3]}),
        ("layers", {"after_block": [1, 4, 2]}),
        ("layers", {"capture_points": [1, 2, 4]}),
        ("final-norm", {"final_norm": "pre"}),
        ("dtype", {"dtype": "float16"}),
    ],
)
def test_what_a_writer_says_of_itself_is_compared(check: str, says: dict[str, Any], factory: DumpFactory) -> None:
    factory.write("eyas-1", IDS)
    factory.write_writer(**says)
    assert caught(factory) == check
    with pytest.raises(BadDump):
        check_writer(only(factory).writer, expectation(factory))


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ("prefix-cache", {"prefix_cached": 4, "spans": [[4, SIZE]], "complete": False}),
        ("complete", {"complete": False, "incomplete_reason": contract.ABORTED}),
        ("token-count", {"tokens": SIZE + 1}),
        ("spans", {"spans": [[0, 5], [6, SIZE]]}),
        ("spans", {"spans": [[0, 5], [4, SIZE]]}),
        ("spans", {"spans": [[0, SIZE - 1]]}),
        ("spans", {"spans": []}),
        ("spans", {"spans": [[0, SIZE], [SIZE, SIZE]]}),
        ("token-digest", {"tokens_sha256": contract.tokens_sha256(IDS[::-1])}),
        ("tensor-set", {"checksums": {}}),
        ("checksum", {"checksums": None}),
    ],
)
def test_what_a_record_says_is_compared(check: str, says: dict[str, Any], factory: DumpFactory) -> None:
    if check == "checksum":
        names = [contract.INPUT_IDS, *map(contract.block_tensor, AFTER_BLOCK), contract.FINAL]
        says = {"checksums": dict.fromkeys(names, contract.tensor_checksum(b""))}
    factory.write("eyas-1", IDS, **says)
    assert caught(factory) == check


def test_a_sample_that_changed_after_planning_is_noticed(factory: DumpFactory) -> None:
    factory.write("eyas-1", IDS)
    changed = Sample(SAMPLE.id, IDS, [1] * SIZE, SAMPLE.source, SAMPLE.digest)
    assert caught(factory, changed) == "sample"


# --- what the file holds ---------------------------------------------------------------------------------------------

HIGH, FINAL = contract.block_tensor(4), contract.FINAL


def _change(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda states: states.update({name: change(states[name])})


def _filled(tensor: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    changed = tensor.clone()
    changed[where] = value
    return changed


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16 if tensor.dtype == torch.float32 else torch.float8_e4m3fn).to(tensor.dtype)


def _reordered(states: dict[str, torch.Tensor]) -> None:
    states[contract.block_tensor(1)] = states.pop(contract.block_tensor(1))


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("tensor-set", lambda states: states.pop(HIGH)),
        ("tensor-set", lambda states: states.update(after_block_5=states[HIGH])),
        ("tensor-set", _reordered),
        ("shape", _change(HIGH, lambda t: t[:-1])),
        ("shape", _change(FINAL, lambda t: t[:, :-1])),
        ("shape", _change(FINAL, lambda t: t.unsqueeze(0))),
        ("tensor-dtype", _change(HIGH, lambda t: t.to(torch.float16))),
        ("tensor-dtype", _change(contract.INPUT_IDS, lambda t: t.to(torch.float32))),
        ("token-ids", _change(contract.INPUT_IDS, lambda t: t.roll(1))),
        ("finite", _change(HIGH, lambda t: _filled(t, (3, 7), torch.nan))),
        ("finite", _change(FINAL, lambda t: _filled(t, (0, 0), torch.inf))),
        ("padding", _change(FINAL, lambda t: _filled(t, -1, 0.0))),
        ("padding", _change(HIGH, lambda t: _filled(t, 5, t[4].clone()))),
        ("precision", _change(HIGH, _narrow)),
        ("distinct", lambda states: states.update({HIGH: states[contract.block_tensor(2)].clone()})),
    ],
)
def test_what_a_file_holds_is_checked_to_the_value(
    check: str, change: Callable[[dict[str, torch.Tensor]], Any], factory: DumpFactory
) -> None:
    states = factory.states(IDS)
    change(states)
    factory.write("eyas-1", IDS, states)
    assert caught(factory) == check


def test_equal_rows_of_equal_tokens_are_no_padding(factory: DumpFactory) -> None:
    """A run of one token may well have one state."""
    ids = [7] * SIZE
    sample = Sample.of(ids, SAMPLE.loss_mask, "x:2")
    states = factory.states(ids)
    for name in list(states)[1:]:
        states[name][3] = states[name][2]
    factory.write("eyas-1", ids, states)
    assert caught(factory, sample) is None


def _fresh(factory: DumpFactory, folders: pytest.TempPathFactory) -> Path:
    """A right dump in a folder of its own: one an example."""
    factory.folder = folders.mktemp("example")
    factory.write_writer()
    return factory.write("eyas-1", IDS)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_caught(
    share: float, bit: int, factory: DumpFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _fresh(factory, tmp_path_factory) / contract.STATES_FILE
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    where = int(share * len(data))
    if where < header and data[where : where + 1] == b" ":
        return  # white space of the header
    data[where] ^= 1 << bit
    path.write_bytes(data)
    assert caught(factory) is not None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_not_intact(
    share: float, factory: DumpFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _fresh(factory, tmp_path_factory) / contract.STATES_FILE
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert caught(factory) == "file-intact"


@pytest.mark.parametrize("header", [b"", b"[]", b"{}", b"null", b'{"a": 1}', b'{"a": {"data_offsets": [0, 4]}}',
                                    b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
                                    b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
                                    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
                                    b"[" * 100_000])  # fmt: skip
def test_a_header_that_is_none_is_not_intact(header: bytes, factory: DumpFactory) -> None:
    path = factory.write("eyas-1", IDS) / contract.STATES_FILE
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    assert caught(factory) == "file-intact"


def test_a_missing_file_is_not_intact(factory: DumpFactory) -> None:
    (factory.write("eyas-1", IDS) / contract.STATES_FILE).unlink()
    assert caught(factory) == "file-intact"


# --- what is expected ------------------------------------------------------------------------------------------------


def test_an_expectation_is_read_from_the_target(tiny_llama: Path, tmp_path: Path) -> None:
    made = Expectation.of_target(tiny_llama, (0, 5))
    assert (made.hidden_size, made.dtype, made.blocks, made.final_norm) == (128, "float32", 6, "post")
    nested = {"text_config": json.loads((tiny_llama / "config.json").read_text()), "dtype": "bfloat16"}
    nested["text_config"].pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(nested))  # as Kimi-K2.5's
    assert Expectation.of_target(tmp_path, (0,)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("after_block", "dtype"), [((), "auto"), ((6,), "auto"), ((-1,), "auto"), ((1,), "float64"), ((1,), "int8")]
)
def test_an_impossible_expectation_is_the_recipes_fault(
    after_block: tuple[int, ...], dtype: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError):
        Expectation.of_target(tiny_llama, after_block, dtype)
    with pytest.raises(RecipeError):
        Expectation.of_target(tmp_path, (1,))
