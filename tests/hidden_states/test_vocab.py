"""The draft vocabulary is the most frequent of the tokens to learn, the special ones always among them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hidden_states.errors import DatasetError, RecipeError
from hidden_states.samples import Sample
from hidden_states.vocab import VocabMap, build_vocab_map, count_tokens


def test_only_tokens_to_learn_are_counted() -> None:
    samples = [Sample.of([1, 2, 2, 3], [0, 1, 1, 0], "a"), Sample.of([2, 3], [0, 1], "b")]
    assert count_tokens(samples, 5).tolist() == [0, 0, 2, 1, 0]


@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    data=st.data(),
)
def test_the_map_is_the_most_frequent_ids_with_the_special_ones(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    vocab = build_vocab_map(torch.tensor(counts), size, always)
    ids = vocab.target_ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == size
    assert always <= set(ids)
    assert [d + offset for d, offset in enumerate(vocab.d2t.tolist())] == ids
    assert vocab.t2d.nonzero().flatten().tolist() == ids
    chosen = [counts[i] for i in ids if i not in always]
    others = [counts[i] for i in range(len(counts)) if i not in ids]
    assert not chosen or not others or min(chosen) >= max(others)
    assert vocab.coverage == pytest.approx(sum(counts[i] for i in ids) / sum(counts) if sum(counts) else 0.0)
    back = VocabMap.from_bytes(vocab.to_bytes(), "here")
    assert all(torch.equal(getattr(back, name), getattr(vocab, name)) for name in ("d2t", "t2d", "counts"))
    assert back.coverage == vocab.coverage and back.to_bytes() == vocab.to_bytes()


def test_of_equally_frequent_ids_the_lower_wins() -> None:
    assert build_vocab_map(torch.tensor([1, 5, 5, 5, 1]), 3).target_ids.tolist() == [1, 2, 3]
    assert build_vocab_map(torch.tensor([7, 7, 7, 7, 7]), 2).target_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("size", "always", "words"),
    [(6, [], "size 6"), (0, [], "size 0"), (1, [0, 1], "size 1"), (3, [5], "ids below 5"), (3, [-1], "special ids -1")],
)
def test_an_impossible_vocabulary_is_refused(size: int, always: list[int], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build_vocab_map(torch.ones(5, dtype=torch.int64), size, always)


def test_a_damaged_map_is_refused() -> None:
    vocab = build_vocab_map(torch.tensor([1, 5, 5, 5, 1]), 3)
    other = build_vocab_map(torch.tensor([5, 5, 1, 1, 1]), 3)
    with pytest.raises(DatasetError, match="name different ids"):
        VocabMap.from_bytes(VocabMap(vocab.d2t, other.t2d, vocab.counts, 1.0).to_bytes(), "here")
    for data in (b"", vocab.to_bytes()[:40]):
        with pytest.raises(DatasetError, match="not a vocabulary map"):
            VocabMap.from_bytes(data, "here")
