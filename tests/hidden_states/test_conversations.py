"""Conversations files: every row is used or named with its line and its reason; a damaged file is never half read."""

import datetime
import gzip
import json
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hidden_states.conversations import BadRow, Conversation, read_conversations
from hidden_states.errors import DataError

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.\u2028"}]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path: Path) -> list[Conversation | BadRow]:
    return list(read_conversations(path, max_bad_share=1.0))


def usable(path: Path) -> list[Conversation]:
    return [row for row in read(path) if isinstance(row, Conversation)]


def bad(path: Path, row: Any) -> BadRow:
    (found,) = read(write(path / "x.jsonl", row))
    assert isinstance(found, BadRow)
    return found


def compress(kind: str, data: bytes) -> bytes:
    match kind:
        case "gz":
            return gzip.compress(data)
        case "zst":
            return zstandard.ZstdCompressor().compress(data)
        case "zst-frames":  # as a parallel compressor, or `cat a.zst b.zst`, leaves it
            half = len(data) // 2
            return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
        case "zst-skipped":  # as pzstd begins a file
            return b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstandard.ZstdCompressor().compress(data)
        case "zst-long":  # --long=31
            long = zstandard.ZstdCompressionParameters(window_log=31)
            stream = zstandard.ZstdCompressor(compression_params=long).compressobj()
            return stream.compress(data) + stream.flush()
        case _:
            return data


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "zst-frames", "zst-skipped", "zst-long"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_packing_bom_and_line_ends_change_nothing(
    kind: str, bom: bytes, end: bytes, last: bool, tmp_path: Path
) -> None:
    lines = [json.dumps({**ROW, "id": n}, ensure_ascii=False).encode() for n in range(5)]
    data = bom + end.join(lines) + (end if last else b"")
    path = tmp_path / "x.jsonl"  # the name says nothing: the content decides
    path.write_bytes(compress(kind, data))
    rows = usable(path)
    assert [row.source for row in rows] == [f"x.jsonl:{n}" for n in range(1, 6)]
    assert all(row.messages == ROW["messages"] for row in rows)  # also the line separator inside the text


