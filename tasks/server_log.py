"""SGLang's log, as lines of the run's own: what it is doing while it loads, and what goes wrong. Not the flood."""

import re
from collections.abc import Callable

MOST = 40  # lines of a start; the whole log is in the run's folder
STAGES = (
    r"load weight (begin|end)", r"weights? loaded", r"loading .*checkpoint shards", r"memory pool (begin|end)",
    r"kv cache is allocated", r"capture .*graph", r"max_total_num_tokens", r"ready to roll", r"eyas: ",
)  # fmt: skip
TROUBLE = (r"\berror\b", r"\w+error\b", r"traceback", r"exception", r"out of memory", r"killed")
_WORTH = re.compile("|".join((*STAGES, *TROUBLE)), re.IGNORECASE)
_NOISE = re.compile(r"ignore import error|^server_args=|userwarning|warnings\.warn", re.IGNORECASE)
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")  # `[2026-11-30 00:30:31 TP0]`
_BAR = re.compile(r"\d+%\|.*\|")


class ServerLog:
    """Passes on lines that are worth a person's time, each once, and at most so many."""

    def __init__(self, say: Callable[[str], None], name: str, most: int = MOST) -> None:
        self._say, self._name, self._left = say, name, most
        self._said: set[str] = set()

    def line(self, text: str) -> None:
        """One line of the server's output."""
        words = _PREFIX.sub("", text).strip()
        worth = _WORTH.search(words) and not _NOISE.search(words) and not _BAR.search(words)
        if not worth or words in self._said or not self._left:
            return
        self._said.add(words)
        self._left -= 1
        more = "" if self._left else " (further lines only in its own log)"
        self._say(f"{self._name}: {words[:300]}{more}")
