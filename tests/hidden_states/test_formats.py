"""Other trainers' files: read, written and read again without a changed value; and nothing guessed in silence."""

import gzip
import pickle
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import safetensors.torch
import torch
from torch import Tensor

from hidden_states.dataset import Dataset
from hidden_states.errors import DataError, RecipeError
from hidden_states.final_norm import FinalNorm
from hidden_states.formats import ForeignSample, Format, formats
from hidden_states.formats_export import export_folder
from hidden_states.formats_import import ImportOptions, import_folder
from hidden_states.formats_pickle import SpeculatorsV1
from hidden_states.gate import Reference
from hidden_states.store import Store, open_store
from hidden_states.stream import SampleStream

BLOCKS = (1, 2, 4)
FORMATS = formats()
EVERY = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
OPTIONS = ImportOptions(batch_tokens=64, held_out_share=0.3, draft_vocab_size=64)


@pytest.fixture(scope="module")
def target(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with a final norm that changes something: its own weights are all one."""
    folder = tmp_path_factory.mktemp("formats") / "target"
    shutil.copytree(tiny_llama, folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    norm = weights["model.norm.weight"]
    weights["model.norm.weight"] = 0.3 + 2 * torch.rand(norm.shape, generator=torch.Generator().manual_seed(5))
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def reference(target: Path) -> Reference:
    return Reference.load(target)


@pytest.fixture(scope="module")
def states(reference: Reference) -> dict[str, tuple[list[ForeignSample], dict[str, Tensor]]]:
    """By norm: five samples with true states of the tiny target; and the reference's states of the first."""
    made: dict[str, tuple[list[ForeignSample], dict[str, Tensor]]] = {}
    finals = {
        "post": "the final state after its norm",
        "pre": "the final state without its norm (the output of block 5)",
    }
    draw = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 200, (n,), generator=draw) for n in (9, 17, 5, 24, 12)]
    every = [reference.states(ids.tolist()) for ids in tokens]
    for norm, words in finals.items():
        samples = []
        for number, (ids, found) in enumerate(zip(tokens, every, strict=True)):
            aux = torch.stack([found[f"the output of block {block}"] for block in BLOCKS], dim=1)
            mask = (torch.arange(len(ids)) > 2).long()
            samples.append(ForeignSample(f"{number}", ids, mask, aux, found[words]))
        made[norm] = (samples, every[0])
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def written(format: Format, folder: Path, samples: list[ForeignSample]) -> Path:
    format.write(folder, iter(samples), len(samples), None)
    return folder


def read_all(format: Format, folder: Path) -> dict[tuple[int, ...], ForeignSample]:
    found = [format.read(path, folder) for path in format.files(folder)]
    return {tuple(sample.input_ids.tolist()): sample for sample in found}


def assert_same(ours: dict[tuple[int, ...], ForeignSample], theirs: dict[tuple[int, ...], ForeignSample]) -> None:
    assert ours.keys() == theirs.keys()
    for key, sample in ours.items():
        for name in ("loss_mask", "aux", "final"):
            one, other = getattr(sample, name), getattr(theirs[key], name)
            assert one.dtype == other.dtype or name == "loss_mask"
            assert torch.equal(one, other.to(one.dtype)), name


