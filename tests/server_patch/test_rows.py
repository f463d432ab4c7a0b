"""Host memory for rows: in one piece, used again, never by two at a time."""

import random

import pytest
import torch

from eyas_capture.rows import Buffers, RowCopier

CPU = torch.device("cpu")
MIB = 1 << 20


def like(width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.empty(0, width, dtype=dtype) for name in ("after_block_1", "after_block_2", "final")}


def fill(buffers: Buffers, value: int) -> None:
    for tensor in (buffers.ids, *buffers.rows.values()):
        tensor.fill_(value)


def holds(buffers: Buffers, value: int) -> bool:
    return all(bool((tensor == value).all()) for tensor in (buffers.ids, *buffers.rows.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_under_way_never_share_memory(dtype: torch.dtype) -> None:
    """Of random lengths, taken and released in random order, as by the forward thread and the writers."""
    rng, copier, open_ = random.Random(0), RowCopier(CPU, MIB), []
    for number in range(300):
        if open_ and rng.random() < 0.5:
            value, buffers = open_.pop(rng.randrange(len(open_)))
            assert holds(buffers, value)
            buffers.release()
        count = rng.choice([1, 7, 64, 65, 300])
        buffers = copier.buffers(count, like(16, dtype))
        assert buffers.ids.shape == (count,) and buffers.ids.dtype == torch.int64
        assert all(rows.shape == (count, 16) and rows.dtype == dtype for rows in buffers.rows.values())
        assert all(rows.is_contiguous() for rows in buffers.rows.values())
        fill(buffers, number % 200)
        open_.append((number % 200, buffers))
    assert all(holds(buffers, value) for value, buffers in open_)


def test_released_memory_is_used_again_by_prompts_of_about_that_length() -> None:
    copier, rows = RowCopier(CPU, MIB), like(64, torch.float32)
    first = copier.buffers(100, rows)
    address = first.ids.data_ptr()
    first.release()
    assert copier.bytes_for(101, rows) == copier.bytes_for(100, rows)
    assert copier.buffers(101, rows).ids.data_ptr() == address


def test_what_is_kept_for_later_is_bounded_and_follows_the_lengths_that_come() -> None:
    copier = RowCopier(CPU, MIB)
    for count in (100, 200, 300, 500, 900, 1700):
        pieces = [copier.buffers(count, like(64, torch.float32)) for _ in range(8)]
        for piece in pieces:
            piece.release()
        assert copier._pool._bytes <= MIB
    assert copier._pool._free.get(copier.bytes_for(900, like(64, torch.float32)))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 1000, 12345])
def test_the_memory_that_is_counted_is_the_memory_that_is_taken(count: int) -> None:
    """And at most a quarter more than the rows need."""
    copier, rows = RowCopier(CPU), like(24, torch.bfloat16)
    need = count * (8 + 3 * 24 * 2)
    assert need <= copier.bytes_for(count, rows) <= 1.25 * need
    piece = copier.buffers(count, rows).ids.untyped_storage()
    assert piece.nbytes() == copier.bytes_for(count, rows)
