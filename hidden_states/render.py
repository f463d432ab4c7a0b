"""The target's own chat template and tokenizer, with every way they can refuse turned into one error."""

import functools
import re
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hidden_states.errors import DataError
from hidden_states.messages import RowError

Messages = list[dict[str, Any]]
Tools = list[Any] | None  # JSON schemas
Span = tuple[int, int]

PROBE = "eyasprobe"  # stands in for a text to see where the template puts it; no markup, no spaces
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template is a program of somebody else's: besides Jinja's own errors it can hit any of these while it runs.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


class ChatTemplate:
    """Renders and tokenises as SGLang's chat endpoint does: template text first, then ids without special tokens added.

    Args:
        tokenizer: the target's.
        template_kwargs: further variables of the template (`enable_thinking`, `date_string`, ...).

    Raises:
        DataError: the tokenizer has no chat template, or tokenises a rendering in two different ways.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(template_kwargs or {})
        try:
            self.source = str(tokenizer.get_chat_template())
        except ValueError as error:
            raise DataError(
                f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
                "it has no chat template",
                None,
                "Add the model's chat_template.jinja to its folder.",
            ) from error
        self.tagged = bool(_GENERATION.search(self.source))
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.control_tokens = frozenset(added | set(tokenizer.all_special_tokens))
        # What opens or ends a turn. Other special tokens (<filename> of a code model, say) may well be text in a reply.
        ends = {str(t) for t in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) if t}
        self.turn_tokens = frozenset(ends | {t for t in self.control_tokens if t in self.source})
        self._control = _any_of(self.control_tokens)

    def text(self, messages: Messages, tools: Tools = None, *, generation_prompt: bool = False) -> str:
        """The rendering as text.

        Raises:
            RowError: the template refuses the conversation, or cannot render it.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                return_dict=False,
                **self.kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise RowError("refused by the chat template", f"the chat template says: {error}") from error
        return str(rendered)

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendering. Nothing is added: a template that wants a BOS writes it itself."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids_of_all(self, texts: list[str]) -> list[list[int]]:
        """`ids` of several texts in one call (tokenizers work on them in parallel)."""
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def tokens_before(self, text: str, place: int) -> int | None:
        """Number of tokens of a text before a place in it; None when a token lies across it, or the tokenizer cannot
        tell (those written in Python know no offsets)."""
        if not self.tokenizer.is_fast:
            return None
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[Span] = encoding["offset_mapping"]
        if any(start < place < end for start, end in offsets):
            return None
        return sum(end <= place for _, end in offsets)

    def check_tokenisation(self, messages: Messages, tools: Tools = None) -> None:
        """Compare `ids(text())` with what the tokenizer's own one-step call gives.

        Raises:
            DataError: they differ, so one of the two is not what the server sees.
        """
        own = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=False, tokenize=True, return_dict=False, **self.kwargs
        )
        ids = self.ids(self.text(messages, tools))
        if list(own) != ids:
            raise DataError(
                f"tokenizer {self.tokenizer.name_or_path or type(self.tokenizer).__name__}",
                f"apply_chat_template gives {len(own)} tokens in one step and {len(ids)} through its text",
                "the same tokens",
                "Is a BOS added twice? The template and the tokenizer must not both add one.",
            )

    def generation_spans(self, messages: Messages, tools: Tools, text: str) -> list[Span] | None:
        """Character spans of the `{% generation %}` blocks of a rendering; None when the template has none."""
        if not self.tagged:
            return None
        try:
            rendering: Any = render_jinja_template(
                [messages],
                tools=list(tools) if tools else None,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.kwargs},
            )
        except _TEMPLATE_ERRORS as error:
            raise RowError("refused by the chat template", f"the chat template says: {error}") from error
        (rendered,), (spans,) = rendering
        if rendered != text:  # a tokenizer with a rendering of its own (Kimi's sorts the tools first)
            return None
        return [(int(start), int(end)) for start, end in spans]

    @functools.cached_property
    def opening(self) -> str:
        """What the template writes for `add_generation_prompt`; empty when a reply needs no header (Llama 2).

        Raises:
            RowError: replies have a header, but the template does not write it as a generation prompt.
        """
        user = [{"role": "user", "content": "Hello."}]
        plain, prompted = self.text(user), self.text(user, generation_prompt=True)
        if not prompted.startswith(plain):
            raise RowError(
                "no generation prompt", "with add_generation_prompt the template changes the turns before it"
            )
        if prompted == plain:
            answered = self.text([*user, {"role": "assistant", "content": PROBE}])
            head = answered[len(plain) : answered.find(PROBE)]
            if head.strip():
                raise RowError(
                    "no generation prompt",
                    f"the template writes {head!r} before a reply, but not when it is asked for a generation prompt",
                )
        return prompted[len(plain) :]

    def control_token_in(self, text: str) -> str | None:
        """The first special token spelled out in a text; None when there is none."""
        match = self._control.search(text)
        return match[0] if match else None

    def end_of_reply(self, text: str, start: int) -> int:
        """Where the target stops writing: after the turn's last special token if only white space follows it.

        The newline that chat templates put after `<|im_end|>` is the template's; the target never produces it.
        """
        ends = [match.end() for match in self._control.finditer(text, start)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)


def _any_of(words: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
