"""What became of every row: counts by reason, with examples a person can look up."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from hidden_states.errors import DataError

_EXAMPLES = 5


@dataclass
class Reason:
    """Rows that share a reason. `examples` are `file:line: what exactly`, the first few."""

    count: int = 0
    unusable: bool = False
    examples: list[str] = field(default_factory=list)

    def add(self, where: str, detail: str) -> None:
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{where}: {detail}")


class Report:
    """Filled while rows are read.

    Attributes:
        rows: rows seen, usable or not.
        dropped: by reason, rows that gave no sample.
        notes: by remark, rows that gave one but deserve a look.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.dropped: dict[str, Reason] = {}
        self.notes: dict[str, Reason] = {}
        self._tokens, self._learned = array("q"), array("q")

    def drop(self, reason: str, where: str, detail: str, *, unusable: bool = False) -> None:
        entry = self.dropped.setdefault(reason, Reason(unusable=unusable))
        entry.add(where, detail)

    def note(self, remark: str, where: str, detail: str) -> None:
        self.notes.setdefault(remark, Reason()).add(where, detail)

    def count(self, tokens: int, learned: int) -> None:
        """Count a usable row."""
        self._tokens.append(tokens)
        self._learned.append(learned)

    @property
    def usable(self) -> int:
        return len(self._tokens)

    @property
    def unusable(self) -> int:
        """Rows that are faulty; not those left out by choice (duplicates, too long, nothing to learn)."""
        return sum(reason.count for reason in self.dropped.values() if reason.unusable)

    @property
    def tokens(self) -> int:
        return sum(self._tokens)

    @property
    def learned(self) -> int:
        return sum(self._learned)

    def length(self, share: float) -> int:
        """The length in tokens that `share` of the usable rows do not exceed; 0 without rows."""
        lengths = sorted(self._tokens)
        return lengths[min(len(lengths) - 1, int(share * len(lengths)))] if lengths else 0

    def check(self, max_bad_share: float) -> None:
        """End the run when too many rows are unusable.

        Raises:
            DataError: a larger share than allowed is.
        """
        if self.unusable > max_bad_share * self.rows:
            raise DataError(
                "conversations",
                f"{self.unusable} of {self.rows} rows are unusable: {self.in_words(unusable_only=True)}",
                f"at most a share of {max_bad_share:g}",
                "Correct the rows, or raise data.max_bad_share.",
            )

    def in_words(self, *, unusable_only: bool = False) -> str:
        """`3 refused by the chat template (a.jsonl:4: ...); 1 duplicate (...)`."""
        reasons = ((name, r) for name, r in self.dropped.items() if r.unusable or not unusable_only)
        by_count = sorted(reasons, key=lambda item: (-item[1].count, item[0]))
        return "; ".join(f"{reason.count} {name} ({reason.examples[0]})" for name, reason in by_count)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for summaries and artifacts."""

        def table(reasons: dict[str, Reason]) -> dict[str, Any]:
            return {name: {"count": r.count, "examples": r.examples} for name, r in sorted(reasons.items())}

        return {
            "rows": self.rows,
            "usable": self.usable,
            "unusable": self.unusable,
            "tokens": self.tokens,
            "learned_tokens": self.learned,
            "learned_share": round(self.learned / self.tokens, 4) if self.tokens else 0.0,
            "length": {"median": self.length(0.5), "p95": self.length(0.95), "longest": self.length(1.0)},
            "dropped": table(self.dropped),
            "notes": table(self.notes),
        }
