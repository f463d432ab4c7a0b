"""Chunks of a prefill put together."""

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from eyas_capture import contract
from eyas_capture.spans import Assembly, Part


def begun(tokens: int, base: int = 0) -> Assembly:
    return Assembly(0, "r", array("q", range(tokens)), base=base)


def take(assembly: Assembly, start: int, stop: int) -> range:
    """The rows of a pass that are kept."""
    at = assembly.new(start, stop)
    if at is None:
        return range(0)
    assembly.parts.append(Part(at, stop, rows=None, first=0))
    return range(at, stop)


@given(st.data())
def test_chunks_in_a_row_cover_the_prompt_exactly_once(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 50))
    base = data.draw(st.integers(0, tokens - 1))
    edges = sorted({base, tokens, *data.draw(st.lists(st.integers(base, tokens), max_size=6))})
    assembly = begun(tokens, base)
    rows: list[int] = []
    for start, stop in pairwise(edges):
        assert not assembly.ended
        rows += take(assembly, start, stop)
    assert rows == list(range(base, tokens))
    assert assembly.ended and assembly.row_count == tokens - base and assembly.from_cache == base
    assert assembly.reason() == (contract.PREFIX_CACHE if base else None)


@given(st.data())
def test_rows_computed_again_after_a_retraction_are_kept_once(data: st.DataObject) -> None:
    """Whatever passes come, no row is taken twice and rows stay in the prompt's order."""
    tokens = data.draw(st.integers(1, 40))
    assembly = begun(tokens)
    taken: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, tokens - 1))
        taken += take(assembly, start, data.draw(st.integers(start + 1, tokens)))
    assert taken == sorted(set(taken))
    assert taken == [row for part in assembly.parts for row in range(part.start, part.stop)]
    assert assembly.row_count == len(taken)


def test_a_gap_is_told_from_the_missing_end() -> None:
    """Rows 32 to 47 came from the cache after a retraction; the end of the prompt was not computed yet."""
    assembly = begun(100)
    take(assembly, 0, 32)
    take(assembly, 48, 64)
    assert assembly.from_cache == 16
    assert not assembly.ended and assembly.reason() == contract.PREFIX_CACHE


def test_an_unfit_request_is_never_complete() -> None:
    assembly = begun(4)
    assembly.unfit = contract.ADAPTER
    take(assembly, 0, 4)
    assert assembly.ended and assembly.reason() == contract.ADAPTER
