"""What a writer has done so far: the `totals` of writer.json."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Totals:
    """captured = complete + sum(incomplete) + sum(lost) + pending, at any moment. Guarded by the writer's lock."""

    captured: int = 0
    complete: int = 0
    incomplete: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    queue_bytes: int = 0
    queue_peak_bytes: int = 0
    memory_peak_bytes: int = 0
    blocked_seconds: float = 0.0
    unseen_passes: int = 0

    def as_json(self) -> dict[str, Any]:
        """In the form of contract.TOTALS_KEYS."""
        ended = self.complete + self.incomplete.total() + self.lost.total()
        return {
            "captured": self.captured,
            "complete": self.complete,
            "incomplete": dict(self.incomplete),
            "lost": dict(self.lost),
            "pending": self.captured - ended,
            "bytes": self.bytes,
            "queue_bytes": self.queue_bytes,
            "queue_peak_bytes": self.queue_peak_bytes,
            "memory_peak_bytes": self.memory_peak_bytes,
            "blocked_seconds": round(self.blocked_seconds, 3),
            "unseen_passes": self.unseen_passes,
        }
