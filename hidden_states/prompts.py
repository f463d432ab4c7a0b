"""Prompts for the target to answer itself: its own replies are what a drafter for it should learn from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas_capture import contract
from hidden_states.conversations import BadRow, Conversation
from hidden_states.errors import DataError
from hidden_states.messages import RowError
from hidden_states.render import ChatTemplate, Messages, Tools
from hidden_states.report import Report
from hidden_states.samples import DUPLICATE, TOO_LONG, SampleOptions, check_ids, drop_row, note_markers


@dataclass(frozen=True)
class Prompt:
    """A prompt for the target to answer: everything up to the last turn that is not the assistant's.

    Attributes:
        digest: `contract.tokens_sha256` of the ids.
    """

    ids: list[int]
    source: str
    digest: str


@dataclass(frozen=True)
class PreparedPrompts:
    """Prompts in the order of their digests, and what became of every row."""

    prompts: list[Prompt]
    report: Report


def prepare_prompts(
    conversations: Iterable[Conversation | BadRow],
    tokenizer: PreTrainedTokenizerBase,
    options: SampleOptions | None = None,
) -> PreparedPrompts:
    """Prompts of conversations whose last reply the target shall write itself; the replies in the file are left out.

    `max_tokens` bounds the prompt. A prompt that is too long is skipped whatever `when_too_long` says, except "refuse":
    half a prompt is another question.

    Raises:
        DataError: as `prepare`.
    """
    options = options or SampleOptions()
    chat = ChatTemplate(tokenizer, dict(options.template_kwargs))
    vocab_size = options.vocab_size or len(tokenizer)
    report, seen = Report(), dict[str, Prompt]()
    for row in conversations:
        report.rows += 1
        if isinstance(row, BadRow):
            drop_row(report, row.kind, row.where, row.reason, options)
            continue
        messages = prompt_messages(row.messages)
        if not messages:
            report.drop("nothing to answer", row.source, "only the assistant speaks")
            continue
        try:
            _ = chat.opening
            ids = chat.ids(chat.text(messages, row.tools, generation_prompt=True))
            check_ids(ids, vocab_size)
        except RowError as error:
            drop_row(report, error.kind, row.source, error.reason, options)
            continue
        if options.max_tokens is not None and len(ids) > options.max_tokens:
            found = f"a prompt of {len(ids)} tokens, at most {options.max_tokens} allowed"
            if options.when_too_long == "refuse":
                raise DataError(row.source, found, None, "Shorten the row, raise data.max_tokens, or choose skip.")
            report.drop(TOO_LONG, row.source, found)
            continue
        prompt = Prompt(ids, row.source, contract.tokens_sha256(ids))
        if prompt.digest in seen:
            report.drop(DUPLICATE, row.source, f"same prompt as {seen[prompt.digest].source}")
            continue
        note_markers(chat, messages, row.source, report)
        seen[prompt.digest] = prompt
        report.count(len(ids), 0)
    report.check(options.max_bad_share)
    return PreparedPrompts([seen[digest] for digest in sorted(seen)], report)


def prompt_messages(messages: Messages) -> Messages:
    """The turns before the last reply: what the target is asked."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end] if any(m["role"] in ("user", "tool") for m in messages[:end]) else []


def render_prompt(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of turns with the generation prompt after them.

    Raises:
        DataError: the template refuses the turns.
    """
    chat = ChatTemplate(tokenizer, dict(template_kwargs or {}))
    try:
        return chat.ids(chat.text(messages, tools, generation_prompt=True))
    except RowError as error:
        raise DataError("prompt", error.reason) from error
