"""One row of a conversations file, in whatever shape it was published, as OpenAI messages.

Nothing is guessed: a role, a part or a tool call that is not understood makes the row a bad one, with its reason.
"""

import json
import math
from typing import Any, NoReturn

_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "ai": "assistant", "bot": "assistant", "claude": "assistant", "gemini": "assistant",
    "chatbot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "tool_result": "tool", "ipython": "tool",
}  # fmt: skip
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: the value is the call as JSON
_TEXT_PARTS = ("text", "input_text", "output_text")
_WORDS = {
    "NoneType": "null", "str": "string", "int": "number", "float": "number", "bool": "boolean", "dict": "object",
}  # fmt: skip
_KEPT = ("name", "tool_call_id")
_DEEPEST = 100  # levels of objects in objects; a copy or a rendering of some hundred ends in a RecursionError


class RowError(ValueError):
    """A row cannot be used. `kind` is a short phrase to count by."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")


def read_row(row: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of a row.

    Raises:
        RowError: the row has no known shape, or a part of it is not understood.
    """
    if not isinstance(row, dict):
        _fail("no known shape", f"the row is a {_word(row)}, not an object")
    messages = [_message(turn, f"message {i}") for i, turn in enumerate(_turns(row), start=1)]
    if not messages:
        _fail("no messages", "the conversation has no messages")
    if row.get("system") is not None:
        system = {"role": "system", "content": _content(row["system"], "`system`")}
        if messages[0]["role"] != "system":
            messages.insert(0, system)
        elif messages[0]["content"] != system["content"]:
            _fail("two system prompts", "`system` is another text than message 1, which is a system prompt too")
    tools = _tools(row.get("tools"))
    _check_text(messages, "messages")
    _check_text(tools, "tools")
    return messages, tools


def _turns(row: dict[str, Any]) -> list[Any]:
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            turns = _parsed(row[key], f"`{key}`")
            if not isinstance(turns, list):
                _fail("no known shape", f"`{key}` is a {_word(turns)}, not a list")
            return turns
    prompt = row.get("prompt")
    if prompt is None:
        keys = ", ".join(sorted(map(str, row))) or "none"
        _fail("no known shape", f"none of `messages`, `conversations`, `prompt` among its keys ({keys})")
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    completion = row.get("completion")
    if completion is not None:
        turns = turns + (completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}])
    return turns


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        _fail("no known shape", f"{where} is a {_word(turn)}, not an object")
    name = _said(turn, "role", "from")
    if not isinstance(name, str):
        _fail("no role", f"{where} has no role (`role` or `from`)")
    role = name.strip().lower()
    value = _said(turn, "content", "value")
    if role in _CALL_ROLES:
        call = _parsed(value, where)
        calls = call if isinstance(call, list) else [call]
        return {"role": "assistant", "content": "", "tool_calls": [_call(c, where) for c in calls]}
    if role not in _ROLES:
        _fail("unknown role", f"{where} has the role {name!r}, which is not known")
    message: dict[str, Any] = {"role": _ROLES[role], "content": _content(value, where)}
    for key in _KEPT:
        if turn.get(key) is not None:
            message[key] = turn[key]
    if message["role"] == "assistant":
        reasoning = _said(turn, "reasoning_content", "reasoning")
        if reasoning is not None:
            message["reasoning_content"] = _content(reasoning, f"reasoning of {where}")
        if turn.get("tool_calls"):
            calls = _parsed(turn["tool_calls"], where)
            if not isinstance(calls, list):
                _fail("tool call not understood", f"`tool_calls` of {where} is a {_word(calls)}, not a list")
            message["tool_calls"] = [_call(call, where) for call in calls]
    if message["content"] is None:
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            _fail("no content", f"{where} ({message['role']}) has no content")
        message["content"] = ""  # as SGLang hands it to the template
    return message


def _content(value: Any, where: str) -> str | None:
    """Text of a content field; a list of parts is joined, anything that is not text is refused."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        _fail("no content", f"the content of {where} is a {_word(value)}, not text")
    texts = []
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else _word(part)
        if kind not in _TEXT_PARTS:
            _fail("not only text", f"{where} has a part of type {kind!r}; the target reads text only")
        if not isinstance(part.get("text"), str):
            _fail("no content", f"a text part of {where} has no text")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: what SGLang hands to the template (templates that print strings as
    they are would otherwise get quotes inside quotes)."""
    function = call if isinstance(call, dict) and call.get("function") is None else _said(call, "function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _fail("tool call not understood", f"a tool call of {where} names no function")
    arguments = _said(function, "arguments", "parameters")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            _fail(
                "tool call not understood",
                f"the arguments of the tool call {function['name']!r} of {where} are not JSON",
            )
    if arguments is not None and not isinstance(arguments, dict):
        _fail(
            "tool call not understood",
            f"the arguments of the tool call {function['name']!r} of {where} are not an object",
        )
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return made if call.get("id") is None else {"id": call["id"], **made}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(value, "`tools`")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _fail("tools not understood", "`tools` is not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _parsed(value: Any, where: str) -> Any:
    """Parquet files often keep nested fields as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except (ValueError, RecursionError):
        _fail("not JSON", f"{where} is text that is not JSON")


def _said(turn: Any, *keys: str) -> Any:
    """The value under the first of these keys that has one. Parquet gives every row of a column the same keys."""
    found = (turn.get(key) for key in keys) if isinstance(turn, dict) else ()
    return next((value for value in found if value is not None), None)


def parse_json(text: str) -> Any:
    """Raises ValueError or RecursionError for what is none, NaN and Infinity too."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_text(value: Any, where: str, level: int = 0) -> None:
    """Refuse text no tokenizer can take, and values no JSON can have: JSON can spell half of a surrogate pair, UTF-8
    cannot; Parquet has dates and bytes."""
    if level > _DEEPEST:
        _fail("nested too deeply", f"{where[:40]}... is nested in more than {_DEEPEST} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            _fail(
                "not Unicode",
                f"{where} holds the lone surrogate U+{ord(value[error.start]):04X}, which is no character",
            )
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key, where)
            _check_text(inner, f"{where}.{key}", level + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_text(inner, f"{where}[{i}]", level + 1)
    elif not isinstance(value, int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        found = repr(value) if isinstance(value, float) else f"a {_word(value)}"
        _fail("not JSON", f"{where} holds {found}, which JSON does not have")


def _word(value: Any) -> str:
    names = {
        "NoneType": "null",
        "str": "string",
        "int": "number",
        "float": "number",
        "bool": "boolean",
        "dict": "object",
    }
    return names.get(type(value).__name__, type(value).__name__)


def _fail(kind: str, reason: str) -> NoReturn:
    raise RowError(kind, reason)
