"""The two JSON files of a dump, read with distrust: who wrote it, and what it says it holds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_capture import contract
from hidden_states.errors import DumpError


class BadDump(DumpError):
    """A dump failed a check.

    Attributes:
        check: the check's name, one per way a dump can be wrong; listed in `validate`.
    """

    def __init__(self, check: str, where: str, found: str, expected: str | None = None, do: str = "") -> None:
        self.check = check
        super().__init__(f"{where} [{check}]", found, expected, do)
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.check, self.where, self.found, self.expected, self.do)


@dataclass(frozen=True)
class Writer:
    """One writing process, from its writer.json. See `contract` for the fields.

    A writer that refused to capture may not know the model's facts: they are None then, and its lists empty.
    """

    writer_id: str
    pid: int
    pid_start_time: int | None
    host: str
    started_at: str
    dp_rank: int | None
    tp_size: int | None
    plugin_version: str | None
    sglang_version: str | None
    model_path: str | None
    config_sha256: str | None
    architecture: str | None
    dtype: str | None
    hidden_size: int | None
    blocks: int | None
    after_block: tuple[int, ...]
    capture_points: tuple[int, ...]
    final_norm: str | None
    mode: str | None
    flags: dict[str, Any]
    totals: dict[str, Any]
    state: str
    refused: tuple[str, ...]

    @property
    def next_counter(self) -> int:
        """The number the next captured prefill gets, as of the last time the writer said so (about a second ago)."""
        captured = self.totals.get("captured", 0)
        return captured if isinstance(captured, int) else 0


@dataclass(frozen=True)
class Record:
    """One dump's record.json.

    Attributes:
        tokens: S, the prompt's length as the server saw it.
        spans: prompt rows [start, stop) that were captured, ascending.
        prefix_cached: prompt tokens served from the prefix cache, hence not captured.
        tokens_sha256: of the prompt.
        checksums: by tensor name.
    """

    counter: int
    request_id: str
    writer_id: str
    tokens: int
    spans: tuple[tuple[int, int], ...]
    prefix_cached: int
    tokens_sha256: str
    checksums: dict[str, str]
    written_at: str
    complete: bool
    incomplete_reason: str | None

    @property
    def rows(self) -> int:
        """R, the rows captured."""
        return sum(stop - start for start, stop in self.spans)


_NUMBER_OR_NONE, _TEXT_OR_NONE = (int, type(None)), (str, type(None))
_LIST_OR_NONE, _DICT_OR_NONE = (list, type(None)), (dict, type(None))
_WRITER_TYPES: dict[str, Any] = {
    "writer_id": str, "pid": int, "pid_start_time": _NUMBER_OR_NONE, "host": str, "started_at": str,
    "dp_rank": _NUMBER_OR_NONE, "tp_size": _NUMBER_OR_NONE, "plugin_version": _TEXT_OR_NONE,
    "sglang_version": _TEXT_OR_NONE, "model_path": _TEXT_OR_NONE, "config_sha256": _TEXT_OR_NONE,
    "architecture": _TEXT_OR_NONE, "dtype": _TEXT_OR_NONE, "hidden_size": _NUMBER_OR_NONE, "blocks": _NUMBER_OR_NONE,
    "after_block": _LIST_OR_NONE, "capture_points": _LIST_OR_NONE, "final_norm": _TEXT_OR_NONE, "mode": _TEXT_OR_NONE,
    "flags": _DICT_OR_NONE, "totals": _DICT_OR_NONE, "state": str, "refused": list,
}  # fmt: skip
_RECORD_TYPES: dict[str, Any] = {
    "counter": int, "request_id": str, "writer_id": str, "tokens": int, "spans": list, "prefix_cached": int,
    "tokens_sha256": str, "checksums": dict, "written_at": (str, int, float), "complete": bool,
    "incomplete_reason": _TEXT_OR_NONE,
}  # fmt: skip


def read_writer(path: Path) -> Writer:
    """Read a writer.json.

    Raises:
        BadDump: the file cannot be read, or is not what the contract says (`writer-file`, `contract`).
    """
    data = _read(path, "writer-file", _WRITER_TYPES)
    data["flags"], data["totals"] = data["flags"] or {}, data["totals"] or {}
    for key in ("after_block", "capture_points"):
        data[key] = data[key] or []
        if not all(_is_count(block) for block in data[key]):
            raise BadDump("writer-file", str(path), f"`{key}` is {data[key]}", "a list of block numbers")
        data[key] = tuple(data[key])
    data["refused"] = tuple(map(str, data["refused"]))
    return Writer(**data)


def read_record_file(path: Path) -> Record:
    """Read a record.json.

    Raises:
        BadDump: the file cannot be read, or is not what the contract says (`record-file`, `contract`).
    """
    data = _read(path, "record-file", _RECORD_TYPES)
    spans = data["spans"]
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and all(_is_count(place) for place in span)):
            raise BadDump("record-file", str(path), f"a span is {span}", "[start, stop]")
    if not all(isinstance(value, str) for value in data["checksums"].values()):
        raise BadDump("record-file", str(path), "a checksum is not text")
    data["spans"] = tuple((start, stop) for start, stop in spans)
    data["written_at"] = str(data["written_at"])
    return Record(**data)


def _read(path: Path, check: str, types: dict[str, Any]) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise BadDump(check, str(path), f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BadDump(check, str(path), f"not JSON ({error})") from error
    if not isinstance(data, dict):
        raise BadDump(check, str(path), f"a JSON {type(data).__name__}", "an object")
    if data.get("contract") != contract.VERSION:
        raise BadDump(
            "contract",
            str(path),
            f"version {data.get('contract')!r} of the dump format",
            f"version {contract.VERSION}",
            "Install the same release of eyas-capture in the server's environment and in the pipeline's.",
        )
    for key, kind in types.items():
        if key not in data:
            raise BadDump(check, str(path), f"no `{key}` in it")
        value = data[key]
        wrong_bool = isinstance(value, bool) and kind is not bool  # in Python True is an int
        if wrong_bool or not isinstance(value, kind):
            raise BadDump(check, str(path), f"`{key}` is {value!r}")
        if kind is int and value < 0:
            raise BadDump(check, str(path), f"`{key}` is {value}", "not less than 0")
    return {key: data[key] for key in types}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
