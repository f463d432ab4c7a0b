"""Which characters of a rendered conversation are to be learned, and which tokens these are.

The target writes a reply after the generation prompt and ends with its stop token:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    |--------- before = rendering of the turns so far, with generation prompt --|
                                                             learned: |^^^^^^^^^^^^^^^^|

Both ends must fall between two tokens: the tokens of the text up to there must be the first tokens of the whole, or the
prompt the target gets in serving is another one than it is trained after. (Where reasoning is left out, learning starts
in mid-reply; there it is enough that no token lies across the place.) Where a template has `{% generation %}` blocks,
its author has said which characters the assistant writes; they are taken as they are.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hidden_states.messages import RowError
from hidden_states.render import PROBE, ChatTemplate, Messages, Span, Tools

_CLOSING = re.compile(r"\s*</[^<>\s]{1,40}>\s*")
_THINK_END = "</think>"


@dataclass(frozen=True)
class Rendering:
    """A conversation as text.

    Attributes:
        spans: of the characters to learn, ascending; none when every reply is empty.
        inside: starts of spans that lie in mid-reply.
    """

    text: str
    spans: list[Span]
    inside: frozenset[int] = frozenset()


def learned_spans(
    chat: ChatTemplate, messages: Messages, tools: Tools, learn: Literal["all", "last"], learn_reasoning: bool
) -> Rendering:
    """The rendering of a conversation and what of it is to be learned.

    Raises:
        RowError: the template refuses the conversation, or the replies' places in the rendering are not certain.
    """
    text = chat.text(messages, tools)
    _check_tools(chat, messages, tools)
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in replies:
        _check_reply_text(chat, messages[i], i)
    chosen = [i for i in (replies if learn == "all" else replies[-1:]) if _says_something(messages[i])]
    if not chosen:
        return Rendering(text, [])
    blocks = chat.generation_spans(messages, tools, text)
    if blocks is not None:
        spans = _tagged_spans(chat, messages, tools, text, blocks, replies, chosen)
    else:
        spans = [_reply_span(chat, messages, tools, text, i) for i in chosen]
    starts = {start for start, _ in spans}
    if not learn_reasoning:
        for i in chosen:
            spans = _without(spans, _reasoning(chat, messages, tools, text, i))
    spans = [(start, end) for start, end in spans if start < end]
    return Rendering(text, spans, frozenset(start for start, _ in spans if start not in starts))


def mask_of(chat: ChatTemplate, rendering: Rendering) -> tuple[list[int], list[int]]:
    """Token ids of a rendering and the mask (0/1) of the tokens inside the spans.

    Raises:
        RowError: a span begins or ends inside a token.
    """
    text = rendering.text
    places = [place for span in rendering.spans for place in span]
    ids, *prefixes = chat.ids_of_all([text, *(text[:place] for place in places)])
    counts: list[int] = []
    for place, prefix in zip(places, prefixes, strict=True):
        count = len(prefix) if ids[: len(prefix)] == prefix else None
        if count is None and place in rendering.inside:
            count = chat.tokens_before(text, place)
        if count is None:
            which = "start" if len(counts) % 2 == 0 else "end"
            around = text[max(0, place - 12) : place], text[place : place + 12]
            raise RowError(
                "not token-exact",
                f"the {which} of a reply falls inside a token: the text {around[0]!r} | {around[1]!r} is tokenised "
                "otherwise alone than together",
            )
        counts.append(count)
    mask = [0] * len(ids)
    for start, end in zip(counts[::2], counts[1::2], strict=True):
        mask[start:end] = [1] * (end - start)
    return ids, mask


def _reply_span(chat: ChatTemplate, messages: Messages, tools: Tools, text: str, i: int) -> Span:
    """Span of reply i by prefix differences of renderings."""
    before = chat.text(messages[:i], tools, generation_prompt=True) if i else _before_first(chat, messages, tools)
    _ = chat.opening  # refuses a template whose replies have a header that it cannot write alone
    if not text.startswith(before):
        if i and not text.startswith(chat.text(messages[:i], tools)):
            raise _rewritten(messages[:i], i, "the turns before reply")
        shared = _shared(text, before)
        raise RowError(
            "generation prompt differs",
            f"the generation prompt ends in {before[shared:][:40]!r}, but the template renders message {i + 1} with "
            f"{text[shared : shared + 40]!r} there",
        )
    turn = chat.text(messages[: i + 1], tools)
    end = chat.end_of_reply(turn, len(before))
    if not text.startswith(turn[:end]):
        raise _rewritten(messages[i : i + 1], i, "reply")
    return len(before), end


def _before_first(chat: ChatTemplate, messages: Messages, tools: Tools) -> str:
    """What comes before a reply that opens the conversation. No messages at all cannot be rendered, so the reply is
    rendered with another text and must stand right after the generation prompt."""
    rendered = chat.text([{"role": "assistant", "content": PROBE}], tools)
    before = rendered[: rendered.find(PROBE)]
    if not before.rstrip().endswith(chat.opening.rstrip()):
        raise RowError(
            "generation prompt differs",
            f"the template opens a conversation that starts with the assistant with {before[-40:]!r}, without its "
            f"generation prompt {chat.opening!r}",
        )
    return before


def _tagged_spans(
    chat: ChatTemplate,
    messages: Messages,
    tools: Tools,
    text: str,
    blocks: list[Span],
    replies: list[int],
    chosen: list[int],
) -> list[Span]:
    """The generation blocks of the chosen replies."""
    if len(blocks) == len(replies):
        return [blocks[replies.index(i)] for i in chosen]
    if chosen == replies:
        return blocks
    if chosen == replies[-1:]:  # several blocks a reply, or replies without one: those after the last prompt are its
        before = chat.text(messages[: chosen[0]], tools, generation_prompt=True) if chosen[0] else ""
        if text.startswith(before):
            return [span for span in blocks if span[0] >= len(before)]
    raise RowError(
        "generation blocks unclear",
        f"the template marks {len(blocks)} blocks in {len(replies)} replies: which belongs to which is not certain",
    )


def _reasoning(chat: ChatTemplate, messages: Messages, tools: Tools, text: str, i: int) -> Span | None:
    """Span of the reasoning of reply i, from its first character to the first of the answer; None without reasoning."""
    message = messages[i]
    turn = chat.text(messages[: i + 1], tools)
    if not (message.get("reasoning_content") or "").strip():
        close = turn.rfind(_THINK_END) if _THINK_END in message["content"] else -1
        if close < 0 or not text.startswith(turn[:close]):
            return None
        after = close + len(_THINK_END)
        return close, after + len(turn[after:]) - len(turn[after:].lstrip())
    probed = chat.text([*messages[:i], {**message, "reasoning_content": PROBE}], tools)
    start = probed.rfind(PROBE)
    if start < 0:
        return None  # this template shows no reasoning
    if message["content"].strip():
        answered = chat.text([*messages[:i], {**message, "content": PROBE}], tools)
        end = answered.rfind(PROBE)
    else:
        rest = probed[start + len(PROBE) :]
        closing = _CLOSING.match(rest)
        end = len(turn) - len(rest) + (closing.end() if closing else 0)
    if not start < end or not text.startswith(turn[:end]):
        raise RowError(
            "reasoning not found", f"where the reasoning of message {i + 1} ends in the rendering is not certain"
        )
    return start, end


def _without(spans: list[Span], reasoning: Span | None) -> list[Span]:
    """Spans that touch the reasoning begin after it: opening and closing marks are part of it."""
    if reasoning is None:
        return spans
    first, after = reasoning
    return [(max(start, after), end) if start < after and first < end else (start, end) for start, end in spans]


def _check_tools(chat: ChatTemplate, messages: Messages, tools: Tools) -> None:
    """Refuse tool calls and results that the template leaves out: the target would see another conversation."""
    probed, marks = copy.deepcopy(messages), {}
    for i, message in enumerate(probed):
        for k, call in enumerate(message.get("tool_calls", ())):
            call["function"]["name"] = f"{PROBE}{i}call{k}"
            marks[call["function"]["name"]] = f"the tool call in message {i + 1}"
        if message["role"] == "tool":
            message["content"] = f"{PROBE}{i}result"
            marks[message["content"]] = f"the tool result in message {i + 1}"
    if not marks:
        return
    rendered = chat.text(probed, tools)
    for mark, what in marks.items():
        if mark not in rendered:
            raise RowError("template knows no tools", f"the chat template leaves out {what}")


def _check_reply_text(chat: ChatTemplate, message: dict[str, Any], i: int) -> None:
    for text in (message["content"], message.get("reasoning_content") or "", *_texts(message.get("tool_calls"))):
        for token in chat.turn_tokens:
            if token in text:
                raise RowError(
                    "control token in a reply",
                    f"message {i + 1} spells out {token!r}: it would be learned as a real one, in mid-reply",
                )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _texts(list(pair))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _says_something(message: dict[str, str]) -> bool:
    return bool(
        message["content"].strip() or (message.get("reasoning_content") or "").strip() or message.get("tool_calls")
    )


def _rewritten(turns: Messages, i: int, what: str) -> RowError:
    thinks = any(t.get("reasoning_content") or _THINK_END in t["content"] for t in turns)
    if thinks:
        return RowError(
            "thinking dropped from history",
            f"the template drops the thinking of earlier turns: {what} (message {i + 1}) looks otherwise once it is "
            "history. Learn from the last turn only (data.learn: last)",
        )
    return RowError(
        "template rewrites earlier turns",
        f"{what} (message {i + 1}) is rendered otherwise once more turns follow. Learn from the last turn only "
        "(data.learn: last)",
    )


def _shared(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
