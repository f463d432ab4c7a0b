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
from typing import Any, NamedTuple

from eyas_capture import contract


class Part(NamedTuple):
    """Prompt rows [start, stop): they begin at row `first` of `rows`, a `rows.PassRows`."""

    start: int
    stop: int
    rows: Any
    first: int


@dataclass(eq=False)
class Assembly:
    """The rows of one request so far, in ascending parts.

    `base` is the prompt position of the first row that can be kept. `prompt` is the `rows.PassRows` that has the prompt
    itself, and where. `fence` tells when the last copy has landed.
    """

    counter: int
    request_id: str
    tokens: array
    base: int
    nbytes: int = 0
    unfit: str | None = None
    prompt: tuple[Any, int] | None = None
    parts: list[Part] = field(default_factory=list)
    fence: Any = None

    def new(self, start: int, stop: int) -> int | None:
        """Where in prompt rows [start, stop), which a pass has computed, those begin that are new; None if none is.

        Rows below `base` come only when a request was retracted after a cache hit and the cache was emptied since. They
        are not kept: the dump stays incomplete, as it was going to be.
        """
        at = max(start, self.parts[-1].stop if self.parts else self.base)
        return at if at < stop else None

    @property
    def places(self) -> list[Any]:
        """Every `rows.PassRows` that has something of this request, the prompt's first."""
        rows = [part.rows for part in self.parts]
        return list(dict.fromkeys([self.prompt[0], *rows] if self.prompt else rows))

    @property
    def ended(self) -> bool:
        """The prompt's last row is here, so no further pass will add any."""
        return bool(self.parts) and self.parts[-1].stop == len(self.tokens)

    @property
    def row_count(self) -> int:
        """R, the rows captured."""
        return sum(part.stop - part.start for part in self.parts)

    @property
    def from_cache(self) -> int:
        """Prompt tokens before the last captured row that no pass computed."""
        return self.parts[-1].stop - self.row_count if self.parts else self.base

    def reason(self) -> str | None:
        """Why the dump of an ended prefill is incomplete; None when every row is there, once and in order."""
        if self.unfit:
            return self.unfit
        starts, stops = [part.start for part in self.parts], [part.stop for part in self.parts]
        return None if [0, *stops] == [*starts, len(self.tokens)] else contract.PREFIX_CACHE
