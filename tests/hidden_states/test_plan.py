"""Batches: the same data gives the same plan, in any order, and a plan knows its size."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidden_states.errors import DataError
from hidden_states.plan import bytes_per_token, dataset_size, plan_batches
from hidden_states.samples import Sample

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def samples_of(lengths: list[int]) -> list[Sample]:
    return [Sample.of([n] * length, [1] * length, f"x:{n}") for n, length in enumerate(lengths)]


@given(lengths=LENGTHS, most=st.integers(1, 100), seed=st.integers())
def test_every_sample_is_in_one_batch_and_the_order_of_rows_does_not_matter(
    lengths: list[int], most: int, seed: int
) -> None:
    samples = samples_of(lengths)
    batches = plan_batches(samples, most)
    assert sorted(s.id for b in batches for s in b.samples) == sorted(s.id for s in samples)
    assert all(batch.tokens <= most or len(batch.samples) == 1 for batch in batches)
    shuffled = list(samples)
    random.Random(seed).shuffle(shuffled)
    assert plan_batches(shuffled, most) == batches
    assert len({batch.id for batch in batches}) == len(batches)


def test_a_batch_is_named_by_what_is_in_it() -> None:
    one, two = samples_of([4, 5])
    (together,) = plan_batches([one, two], 100)
    (alone,) = plan_batches([one], 100)
    assert together.id != alone.id


def test_a_sample_planned_twice_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="planned twice"):
        plan_batches(samples_of([4]) * 2, 100)


def test_kimi_k25_takes_57344_bytes_a_token() -> None:
    assert bytes_per_token(7168, 3, "bfloat16") == 57_344
    with pytest.raises(DataError, match="float64"):
        bytes_per_token(7168, 3, "float64")


@given(lengths=LENGTHS.filter(bool), most=st.integers(60, 200))
def test_a_plan_says_what_it_weighs(lengths: list[int], most: int) -> None:
    batches = plan_batches(samples_of(lengths), most)
    size = dataset_size(batches, 16, 3, "float32")
    assert (size.samples, size.tokens, size.batches) == (len(lengths), sum(lengths), len(batches))
    assert size.bytes == sum(lengths) * (4 * 16 * 4 + 8 + 1)
    assert size.largest_batch_bytes <= most * (4 * 16 * 4 + 9)
    assert size.local_bytes(3) == 6 * size.largest_batch_bytes