@EVERY
def test_a_round_trip_keeps_every_value_and_finds_the_convention(
    format: Format,
    states: dict[str, tuple[list[ForeignSample], object]],
    store: Store,
    target: Path,
    tmp_path: Path,
) -> None:
    samples, _ = states[format.final_norm]
    theirs = written(format, tmp_path / "theirs", samples)
    made = import_folder(format, theirs, target, store, "data", OPTIONS)
    assert made.convention.after_block == BLOCKS and made.convention.final_norm == format.final_norm
    assert "found by a forward pass" in made.convention.in_words()
    dataset = made.dataset
    assert dataset.verify().problems == [] and dataset.manifest.samples == len(samples)
    assert dataset.manifest.extra["imported"]["format"] == format.name
    again = import_folder(format, theirs, target, store, "data", OPTIONS)
    assert again.dataset.digest == dataset.digest
    export_folder(dataset, format, tmp_path / "ours")
    assert_same(read_all(format, theirs), read_all(format, tmp_path / "ours"))
    with pytest.raises(DataError, match="not empty"):
        export_folder(dataset, format, tmp_path / "ours")
    norm = FinalNorm.load(target)
    batches = list(SampleStream(dataset, batch_tokens=64, norm=norm))
    true = {tuple(s.input_ids.tolist()): s.final for s in states["post"][0]}
    for batch in batches:
        for number in range(len(batch.sample_ids)):
            own = batch.doc_ids == number
            expected = true[tuple(batch.input_ids[own].tolist())]
            assert torch.allclose(batch.final[own], expected, rtol=1e-4, atol=1e-4)  # post-norm, whatever was stored


def test_a_dataset_leads_from_any_format_to_any_other(
    states: dict[str, tuple[list[ForeignSample], object]], store: Store, target: Path, tmp_path: Path
) -> None:
    """And the state behind the norm is the same at the end, whichever side of it each of them keeps."""
    norm = FinalNorm.load(target)
    true = {tuple(s.input_ids.tolist()): s for s in states["post"][0]}
    told = ImportOptions(batch_tokens=64, after_block=BLOCKS, reference=False, draft_vocab_size=64)
    first = written(FORMATS["specforge"], tmp_path / "specforge", states["post"][0])
    dataset: Dataset = import_folder(FORMATS["specforge"], first, target, store, "specforge", told).dataset
    for name in ("speculators", "angelslim", "speculators-v1", "modelopt"):
        said = export_folder(dataset, FORMATS[name], tmp_path / name, norm)
        if name == "speculators":  # found, though each row is right up to a factor only
            found = import_folder(FORMATS[name], tmp_path / name, target, store, "found", OPTIONS).convention
            assert (found.after_block, found.final_norm) == (BLOCKS, "pre")
        assert "as stored" in said or "norm" in said
        made = import_folder(FORMATS[name], tmp_path / name, target, store, name, told)
        assert "confirmed by the norm's weights" in made.convention.in_words() or name.startswith("speculators")
        dataset = made.dataset
    for sample in read_all(FORMATS["modelopt"], tmp_path / "modelopt").values():
        expected = true[tuple(sample.input_ids.tolist())]
        assert torch.equal(sample.aux, expected.aux)
        assert torch.allclose(sample.final, expected.final, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_known_is_refused_unless_told(
    states: dict[str, tuple[list[ForeignSample], dict[str, Tensor]]], store: Store, target: Path, tmp_path: Path
) -> None:
    samples, every = states["post"]
    first, modelopt = samples[0], FORMATS["modelopt"]

    def attempt(match: str, options: ImportOptions = OPTIONS, **changed: Tensor | None) -> None:
        folder = tmp_path / "attempt"
        shutil.rmtree(folder, ignore_errors=True)
        fields = vars(first) | changed
        written(modelopt, folder, [ForeignSample(**{**fields, "loss_mask": first.loss_mask})])  # type: ignore[arg-type]
        if "loss_mask" in changed:
            path = modelopt.files(folder)[0]
            data = torch.load(path, weights_only=True)
            del data["loss_mask"]
            torch.save(data, path)
        with pytest.raises(DataError, match=match):
            import_folder(modelopt, folder, target, store, "refused", options)

    blind = ImportOptions(reference=False)
    attempt("do not say which blocks.*--after-block", blind)
    attempt("no loss mask; expected which tokens are to learn", loss_mask=None)
    attempt(r"blocks \(1, 2, 4\), by a forward pass of the target; expected \(1, 2, 3\), as told",
            ImportOptions(after_block=(1, 2, 3)))  # fmt: skip
    attempt("3 aux states a token; expected 2", ImportOptions(after_block=(1, 2)))
    attempt(r"aux states are the outputs of blocks \[4, 2, 1\]; expected ascending", aux=first.aux.flip(1))
    attempt("one token late", aux=first.aux.roll(1, 0))
    attempt("none of this target's", aux=torch.randn_like(first.aux))
    attempt("aux state 0 is the embedding", aux=torch.stack([every["the embedding"], *first.aux.unbind(1)[1:]], dim=1))
    before = states["pre"][0][0].final
    attempt("pre-norm, by the weights of the target's norm; expected post-norm",
            ImportOptions(after_block=BLOCKS, reference=False), final=before)  # fmt: skip
    attempt("norm pre, by a forward pass of the target; expected post, as told",
            ImportOptions(final_norm="post"), final=before)  # fmt: skip
    assert list(store.list("refused")) == []


@EVERY
def test_a_file_of_another_format_is_refused_by_name(format: Format, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"Is this {format.name}'s format"):
        raise format.refuse(tmp_path, "x")
    sample = ForeignSample("0", torch.arange(4), torch.ones(4), torch.randn(4, 3, 8), torch.randn(4, 8))
    path = next(iter(written(format, tmp_path / "good", [sample]).rglob("*_0.*")), None)
    path = path or format.files(tmp_path / "good")[0]
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=f"{path.name}.*cannot be read"):
        format.read(path, tmp_path / "good")
    if path.suffix != ".safetensors":
        torch.save({"input_ids": torch.arange(4)}, path)
        with pytest.raises(DataError, match="among its keys"):
            format.read(path, tmp_path / "good")


