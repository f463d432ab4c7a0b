"""Host memory for rows: in one piece, used again, never by two at a time."""

import mmap
import os
import random
from array import array

import pytest
import torch

from eyas_capture.memory import SharedMemory
from eyas_capture.refusals import Drift
from eyas_capture.rows import Buffers, Layout, RowCopier

CPU = torch.device("cpu")
MIB = 1 << 20


def like(width: int, dtype: torch.dtype) -> Layout:
    return Layout.of(
        {name: torch.empty(0, width, dtype=dtype) for name in ("after_block_1", "after_block_2", "final")}
    )


def taken(copier: RowCopier, count: int, layout: Layout, first: int = 0) -> Buffers:
    return copier.buffers(array("q", range(first, first + count)), count, layout)


def fill(buffers: Buffers, value: int) -> None:
    for tensor in (buffers.ids, *buffers.rows.values()):
        tensor.fill_(value)


def holds(buffers: Buffers, value: int) -> bool:
    return all(bool((tensor == value).all()) for tensor in (buffers.ids, *buffers.rows.values()))


def place(memory: SharedMemory, buffers: Buffers) -> bytes:
    """What another process finds there."""
    offset, size = buffers.piece
    return os.pread(memory.descriptor, size, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_under_way_never_share_memory(dtype: torch.dtype) -> None:
    """Of random lengths, taken and released in random order, as by the forward thread and the writers."""
    rng, copier, open_ = random.Random(0), RowCopier(CPU, SharedMemory(MIB)), []
    for number in range(300):
        if open_ and rng.random() < 0.5:
            value, buffers = open_.pop(rng.randrange(len(open_)))
            assert holds(buffers, value)
            buffers.release()
        count = rng.choice([1, 7, 64, 65, 300])
        buffers = taken(copier, count, like(16, dtype))
        assert buffers.ids.shape == (count,) and buffers.ids.dtype == torch.int64
        assert all(rows.shape == (count, 16) and rows.dtype == dtype for rows in buffers.rows.values())
        assert all(rows.is_contiguous() for rows in buffers.rows.values())
        fill(buffers, number % 200)
        open_.append((number % 200, buffers))
    assert all(holds(buffers, value) for value, buffers in open_)


def test_released_memory_is_used_again_by_prompts_of_about_that_length() -> None:
    copier, rows = RowCopier(CPU, SharedMemory(MIB)), like(64, torch.float32)
    first = taken(copier, 100, rows)
    address = first.ids.data_ptr()
    first.release()
    assert copier.bytes_for(101, 101, rows) == copier.bytes_for(100, 100, rows)
    assert taken(copier, 101, rows).ids.data_ptr() == address + 8


def test_what_is_kept_for_later_is_bounded_and_follows_the_lengths_that_come() -> None:
    copier = RowCopier(CPU, SharedMemory(MIB))
    for count in (100, 200, 300, 500, 900, 1700):
        pieces = [taken(copier, count, like(64, torch.float32)) for _ in range(8)]
        for piece in pieces:
            piece.release()
        assert copier._memory._bytes <= MIB
    assert copier._memory._free.get(copier.bytes_for(900, 900, like(64, torch.float32)))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 1000, 12345])
def test_the_memory_that_is_counted_is_the_memory_that_is_taken(count: int) -> None:
    """And at most a quarter more than the rows need."""
    copier, rows = RowCopier(CPU, SharedMemory()), like(24, torch.bfloat16)
    need = count * (8 + 8 + 3 * 24 * 2)
    assert need <= copier.bytes_for(count, count, rows) <= max(1.25 * need, mmap.PAGESIZE)
    assert taken(copier, count, rows).piece[1] == copier.bytes_for(count, count, rows)


def test_another_process_finds_the_rows_where_it_is_told_they_are() -> None:
    memory = SharedMemory(MIB)
    copier, rng = RowCopier(CPU, memory), random.Random(1)
    for count in (1, 7, 300, 2000):
        buffers = taken(copier, count, like(16, torch.bfloat16), first=rng.randrange(100))
        for tensor in (buffers.ids, *buffers.rows.values()):
            tensor.fill_(rng.randrange(100))
        found = place(memory, buffers)
        assert len(found) == copier.bytes_for(count, count, like(16, torch.bfloat16))
        sent, ids = buffers.places["sent"], buffers.places["ids"]
        assert found[ids : ids + 8 * count] == buffers.ids.numpy().tobytes()
        prompt = array("q", found[sent : sent + 8 * count])
        assert prompt == array("q", range(prompt[0], prompt[0] + count))
        for name, dtype, width, row, offset in buffers.places["rows"]:
            raw = buffers.rows[name].view(torch.uint8).numpy().tobytes()
            assert (dtype, width, row) == ("BF16", 16, 32) and found[offset : offset + row * count] == raw


def test_rows_of_a_dtype_that_dumps_do_not_have_are_refused() -> None:
    with pytest.raises(Drift, match="float64"):
        like(16, torch.float64)


def test_memory_that_is_not_kept_is_given_back_at_once() -> None:
    memory = SharedMemory(kept_bytes=0)
    pieces = [memory.take(MIB) for _ in range(4)]
    for piece in pieces:
        piece.mapping[:] = b"x" * MIB
    assert os.fstat(memory.descriptor).st_blocks * 512 == 4 * MIB
    for piece in pieces:
        memory.put(piece)
    assert os.fstat(memory.descriptor).st_blocks == 0
