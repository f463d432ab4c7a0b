"""Prompts that training has seen are known by their tokens, in every turn."""

from pathlib import Path

from eyas_capture import contract
from hidden_states.dataset import Dataset
from hidden_states.manifest import TRAIN
from hidden_states.samples import Sample
from hidden_states.store import open_store
from hidden_states.trained_prompts import trained_prompts
from tests.hidden_states.stored import make_dataset


def asked(sample: Sample) -> set[str]:
    """Everything before a token to learn that follows one not to learn, written out."""
    mask = sample.loss_mask
    starts = [i for i, learn in enumerate(mask) if learn and (i == 0 or not mask[i - 1])]
    return {contract.tokens_sha256(sample.input_ids[:start]) for start in starts}


def test_every_prompt_of_the_training_split_is_known_and_no_other(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    made = make_dataset(store, tmp_path, [9, 14, 30, 5, 21, 17, 12, 8], shard_tokens=40, held_out_share=0.4)
    table = Dataset.open(store, "data").samples
    splits = dict(zip(table["id"].to_pylist(), table["split"].to_pylist(), strict=True))
    assert set(splits.values()) == {TRAIN, "held_out"}
    training = [sample for sample_id, sample in made.samples.items() if splits[sample_id] == TRAIN]
    assert trained_prompts(made.dataset) == set().union(*(asked(sample) for sample in training))
    assert any(len(asked(sample)) > 1 for sample in training)  # several turns