class Planted:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a pickle ran code')",)


def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    format = FORMATS["specforge"]
    path = tmp_path / "rows_0-2000" / "data_0.ckpt"
    path.parent.mkdir()
    torch.save({"input_ids": Planted()}, path)
    with pytest.raises(DataError, match="more than tensors, and loading it could run code"):
        format.read(path, tmp_path)
    path.write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DataError):
        format.read(path, tmp_path)


NOT_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda t: None, "list": lambda t: t.tolist(), "word": lambda t: "x", "number": lambda t: 5,
    "dictionary": lambda t: {"a": t}, "sparse": lambda t: t.to_sparse(), "meta": lambda t: t.to("meta"),
    "scalar": lambda t: t.sum(),
    "nothing": lambda t: t.new_empty(0), "complex": lambda t: t.to(torch.complex64),
    "two samples": lambda t: torch.cat([t, t]),
}  # fmt: skip
NOT_TOKENS: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda t: t + 0.5, "floats": lambda t: t.float(), "truths": lambda t: t.bool(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
}  # fmt: skip
NOT_STATES: dict[str, Callable[[Tensor], Any]] = {
    "float64": lambda t: t.double(), "integers": lambda t: t.int(), "float8": lambda t: t.to(torch.float8_e4m3fn),
    "another dtype": lambda t: t.bfloat16(), "transposed": lambda t: t.transpose(-1, -2),
}  # fmt: skip
TOKENS, MASK = ("input_ids", "token_ids"), ("loss_mask",)


def changed(path: Path, key: str, change: Callable[[Tensor], Any]) -> None:
    """One entry of a sample's file; of a list of tensors, all of them."""
    data = torch.load(path, weights_only=True)
    value = data[key]
    data[key] = [change(part) for part in value] if isinstance(value, list) else change(value)
    torch.save(data, path)


