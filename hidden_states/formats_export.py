"""A dataset of ours as another trainer's folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hidden_states.dataset import Dataset
from hidden_states.encoding import TOP_K
from hidden_states.errors import DataError
from hidden_states.final_norm import FinalNorm
from hidden_states.formats import ForeignSample, Format, as_int64


def export_folder(dataset: Dataset, format: Format, folder: Path, norm: FinalNorm | None = None) -> str:
    """Writes every sample of every split; returns what was done to the final state, in words.

    Args:
        norm: the target's final norm, where the format keeps the final state on its other side.

    Raises:
        DataError: the folder is not empty, or cannot be written; the dataset keeps less than the format needs; `norm`
            is missing or another model's.
    """
    manifest = dataset.manifest
    with _writing(folder):
        if folder.exists() and any(folder.iterdir()):
            raise DataError(str(folder), "it is not empty", "a new folder", "Samples of two exports would be mixed.")
    if manifest.encoding.final == TOP_K or manifest.encoding.final_rows != "all":
        raise DataError(
            dataset.uri,
            f"keeps {manifest.encoding.in_words()}",
            f"whole final states, as {format.name} has",
            "Export the dataset it was made of.",
        )
    if manifest.final_norm != format.final_norm and norm is None:
        raise DataError(
            dataset.uri,
            f"its final state is {manifest.final_norm}-norm",
            f"{format.final_norm}-norm for {format.name}",
            "Give the target (--target): its norm's weights lead from one to the other.",
        )
    if norm is not None and len(norm.weight_H) != manifest.hidden_size:
        raise DataError(
            "target's final norm", f"{len(norm.weight_H)} values", f"{manifest.hidden_size}, the dataset's hidden size",
            "Give the target the dataset was captured from.",
        )  # fmt: skip
    vocab = dataset.vocab_map() if manifest.vocab_map is not None else None
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        format.write(folder, _samples(dataset, format, norm), manifest.samples, vocab)
    if manifest.final_norm == format.final_norm:
        return f"final state {format.final_norm}-norm, as stored"
    if format.final_norm == "pre":
        return "final state divided by the norm's weights: right up to a factor a row, which the norm cancels"
    return "final state taken through the target's norm"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a file of that name, no right to write, a full disk
        raise DataError(
            str(folder), f"it cannot be written ({error.strerror or error})", "a new folder", "Name another."
        ) from error


def _samples(dataset: Dataset, format: Format, norm: FinalNorm | None) -> Iterator[ForeignSample]:
    manifest = dataset.manifest
    for sample_id in dataset.sample_ids:
        rows = dataset.read(sample_id)
        final = rows.final
        if manifest.final_norm != format.final_norm:
            assert norm is not None
            final = norm.before(final) if format.final_norm == "pre" else norm.behind(final)
        yield ForeignSample(sample_id, rows.input_ids, as_int64(rows.loss_mask), rows.aux, final)
