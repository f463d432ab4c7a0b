"""Conversations files: JSONL (plain, gzip or zstandard) and Parquet, in the shapes people publish them.

Every row becomes a `Conversation` in one shape (OpenAI messages) or a `BadRow` that names its file and line.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}       OpenAI
    {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}   ShareGPT
    {"prompt": "..."}                                                              to be answered by the target
"""

import gzip
import hashlib
import itertools
import json
import shlex
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from hidden_states.errors import DataError
from hidden_states.messages import RowError, parse_json, read_row

_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_MARKS = {  # of other encodings; the longer ones begin with the shorter
    b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
_LARGEST_WINDOW = 1 << 31  # of zstandard, as `zstd --long=31` writes it; its own bound is 128 MB
_COLUMNS = ("messages", "conversations", "prompt", "completion", "system", "tools", "domain")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Conversation:
    """One usable row.

    Attributes:
        id: 16 hex digits of the sha256 of the content: the same conversation has the same id in every file.
        source: `file:line` (JSONL) or `file:row` (Parquet), counted from 1.
        messages: OpenAI messages; `content` is text (empty beside tool calls), tool calls' `arguments` are objects.
        tools: JSON schemas of the tools the assistant could call.
        domain: what the row says it is about (`code`, `chat`, ...), where it says so; no part of the id.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = field(default=None)
    domain: str | None = None


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. `kind` is a short phrase to count by, `reason` says what exactly is wrong."""

    where: str
    kind: str
    reason: str


def read_conversations(
    path: Path | str, *, strict: bool = False, max_bad_share: float = 0.05
) -> Iterator[Conversation | BadRow]:
    """Read a file row by row; memory does not grow with the file.

    Args:
        strict: the first bad row ends the reading.
        max_bad_share: more bad rows than this share of the file end the reading, at the file's end.

    Raises:
        DataError: the file is missing, empty, damaged, or not of a known kind; or rows are bad beyond what is allowed.
    """
    path = Path(path)
    total, bad = 0, 0
    first: list[BadRow] = []
    for where, value in _values(path):
        total += 1
        row = value if isinstance(value, BadRow) else _conversation(where, value)
        if isinstance(row, BadRow):
            bad += 1
            first = [*first, row][:3]
            if strict:
                raise DataError(
                    row.where, row.reason, None, "Correct the row, or set data.strict to false to report it and go on."
                )
        yield row
    if total == 0:
        raise DataError(str(path), "no rows in it", "at least one conversation", "Is this the right file?")
    if bad > max_bad_share * total:
        examples = "; ".join(f"{row.where}: {row.reason}" for row in first)
        raise DataError(
            str(path),
            f"{bad} of {total} rows are unusable ({examples})",
            f"at most a share of {max_bad_share:g}",
            "Correct the rows, or raise data.max_bad_share.",
        )


def _conversation(where: str, value: Any) -> Conversation | BadRow:
    try:
        messages, tools = read_row(value)
    except RowError as error:
        return BadRow(where, error.kind, error.reason)
    content = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    domain = value.get("domain")
    return Conversation(
        hashlib.sha256(content.encode()).hexdigest()[:16], where, messages, tools,
        domain if isinstance(domain, str) else None,
    )  # fmt: skip


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """(`file:line`, the row as plain Python values or a BadRow) of every row that is not blank."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror})", "a JSONL or Parquet file") from error
    if encoding := next((name for mark, name in _MARKS.items() if head.startswith(mark)), None):
        convert = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path.resolve()))}"
        raise DataError(str(path), f"encoded in {encoding}", "UTF-8", _other_file(path, "utf8", convert))
    yield from _parquet_values(path) if head == _PARQUET else _json_values(path, head)


def _other_file(path: Path, added: str, command: str) -> str:
    """The advice to convert a file: into one that is not there yet, since `>` empties one that is."""
    stem = path.resolve().with_name(path.name.split(".")[0] or "conversations")
    names = (stem.with_name(f"{stem.name}.{added}{n or ''}.jsonl") for n in itertools.count())
    made = next(name for name in names if not name.exists())
    return f"Convert it: {command} > {shlex.quote(str(made))} and name that file in the recipe's data.conversations."


def _unpacked(path: Path, head: bytes) -> str:
    reader = "zcat" if head[:2] == _GZIP else "zstdcat" if _is_zstd(head) else "cat"
    return f"{reader} {shlex.quote(str(path.resolve()))}"


def _json_values(path: Path, head: bytes) -> Iterator[tuple[str, Any]]:
    number, line = 0, b""
    try:
        for number, line in enumerate(_lines(path, head), start=1):
            where = f"{path.name}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            value = _parse(where, line)
            if line.lstrip()[:1] == b"[" and not isinstance(value, dict) and number == 1:
                raise DataError(
                    str(path),
                    "one JSON array",
                    "one JSON object a line (JSONL)",
                    _other_file(path, "lines", f"{_unpacked(path, head)} | jq -c '.[]'"),
                )
            yield where, value
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            f"{path}:{number + 1}", f"the compressed data is damaged or ends early ({error})", None, "Copy it again."
        ) from error


def _parse(where: str, line: bytes) -> Any:
    number = where.rsplit(":", 1)[1]
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(where, "not UTF-8", f"not UTF-8 on line {number}: byte {error.start} is {line[error.start]:#04x}")
    try:
        return parse_json(text)
    except RecursionError:
        return BadRow(where, "not JSON", f"not JSON on line {number}: nested too deeply")
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        return BadRow(where, "not JSON", f"not JSON on line {number}: {error}")


def _lines(path: Path, head: bytes) -> Iterator[bytes]:
    """Lines without their end. Split at \\n only: str.splitlines() would also split at U+2028 inside a text."""
    if head[:2] == _GZIP:
        with gzip.open(path, "rb") as file:
            yield from _stripped(file)
    elif _is_zstd(head):
        yield from _zstd_lines(path)
    else:
        with path.open("rb") as file:
            yield from _stripped(file)


def _is_zstd(head: bytes) -> bool:
    """A frame, or one to be skipped, with which pzstd begins a file."""
    return head == _ZSTD or (head[1:] == b"\x2a\x4d\x18" and head[0] >> 4 == 5)


def _stripped(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _zstd_lines(path: Path) -> Iterator[bytes]:
    """zstandard's own reader ends quietly where a truncated file does; this one knows whether the frame is whole."""
    rest = b""
    frames = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    with path.open("rb") as file:
        frame, started = frames.decompressobj(), False
        while chunk := file.read(_CHUNK):
            while chunk:
                started = True
                rest += frame.decompress(chunk)
                chunk = frame.unused_data
                if frame.eof:
                    frame, started = frames.decompressobj(), False
                *complete, rest = rest.split(b"\n")
                yield from _stripped(complete)
    if started:
        raise EOFError("the last zstandard frame is not complete")
    if rest:
        yield from _stripped([rest])


def _parquet_values(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            if not {"messages", "conversations", "prompt"} & set(columns):
                raise DataError(
                    str(path),
                    f"columns {', '.join(file.schema_arrow.names)}",
                    "a column `messages`, `conversations` or `prompt`",
                )
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for value in _rows(batch):
                    number += 1
                    where = f"{path.name}:{number}"
                    yield where, BadRow(where, "not text", str(value)) if isinstance(value, ValueError) else value
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}:{number + 1}", f"not a readable Parquet file ({error})") from error


def _rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """A batch's rows as plain values; the error in place of one that has none (text that is not UTF-8)."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except ValueError as error:
                yield error
