"""Host memory for the rows of a pass: copied into one piece, used again, never by two at a time."""

import mmap
import os
import random
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas_capture.memory import SharedMemory
from eyas_capture.refusals import Drift
from eyas_capture.rows import Layout, PassRows, RowCopier

CPU = torch.device("cpu")
MIB = 1 << 20
NAMES = ("after_block_1", "after_block_2", "final")


def a_pass(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """ids and captured rows."""
    return torch.randint(0, 1000, (rows,)), {name: torch.randn(rows, width).to(dtype) for name in NAMES}


def copied(memory: SharedMemory, rows: int, width: int = 16, dtype: torch.dtype = torch.float32) -> PassRows:
    """A pass of one request, whole."""
    ids, named = a_pass(rows, width, dtype)
    made = RowCopier(CPU, memory).copy([array("q", range(rows))], [(0, rows)], ids, named, Layout.of(named))
    made.holders = 1
    return made


def there(memory: SharedMemory, rows: PassRows) -> bytes:
    """What another process finds in the piece."""
    offset, size, *_ = rows.words
    return os.pread(memory.descriptor, size, offset)


@given(
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6),  # rows left out before, and rows
    prompts=st.lists(st.integers(0, 12), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    packed=st.booleans(),
)
def test_another_process_finds_exactly_the_parts_of_a_pass_where_it_is_told(
    parts: list[tuple[int, int]], prompts: list[int], dtype: torch.dtype, packed: bool
) -> None:
    """Also where the parts have gaps (other people's requests), and where the pass gave its rows side by side."""
    memory, places, end = SharedMemory(), [], 0
    for gap, count in parts:
        places.append((end + gap, count))
        end += gap + count
    ids, named = a_pass(end + 2, 4, dtype)
    if packed:
        named = dict(zip(NAMES, torch.cat(list(named.values()), dim=-1).split(4, dim=-1), strict=True))
    sent = [array("q", range(100 * n, 100 * n + length)) for n, length in enumerate(prompts)]
    layout = Layout.of(named)
    rows = RowCopier(CPU, memory).copy(sent, places, ids, named, layout)
    found, (_, _, ids_at, count_of_all) = there(memory, rows), rows.words
    assert count_of_all == sum(count for _, count in parts)
    for prompt, at in zip(sent, rows.prompts, strict=True):
        assert found[at : at + 8 * len(prompt)] == prompt.tobytes()
    for (offset, count), first in zip(places, rows.rows, strict=True):
        part = slice(offset, offset + count)
        assert found[ids_at + 8 * first : ids_at + 8 * (first + count)] == ids[part].numpy().tobytes()
        at = ids_at + 8 * count_of_all
        for name, _, width, row in layout.words:
            raw = named[name][part].contiguous().view(torch.uint8).numpy().tobytes()
            assert width == 4 and found[at + first * row : at + (first + count) * row] == raw
            at += count_of_all * row


def test_passes_under_way_never_share_memory() -> None:
    """Of random lengths, taken and released in random order, as by the forward thread and the writer."""
    rng, memory, open_ = random.Random(0), SharedMemory(MIB), []
    for _ in range(300):
        if open_ and rng.random() < 0.5:
            rows, before = open_.pop(rng.randrange(len(open_)))
            assert there(memory, rows) == before
            rows.release()
        rows = copied(memory, rng.choice([1, 7, 64, 65, 300]))
        open_.append((rows, there(memory, rows)))
    assert all(there(memory, rows) == before for rows, before in open_)


def test_a_piece_is_given_back_by_the_last_dump_that_needs_it() -> None:
    memory = SharedMemory(MIB)
    rows = copied(memory, 40)
    rows.holders = 3
    for left in (2, 1):
        rows.release()
        assert rows.holders == left and memory._bytes == 0
    rows.release()
    assert memory._bytes == rows.words[1]


def test_released_memory_is_used_again_by_passes_of_about_that_size() -> None:
    memory = SharedMemory(MIB)
    first = copied(memory, 1000, 64)
    first.release()
    assert copied(memory, 1001, 64).words[:2] == first.words[:2]


def test_what_is_kept_for_later_is_bounded_and_follows_the_sizes_that_come() -> None:
    memory, size = SharedMemory(MIB), 0
    for count in (100, 200, 300, 500, 900, 1100):
        passes = [copied(memory, count, 64) for _ in range(8)]
        for rows in passes:
            rows.release()
        size = passes[0].words[1]
        assert memory._bytes <= MIB and memory._bytes == sum(piece.size for piece in memory._kept)
    assert size in [piece.size for piece in memory._kept]


def test_passes_of_changing_sizes_use_each_others_memory() -> None:
    """Pinning fresh memory for a GPU takes longer than copying rows into it."""
    rng, memory, under_way, taken = random.Random(2), SharedMemory(64 * MIB), [], 0
    for _ in range(200):
        under_way.append(copied(memory, sum(rng.randint(600, 1400) for _ in range(rng.randint(1, 8))), 8))
        taken += under_way[-1].words[1]
        if len(under_way) > 2:
            under_way.pop(0).release()
    assert memory.bytes_in_use == sum(rows.words[1] for rows in under_way)
    assert memory._offsets < 0.1 * taken  # fresh


def test_a_copy_that_fails_gives_its_memory_back() -> None:
    memory = SharedMemory(MIB)
    ids, named = a_pass(10, 4)
    layout, named["final"] = Layout.of(named), torch.randn(10, 5)
    with pytest.raises(RuntimeError):
        RowCopier(CPU, memory).copy([], [(0, 10)], ids, named, layout)
    assert memory.in_use == memory.bytes_in_use == 0 and memory._kept


@pytest.mark.parametrize("count", [1, 2, 63, 64, 1000, 12345])
def test_a_piece_is_little_more_than_what_is_counted(count: int) -> None:
    """An eighth at most, or what is missing to whole pages."""
    _, named = a_pass(0, 24, torch.bfloat16)
    need = Layout.of(named).bytes_for(count, count)
    assert need == count * (8 + 8 + 3 * 24 * 2)
    size = copied(SharedMemory(), count, 24, torch.bfloat16).words[1]
    assert size % mmap.PAGESIZE == 0 and need <= size <= max(1.125 * need, need + mmap.PAGESIZE)


def test_rows_of_a_dtype_that_dumps_do_not_have_are_refused() -> None:
    with pytest.raises(Drift, match="float64"):
        Layout.of(a_pass(3, 16, torch.float64)[1])


def test_memory_that_is_not_kept_is_given_back_at_once() -> None:
    memory = SharedMemory(kept_bytes=0)
    pieces = [memory.take(MIB) for _ in range(4)]
    for piece in pieces:
        piece.mapping[:] = b"x" * MIB
    assert os.fstat(memory.descriptor).st_blocks * 512 == 4 * MIB
    for piece in pieces:
        memory.put(piece)
    assert os.fstat(memory.descriptor).st_blocks == 0
