"""The other trainers' own readers read our exports. Each test runs where its package is installed (extra `peers`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hidden_states.dataset import Dataset
from hidden_states.final_norm import FinalNorm
from hidden_states.formats import formats
from hidden_states.formats_export import export_folder
from hidden_states.shard_file import SampleRows
from hidden_states.store import open_store
from tests.hidden_states.stored import make_dataset

H = 8
NORM = FinalNorm(0.5 + torch.rand(H, generator=torch.Generator().manual_seed(2)), 1e-6)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(open_store((tmp_path / "store").as_uri()), tmp_path, [5, 9, 12], shard_tokens=20).dataset


def exported(dataset: Dataset, name: str, folder: Path) -> list[SampleRows]:
    """Writes the folder; the samples that were written, in order."""
    export_folder(dataset, formats()[name], folder, NORM)
    return [dataset.read(sample_id) for sample_id in dataset.sample_ids]


def test_speculators_reads_our_export(dataset: Dataset, tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data")
    rows = exported(dataset, "speculators", tmp_path / "out")
    theirs = data.ArrowDataset(100, tmp_path / "out", on_missing="raise", hidden_states_dtype=torch.bfloat16)
    assert len(theirs) == len(rows)
    for index, row in enumerate(rows):
        found: dict[str, Any] = theirs[index]
        assert torch.equal(found["input_ids"], row.input_ids)
        assert torch.equal(found["loss_mask"].long(), row.loss_mask.long())
        assert torch.equal(found["hidden_states"], row.aux.flatten(1))
        normed = NORM.behind(found["verifier_last_hidden_states"].float())
        direction = torch.nn.functional.cosine_similarity(normed, row.final.float(), dim=-1)
        assert bool(
            (direction > 0.9999).all()
        )  # their final state is before the norm: the same behind it, but for length


def test_specforge_reads_our_export(dataset: Dataset, tmp_path: Path) -> None:
    reader = pytest.importorskip("specforge.runtime.data_plane.offline_reader")
    rows = exported(dataset, "specforge", tmp_path / "out")
    files = reader.list_feature_files(str(tmp_path / "out"))
    assert len(files) == len(rows)
    for path, row in zip(files, rows, strict=True):
        specs, tokens, _ = reader._inspect_feature_file(path, reader._OFFLINE_EAGLE3_KEYS)
        assert tokens == len(row.input_ids) and set(specs) == set(reader._OFFLINE_EAGLE3_KEYS)
        found = reader.load_feature_file(path)
        assert torch.equal(found["aux_hidden_state"][0], row.aux.flatten(1))
        assert torch.equal(found["hidden_state"][0], row.final)
        assert found["loss_mask"].tolist() == row.loss_mask.tolist()


def test_modelopt_reads_our_export(dataset: Dataset, tmp_path: Path) -> None:
    utils = pytest.importorskip("modelopt.torch.speculative.eagle.utils")
    rows = exported(dataset, "modelopt", tmp_path / "out")
    theirs = utils.OfflineSupervisedDataset(sorted((tmp_path / "out").glob("*.pt")), answer_only_loss=True)
    assert len(theirs) == len(rows)
    for index, row in enumerate(rows):
        found = theirs[index]
        assert torch.equal(found["input_ids"], row.input_ids)
        assert torch.equal(found["base_model_hidden_states"], row.final)
        assert torch.equal(found["aux_hidden_states"], row.aux.flatten(1))
        assert found["loss_mask"].tolist() == row.loss_mask.tolist()