@pytest.mark.parametrize("kind", ["gz", "zst", "zst-frames"])
def test_a_packed_file_that_ends_early_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    whole = compress(kind, b"".join(json.dumps({**ROW, "id": n}).encode() + b"\n" for n in range(200)))
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match="damaged or ends early"):
        read(path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_is_read_up_to_the_cut_and_the_rest_is_named(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    whole = b"".join(json.dumps({**ROW, "id": n}).encode() + b"\n" for n in range(4))
    path.write_bytes(whole[:cut])
    complete, rest = whole[:cut].count(b"\n"), whole[:cut].rpartition(b"\n")[2]
    if not cut:
        with pytest.raises(DataError, match="no rows"):
            read(path)
        return
    rows = read(path)
    whole_last = bool(rest) and rest in whole.split(b"\n")
    assert sum(isinstance(row, Conversation) for row in rows) == complete + whole_last
    assert [row.where for row in rows if isinstance(row, BadRow)] == (
        [f"x.jsonl:{complete + 1}"] if rest and not whole_last else []
    )


def test_parquet_rows_are_the_same_as_json_lines(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(600)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    as_text = [{"messages": json.dumps(row["messages"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(as_text), tmp_path / "text.parquet")
    expected = [row.id for row in usable(write(tmp_path / "x.jsonl", *rows))]
    assert [row.id for row in usable(tmp_path / "x.parquet")] == expected
    assert [row.id for row in usable(tmp_path / "text.parquet")] == expected
    assert usable(tmp_path / "x.parquet")[-1].source == "x.parquet:600"


def test_parquet_columns_that_are_null_do_not_become_fields(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi", "tool_calls": None, "name": None},
        {"role": "assistant", "content": "Hello.", "tool_calls": None, "name": None},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": None}]), tmp_path / "x.parquet")
    (row,) = usable(tmp_path / "x.parquet")
    assert row.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "no rows in it"),
        (b"\n \n\r\n", "no rows in it"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (json.dumps([ROW, ROW]).encode(), "one JSON array"),
        (json.dumps([ROW, ROW], indent=1).encode(), "one JSON array"),
        (b"PAR1 and no more", "not a readable Parquet file"),
        (b"\x1f\x8b and no more", "damaged"),
    ],
    ids=["empty", "blank", "utf-16", "array", "array-indented", "parquet", "gzip"],
)
def test_a_file_that_is_not_conversations_is_refused(content: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=found):
        read(path)


@pytest.mark.skipif(any(shutil.which(tool) is None for tool in ("jq", "zcat", "zstdcat", "iconv")), reason="no jq")
@pytest.mark.parametrize("kind", ["plain", "gz", "zst", "utf-16"])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.lines.jsonl", "x.jsonl.gz", "x", "two words'.jsonl"])
def test_the_command_that_converts_a_file_works_and_harms_no_file(kind: str, name: str, tmp_path: Path) -> None:
    """It is pasted by people: `>` empties its target before the reader starts."""
    utf16 = kind == "utf-16"
    path = tmp_path / name
    text = json.dumps(ROW) if utf16 else json.dumps([ROW, ROW], indent=1)
    path.write_bytes(text.encode("utf-16") if utf16 else compress(kind, text.encode()))
    other = tmp_path / f"{name.partition('.')[0]}.{'utf8' if utf16 else 'lines'}.jsonl"
    if other != path:
        other.write_text("another file of the user's")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(DataError) as refusal:
        read(path)
    command, _, rest = refusal.value.do.removeprefix("Convert it: ").partition(" and name that file")
    assert "data.conversations" in rest
    subprocess.run(["bash", "-c", command], check=True, cwd="/")  # full paths: it works from any folder
    assert {file: file.read_bytes() for file in before} == before
    (made,) = set(tmp_path.iterdir()) - set(before)
    assert len(usable(made)) == (1 if utf16 else 2)


def test_a_missing_file_a_folder_and_foreign_columns_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read(path)
    pq.write_table(pa.Table.from_pylist([{"text": "Hi"}]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="columns text"):
        read(tmp_path / "x.parquet")


def test_the_line_is_named_and_strictness_and_share_end_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *[ROW] * 19)
    path.write_text(path.read_text() + "{broken\n")
    assert [row.reason for row in read(path) if isinstance(row, BadRow)] == [
        "not JSON on line 20: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    ]
    assert len(list(read_conversations(path, max_bad_share=0.05))) == 20
    with pytest.raises(DataError, match=r"1 of 20 rows are unusable \(x\.jsonl:20: not JSON on line 20"):
        list(read_conversations(path, max_bad_share=0.04))
    with pytest.raises(DataError, match="not JSON on line 20"):
        list(read_conversations(path, strict=True))


def test_the_same_conversation_has_the_same_id_wherever_it_lies(tmp_path: Path) -> None:
    as_sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.\u2028"}]}
    one, other = usable(write(tmp_path / "x.jsonl", {**ROW, "id": "a"}, as_sharegpt))
    assert one.id == other.id


# --- rows ------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("messages", "conversations", "prompt", "completion", "system", "tools")
TURNS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system", "gpt"]) | JSON,
            "content": JSON,
            "tool_calls": JSON,
            "reasoning_content": JSON,
            "from": JSON,
            "value": JSON,
        },
    ),
    max_size=3,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.fixed_dictionaries({}, optional={f: TURNS | JSON for f in FIELDS}) | JSON)
def test_no_row_whatever_it_holds_is_more_than_a_bad_row(row: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROW, row)
    first, second = read(path)
    assert isinstance(first, Conversation)
    if isinstance(second, Conversation):
        assert all(isinstance(message["content"], str) for message in second.messages)
        assert all(message["role"] in ("system", "user", "assistant", "tool") for message in second.messages)


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        ({"text": "Hi"}, "no known shape", "its keys (text)"),
        ({"messages": []}, "no messages", "no messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role", "'narrator'"),
        ({"messages": [{"content": "x"}]}, "no role", "message 1"),
        ({"messages": [{"role": "user", "content": None}]}, "no content", "message 1 (user)"),
        ({"messages": [{"role": "user", "content": 5}]}, "no content", "a number, not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "not only text",
            "'input_audio'",
        ),
        (
            {"messages": [{"role": "gpt", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "tool call not understood",
            "'f' of message 1 are not JSON",
        ),
        ({"messages": [{"role": "gpt", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]}]},
         "tool call not understood", "are not JSON"),
        ({"system": "Be brief.", "messages": [{"role": "system", "content": "Be long."}, *ROW["messages"]]},
         "two system prompts", "another text"),
        ({"prompt": "half of a pair: \ud83d"}, "not Unicode", "messages[0].content holds the lone surrogate U+D83D"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_understood_says_what_it_was(row: Any, kind: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (found,) = read(path)
    assert isinstance(found, BadRow)
    assert (found.where, found.kind) == ("x.jsonl:1", kind)
    assert reason in found.reason


PAIRS = {"role": "from", "content": "value", "reasoning_content": "reasoning"}


def test_a_key_without_a_value_hides_no_other_one(tmp_path: Path) -> None:
    """Parquet, and what was made of it, gives every row the keys of all of them."""
    call = {"function": {"name": "f", "arguments": None, "parameters": {"x": 1}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."},
        {"role": "assistant", "content": "", "tool_calls": [call, {"function": None, "name": "g", "arguments": {}}]},
    ]  # fmt: skip
    empty = dict.fromkeys([*PAIRS, *PAIRS.values()])
    other = [{**empty, **{PAIRS.get(key, key): value for key, value in turn.items()}} for turn in turns]
    same = [{**empty, **turn} for turn in turns]
    path = write(tmp_path / "x.jsonl", *({"messages": messages} for messages in (turns, other, same)))
    made = [row.messages for row in usable(path)]
    assert made[0] == made[1] == made[2] and made[0][1]["reasoning_content"] == "Greet."
    calls = [call["function"] for call in made[0][2]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]


@pytest.mark.parametrize("level", [101, 300, 450, 600, 800, 950])
@pytest.mark.parametrize("place", ["tools", "arguments"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_row_of_too_many_levels_is_a_bad_one(level: int, place: str, as_text: bool, tmp_path: Path) -> None:
    """Shallow enough for the JSON reader, and too deep for what copies and renders it."""
    deep = '{"a":' * level + "1" + "}" * level
    value = f"[{deep}]" if place == "tools" else deep
    value = json.dumps(value) if as_text else value
    call = f'[{{"name": "f", "arguments": {value}}}]' if place == "arguments" else "[]"
    tools = value if place == "tools" else "[]"
    line = f'{{"messages": [{{"role": "gpt", "content": "x", "tool_calls": {call}}}], "tools": {tools}}}'
    (tmp_path / "x.jsonl").write_text(line)
    (found,) = read(tmp_path / "x.jsonl")
    assert isinstance(found, BadRow) and found.where == "x.jsonl:1"
    assert found.kind in ("nested too deeply", "not JSON", "tool call not understood")


@pytest.mark.parametrize("value", [b"\xff", datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1), Decimal("1.5")])
def test_what_parquet_has_and_json_has_not_is_a_bad_row(value: Any, tmp_path: Path) -> None:
    tools = [None, [{"name": "f", "since": value}]]
    pq.write_table(pa.table({"messages": [ROW["messages"]] * 2, "tools": tools}), tmp_path / "x.parquet")
    first, second = read(tmp_path / "x.parquet")
    assert isinstance(first, Conversation) and isinstance(second, BadRow)
    assert second.where == "x.parquet:2" and "tools[0].function.since holds a " in second.reason


def test_text_in_parquet_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    offsets, data = (0).to_bytes(4, "little") + (2).to_bytes(4, "little") + (4).to_bytes(4, "little"), b"Hi\xff\xfe"
    text = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    pq.write_table(pa.table({"prompt": pa.chunked_array([text, pa.array(["Bye"])])}), tmp_path / "x.parquet")
    first, second, third = read(tmp_path / "x.parquet")
    assert isinstance(first, Conversation) and isinstance(third, Conversation)
    assert isinstance(second, BadRow) and (second.where, second.kind) == ("x.parquet:2", "not text")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_in_another_encoding_is_refused_by_it(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(json.dumps(ROW).encode(encoding))
    with pytest.raises(DataError, match=f"encoded in {encoding.upper()}.*iconv -f {encoding.upper()}"):
        read(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "tools": [{"name": "f", "size": 1e999}]}',
        b'{"prompt": "\xff"}',
        b"null",
        b"17",
        b'"text"',
    ],
    ids=["deep", "huge-number", "nan", "infinite", "not-utf8", "null", "number", "string"],
)
def test_a_line_that_is_not_a_row_is_named_not_fatal(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n" + json.dumps(ROW).encode() + b"\n")
    first, second, third = read(path)
    assert isinstance(first, Conversation) and isinstance(third, Conversation)
    assert isinstance(second, BadRow) and second.where == "x.jsonl:2"


def test_tool_calls_are_what_the_server_would_hand_to_the_template(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    tools = [{"name": "weather", "parameters": {}}]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "-3 C"},
    ]
    as_sharegpt = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "-3 C"},
    ]
    rows = ({"messages": messages, "tools": tools}, {"conversations": as_sharegpt, "tools": json.dumps(tools)})
    one, other = usable(write(tmp_path / "x.jsonl", *rows))
    for row in (one, other):
        made = row.messages[1]["tool_calls"][0]["function"]
        assert (row.messages[1]["content"], made) == ("", {"name": "weather", "arguments": {"city": "Oslo"}})
        assert [message["role"] for message in row.messages] == ["user", "assistant", "tool"]
        assert row.tools == [{"type": "function", "function": tools[0]}]


def test_prompts_completions_and_system_texts_become_turns(tmp_path: Path) -> None:
    rows = (
        {"prompt": "Hi"},
        {"prompt": "Hi", "completion": "Hello."},
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]},
    )
    shapes = [[message["role"] for message in row.messages] for row in usable(write(tmp_path / "x.jsonl", *rows))]
    assert shapes == [["user"], ["user", "assistant"], ["system", "user"]]
