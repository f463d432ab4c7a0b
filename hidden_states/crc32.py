"""The CRC32 that S3 servers compute too: of bytes, of a file, and of a whole from the sums of its parts.

ISA-L computes it with the processor's own instructions: 70 GB/s where Python's zlib gives 4.
"""

import functools
from pathlib import Path

from isal.isal_zlib import crc32

from hidden_states.pieces import PIECE_BYTES

__all__ = ["crc32", "crc32_file", "crc32_joined"]

_POLYNOMIAL = 0xEDB88320  # of CRC32, its highest power in the lowest bit, as everything here
_ONE = 1 << 31


def crc32_file(path: Path) -> int:
    """Of all bytes of a file."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            crc = crc32(piece, crc)
    return crc


def crc32_joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC32 of two byte strings one after the other, from theirs.

    A CRC is the remainder of a polynomial over GF(2). What stands before `second_bytes` more bytes is multiplied by
    x^(8 * second_bytes); zlib's start value and final inversion cancel out.
    """
    return _product(first, _power_of_x(8 * second_bytes)) ^ second


@functools.lru_cache(maxsize=16)  # ranges are nearly all of one length
def _power_of_x(exponent: int) -> int:
    """x^exponent, reduced."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(left: int, right: int) -> int:
    """Of two reduced polynomials, reduced."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
