"""The semantic gate: every planted fault is caught, a right dump passes, and the answer names what the data is."""

from pathlib import Path

import pytest
import torch

from benchmarks.planted import FAULTS, Scene, clean, plant
from eyas_capture import contract
from hidden_states.dump import Dump, DumpFolder
from hidden_states.errors import GateError
from hidden_states.gate import NormCheck, Reference, compare
from hidden_states.statistics import History
from tests.dump_factory import DumpFactory
from tests.tiny_models import make_tiny

# The check that must catch each fault first.
CAUGHT_BY = {
    "layers_off_by_one": "reference",
    "aux_order_swapped": "norm",
    "final_without_norm": "norm",
    "final_norm_twice": "teacher",
    "tokens_shifted_by_one": "teacher",
    "another_models_weights": "norm",
    "dtype_cast": "validate: precision",
    "one_nan": "validate: finite",
    "one_flipped_byte": "validate: checksum",
    "rows_of_another_request": "reference",
    "prefix_from_cache": "match: short",
    "padded_rows": "validate: padding",
    "rows_repeated_as_padding": "validate: padding",
    "truncated_file": "validate: file-intact",
    "stale_dump_of_an_earlier_server": "match: stale",
    "loss_mask_shifted_by_one": "mask rule",
    "mask_of_another_template": "mask rule",
    "mask_changed_after_planning": "validate: sample",
}


@pytest.fixture(scope="module", params=[("llama", "bfloat16"), ("deepseek_v3", "float32")], ids=lambda p: "-".join(p))
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), *request.param)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_its_check(fault: str, scene: Scene) -> None:
    assert plant(scene, fault)[:1] == [CAUGHT_BY[fault]]


def test_a_right_dump_passes_every_check(scene: Scene) -> None:
    assert clean(scene) == []


# --- what the answer says --------------------------------------------------------------------------------------------

IDS = [5, 90, 17, 300, 301, 17, 42, 8, 77, 1000, 3, 250]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> DumpFactory:
    return DumpFactory(tmp_path_factory.mktemp("template"), tiny_llama)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference.load(tiny_llama)


@pytest.fixture
def factory(template: DumpFactory, tmp_path: Path) -> DumpFactory:
    return template.elsewhere(tmp_path / "dumps")


def last(factory: DumpFactory) -> Dump:
    folder = DumpFolder(factory.folder)
    return folder.open(folder.dumps()[-1])


@pytest.mark.parametrize("looks_like", [0, 2, 3, 4])
@pytest.mark.parametrize("late", [0, 1])
def test_a_wrong_block_is_named_with_its_shift(
    looks_like: int, late: int, factory: DumpFactory, reference: Reference, template: DumpFactory, tmp_path: Path
) -> None:
    other = template.elsewhere(tmp_path / "other")
    other.after_block, other.computed = (looks_like,), {}
    wrong = other.states(IDS)[contract.block_tensor(looks_like)].roll(late, 0)
    factory.write("eyas-1", IDS, factory.states(IDS) | {contract.block_tensor(1): wrong})
    finding = reference.identify(last(factory))[0]
    assert not finding.ok
    assert finding.looks_like == f"the output of block {looks_like}" + (", one token late" if late else "")
    with pytest.raises(GateError, match=f"after_block_1 looks like the output of block {looks_like}"):
        reference.check(last(factory))


def test_a_final_state_that_was_never_normed_is_named(
    factory: DumpFactory, reference: Reference, template: DumpFactory, tmp_path: Path
) -> None:
    other = template.elsewhere(tmp_path / "other")
    other.after_block, other.computed = (5,), {}
    factory.write("eyas-1", IDS, factory.states(IDS) | {contract.FINAL: other.states(IDS)[contract.block_tensor(5)]})
    with pytest.raises(GateError, match="final looks like the final state without its norm"):
        reference.check(last(factory))
    norm = NormCheck.load(factory.target)
    assert norm is not None
    with pytest.raises(GateError, match="12 of 12 rows of the final state are not normed"):
        norm.check(last(factory))


def test_one_wrong_row_is_named(factory: DumpFactory, reference: Reference) -> None:
    states = factory.states(IDS)
    states[contract.block_tensor(2)][7] *= -1
    factory.write("eyas-1", IDS, states)
    with pytest.raises(GateError, match=r"after_block_2 is near the output of block 2, but not it .* row 7"):
        reference.check(last(factory))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_states_of_every_kind_of_model_pass(kind: str, dtype: str, tmp_path: Path) -> None:
    factory = DumpFactory(tmp_path / "dumps", make_tiny(kind, tmp_path / "target"), dtype=dtype)
    factory.write("eyas-1", IDS * 4)
    findings = Reference.load(factory.target).check(last(factory))
    assert [finding.tensor for finding in findings] == ["after_block_1", "after_block_2", "after_block_4", "final"]
    norm = NormCheck.load(factory.target)
    assert norm is not None
    norm.check(last(factory))


def test_a_norm_that_multiplies_by_one_plus_its_weight_is_understood() -> None:
    """Gemma's, Qwen3-Next's."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(64, generator=generator) - 0.5
    weight += 0.05 * weight.sign()  # what a weight near nothing has multiplied is left out of the mean
    rows = torch.randn(9, 64, generator=generator)
    normed = rows / rows.square().mean(-1, keepdim=True).sqrt()
    for final in (normed * (1 + weight), normed * weight):
        assert (NormCheck(weight).root_mean_square(final) - 1).abs().max() < 1e-3
        assert (NormCheck(weight).root_mean_square(final * 3) - 1).abs().max() > 0.05


def test_memory_for_a_reference_is_known_before_it_is_loaded(reference: Reference, tiny_llama: Path) -> None:
    parameters = sum(parameter.numel() for parameter in reference.model.parameters())
    assert Reference.bytes_needed(tiny_llama) == 4 * parameters


def test_two_captures_of_the_same_tokens_are_compared(factory: DumpFactory) -> None:
    states = factory.states(IDS)
    factory.write("eyas-1", IDS, states)
    one = last(factory)
    factory.write("eyas-2", IDS, {n: t if n == contract.INPUT_IDS else t * (1 + 1e-6) for n, t in states.items()})
    assert max(compare(one, last(factory)).values()) < 1e-4
    states[contract.block_tensor(4)][3] += 1
    factory.write("eyas-3", IDS, states)
    with pytest.raises(GateError, match=r"after_block_4 differs by .* in row 3"):
        compare(one, last(factory))
    factory.write("eyas-4", IDS[::-1])
    with pytest.raises(GateError, match="different tokens"):
        compare(one, last(factory))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t * 3, "median row norm of"),
        (lambda t: torch.where(torch.arange(128) == 5, t + 300, t), "of after_block_1"),
        (lambda t: torch.where(torch.arange(128) < 20, 0, t), "share of zeros of"),
    ],
    ids=["norm", "largest", "zeros"],
)
def test_figures_out_of_line_with_the_run_so_far_stop_it(change: object, found: str, factory: DumpFactory) -> None:
    history = History()
    for n in range(8):
        factory.write(f"eyas-{n}", [token + n for token in IDS])
        history.check(last(factory))
    states = factory.states(IDS)
    states[contract.block_tensor(1)] = change(states[contract.block_tensor(1)])  # type: ignore[operator]
    factory.write("eyas-wrong", IDS, states)
    for _ in range(2):  # a dump that fails does not become usual
        with pytest.raises(GateError, match=found):
            history.check(last(factory))
    factory.write("eyas-right", IDS)
    history.check(last(factory))
