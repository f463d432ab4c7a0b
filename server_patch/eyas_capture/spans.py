"""One request's prefill, put together from the passes that computed it.

    prompt        0 ........ 32 ........ 96 ........ 130 = tokens
    from cache    |##########|
    chunk 1                   |==========|                     span [32, 96)
    chunk 2                               |===========|        span [96, 130)

A chunk starts where the request's own earlier chunk ended. Anything else is either a prefix-cache hit (a gap: those
rows are nowhere) or rows computed again after a retraction (an overlap: the rows from the first time are kept).
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from eyas_capture import contract


@dataclass(frozen=True)
class Take:
    """Which rows of a pass are new: rows [skip, skip + count) of this request's chunk go to rows [at, at + count)."""

    skip: int
    at: int
    count: int


@dataclass(eq=False)
class Assembly:
    """The rows of one request so far.

    `base` is the prompt position of row 0 of the buffers, which have room for the rest of the prompt. `fence` tells
    when the last copy has landed.
    """

    counter: int
    request_id: str
    tokens: array
    base: int
    nbytes: int = 0
    unfit: str | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    buffers: Any = None  # rows.Buffers
    fence: Any = None

    def take(self, start: int, stop: int) -> Take | None:
        """Record that a pass computed prompt rows [start, stop); the part of them that is new, or None.

        Rows below `base` come only when a request was retracted after a cache hit and the cache was emptied since. They
        have no place in the buffers: the dump stays incomplete, as it was going to be.
        """
        at = max(start, self.spans[-1][1] if self.spans else self.base)
        if stop <= at:
            return None
        self.spans.append((at, stop))
        return Take(skip=at - start, at=at - self.base, count=stop - at)

    @property
    def ended(self) -> bool:
        """The prompt's last row is here, so no further pass will add any."""
        return bool(self.spans) and self.spans[-1][1] == len(self.tokens)

    @property
    def row_count(self) -> int:
        """R, the rows captured."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def from_cache(self) -> int:
        """Prompt tokens before the last captured row that no pass computed."""
        return self.spans[-1][1] - self.row_count if self.spans else self.base

    def reason(self) -> str | None:
        """Why the dump of an ended prefill is incomplete; None when every row is there."""
        if self.unfit:
            return self.unfit
        return contract.PREFIX_CACHE if self.row_count < len(self.tokens) else None