@pytest.mark.parametrize("wrong", [*NOT_VALUES, *NOT_TOKENS, *NOT_STATES])
@EVERY
def test_a_tensor_of_another_kind_is_refused_by_its_file(format: Format, wrong: str, tmp_path: Path) -> None:
    sample = ForeignSample("0", torch.arange(4), torch.ones(4).long(), torch.randn(4, 3, 8), torch.randn(4, 8))
    for key in getattr(format, "keys", ()):
        changes = NOT_VALUES | (NOT_TOKENS if key in TOKENS else {} if key in MASK else NOT_STATES)
        if wrong not in changes or (key in MASK and wrong == "none"):  # no mask is another refusal, see above
            continue
        if wrong == "another dtype" and isinstance(format, SpeculatorsV1):  # all of its states are in one list
            continue
        (path,) = format.files(written(format, tmp_path / key, [sample]))
        changed(path, key, changes[wrong])
        with pytest.raises(DataError, match=path.name):
            format.read(path, tmp_path / key)


@pytest.mark.parametrize("mask", [[[1, None, 1, 1]], [["a"] * 4], [None], [[[1]] * 4], [[1, 1]]])
def test_a_mask_in_an_arrow_table_that_is_none_is_refused(tmp_path: Path, mask: list[Any]) -> None:
    format = FORMATS["speculators"]
    sample = ForeignSample("0", torch.arange(4), torch.ones(4).long(), torch.randn(4, 3, 8), torch.randn(4, 8))
    (path,) = format.files(written(format, tmp_path, [sample]))
    table = pa.table({"input_ids": [[0, 1, 2, 3]], "loss_mask": mask})
    with pa.OSFile(str(next(tmp_path.glob("*.arrow"))), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(DataError, match="loss mask"):
        format.read(path, tmp_path)


@EVERY
def test_states_that_are_not_those_of_one_capture_are_refused(
    format: Format, states: dict[str, tuple[list[ForeignSample], object]], store: Store, target: Path, tmp_path: Path
) -> None:
    """A value that is none, a file of another dtype, blocks the target does not have; and what is there already."""
    good = states[format.final_norm][0][:2]

    def attempt(match: str, second: dict[str, Tensor], blocks: tuple[int, ...] = BLOCKS, name: str = "refused") -> None:
        samples = [good[0], ForeignSample(**(vars(good[1]) | second))]  # type: ignore[arg-type]
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        told = ImportOptions(batch_tokens=64, after_block=blocks, reference=False, draft_vocab_size=64)
        with pytest.raises((DataError, RecipeError), match=match):
            import_folder(format, written(format, folder, samples), target, store, name, told)

    for bad in (torch.nan, torch.inf, -torch.inf):
        aux = good[1].aux.clone()
        aux[2, 1, 3] = bad
        attempt("NaN or infinite values in its aux", {"aux": aux})
    rounded = {"aux": good[1].aux.bfloat16(), "final": good[1].final.bfloat16()}
    attempt("torch.bfloat16; expected torch.float32", rounded)
    attempt("0 to 5", {}, blocks=(1, 2, 6))
    whole = import_folder(format, written(format, tmp_path / "good", good), target, store, "data", OPTIONS).dataset
    attempt("other values in after_block_2", {"aux": good[1].aux * torch.tensor([1, 2, 1])[:, None]}, name="data")
    attempt("other values in final", {"final": good[1].final.flip(0)}, name="data")
    assert whole.verify().problems == []


@EVERY
def test_a_disk_that_fills_up_during_an_export_is_named(
    format: Format, states: dict[str, tuple[list[ForeignSample], object]], store: Store, target: Path, tmp_path: Path
) -> None:
    theirs = written(format, tmp_path / "theirs", states[format.final_norm][0])
    dataset = import_folder(format, theirs, target, store, "data", OPTIONS).dataset
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cannot be written .*File too large"):
            export_folder(dataset, format, tmp_path / "ours")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_compressed_specforge_files_are_read(tmp_path: Path) -> None:
    format = FORMATS["specforge"]
    sample = ForeignSample("0", torch.arange(4), torch.ones(4).long(), torch.randn(4, 3, 8), torch.randn(4, 8))
    (path,) = format.files(written(format, tmp_path, [sample]))
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())
    path.unlink()
    (path,) = format.files(tmp_path)
    assert torch.equal(format.read(path, tmp_path).aux, sample.aux)
