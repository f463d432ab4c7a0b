"""Sums of parts make the sum of the whole."""

import zlib
from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from hidden_states.crc32 import crc32_file, crc32_joined


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_the_sum_of_a_whole_comes_from_the_sums_of_its_parts(parts: list[bytes]) -> None:
    joined = reduce(lambda crc, part: crc32_joined(crc, zlib.crc32(part), len(part)), parts, 0)
    assert joined == zlib.crc32(b"".join(parts))


@given(st.binary(max_size=64), st.integers(0, 1 << 22))
def test_a_long_second_part_is_no_other_case(first: bytes, zeros: int) -> None:
    second = bytes(zeros)
    assert crc32_joined(zlib.crc32(first), zlib.crc32(second), zeros) == zlib.crc32(first + second)


def test_a_file_larger_than_a_block_is_summed_whole(tmp_path) -> None:
    data = bytes(range(256)) * ((9 << 20) // 256) + b"end"
    (tmp_path / "file").write_bytes(data)
    assert crc32_file(tmp_path / "file") == zlib.crc32(data)
