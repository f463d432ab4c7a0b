"""Bytes to files in calls of bounded size, whatever a disk takes of each."""

import errno
import os
import random
from pathlib import Path

import pytest

from hidden_states import pieces as module
from hidden_states.pieces import pieces, write_at

SIZES = (0, 1, 6, 7, 8, 13, 14, 15, 100)


@pytest.mark.parametrize("size", SIZES)
def test_pieces_are_all_of_it_in_order_and_none_is_large(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 7)
    data = random.Random(size).randbytes(size)
    for given in (data, memoryview(data), memoryview(data * 8).cast("q") if size else memoryview(b"")):
        found = list(pieces(given))
        assert b"".join(found) == bytes(memoryview(given).cast("B") if size else b"")
        assert all(0 < len(piece) <= 7 for piece in found)


@pytest.mark.parametrize("taken", [1, 3, 7])
@pytest.mark.parametrize("size", SIZES)
def test_a_disk_that_takes_a_part_of_a_call_is_given_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, taken: int
) -> None:
    calls, pwrite = [], os.pwrite

    def short(descriptor: int, data: memoryview, start: int) -> int:
        calls.append(len(data))
        return pwrite(descriptor, data[:taken], start)

    monkeypatch.setattr(module, "PIECE_BYTES", 7)
    monkeypatch.setattr(module.os, "pwrite", short)
    data = random.Random(size).randbytes(size)
    with open(tmp_path / "file", "wb") as file:
        write_at(file.fileno(), data, 5)
    assert (tmp_path / "file").read_bytes()[5:] == data
    assert max(calls, default=0) <= 7


def test_a_full_disk_is_told_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left, pwrite = 10, os.pwrite

    def nearly_full(descriptor: int, data: memoryview, start: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room = min(left, len(data))
        left -= room
        return pwrite(descriptor, data[:room], start)

    monkeypatch.setattr(module, "PIECE_BYTES", 7)
    monkeypatch.setattr(module.os, "pwrite", nearly_full)
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match="No space left"):
        write_at(file.fileno(), bytes(20), 0)
