"""An independent judge of loss masks: what stands before and at the end of every stretch to learn.

A mask that is shifted by a token, or was made for another template, has the right length and the right share of ones.
But a reply begins right after the generation prompt, and ends with the stop token (or with the sample, if cut):

    <|im_start|> assistant \\n | Hello . <|im_end|> | \\n
    |------- opening --------|           |- stop --|

Both are learned from two small conversations rendered by the target's template, not from the samples.
"""

import contextlib
import itertools
from dataclasses import dataclass

from hidden_states.errors import DataError
from hidden_states.mask import learned_spans, mask_of
from hidden_states.messages import RowError
from hidden_states.render import ChatTemplate
from hidden_states.samples import Sample

_LONGEST_OPENING = 8
_TALKS = (("What is a hawk?", "A bird of prey.", "And an eyas?", "A young hawk, taken from the nest"),
          ("Seven times 6!", "42", "Who says so", "Everybody (I think) does."))  # fmt: skip


@dataclass(frozen=True)
class MaskRule:
    """Attributes:
    opening: token ids right before every reply.
    stop: the token every reply ends with; None when the template ends replies with no token of its own.
    """

    opening: tuple[int, ...]
    stop: int | None

    @classmethod
    def of(cls, chat: ChatTemplate) -> "MaskRule":
        """The rule of a template.

        Raises:
            DataError: the template cannot render a plain conversation, or its replies have nothing in common.
        """
        contexts: list[list[int]] = []
        ends: set[int] = set()
        for talk in _TALKS:
            roles = itertools.cycle(("user", "assistant"))
            messages = [{"role": role, "content": content} for role, content in zip(roles, talk, strict=False)]
            try:
                ids, mask = mask_of(chat, learned_spans(chat, messages, None, "last", True))
                with contextlib.suppress(RowError):  # a template that rewrites earlier turns only gives the last one
                    ids, mask = mask_of(chat, learned_spans(chat, messages, None, "all", True))
            except RowError as error:
                raise DataError("the target's chat template", error.reason) from error
            for start, stop in runs(mask):
                contexts.append(ids[:start])
                ends.add(ids[stop - 1])
        opening = _common_end(contexts)
        prompt = chat.ids(chat.opening)
        if prompt and opening[-len(prompt) :] == prompt:
            opening = prompt  # without what ends a user's turn: a reply can also follow a tool's, or open the talk
        if not opening:
            raise DataError(
                "the target's chat template",
                "no token is common to what stands before replies",
                "a generation prompt",
                "Loss masks of this template cannot be checked.",
            )
        return cls(tuple(opening), ends.pop() if len(ends) == 1 else None)

    def check(self, sample: Sample, *, reasoning_left_out: bool = False) -> None:
        """Check a sample's mask.

        Args:
            reasoning_left_out: replies may begin to be learned after their reasoning.

        Raises:
            DataError: a stretch to learn does not begin after the generation prompt, or does not end with the stop
                token; or there is none.
        """
        ids, mask = sample.input_ids, sample.loss_mask
        if not any(mask):
            raise self._error(sample, "no token to learn", "at least one reply")
        before = 0
        for start, stop in runs(mask):
            if not self._opens(ids, before, start, reasoning_left_out):
                found = (
                    f"the tokens to learn from {start} on come after {ids[max(0, start - len(self.opening)) : start]}"
                )
                raise self._error(sample, found, f"the generation prompt {list(self.opening)}")
            if self.stop is not None and stop < len(ids) and ids[stop - 1] != self.stop:
                found = f"the tokens to learn up to {stop} end with token {ids[stop - 1]}"
                raise self._error(sample, found, f"the stop token {self.stop}, or the sample's end")
            before = stop

    def _opens(self, ids: list[int], before: int, start: int, reasoning_left_out: bool) -> bool:
        size = len(self.opening)
        places = range(before, start - size + 1) if reasoning_left_out else [start - size]
        return any(place >= 0 and tuple(ids[place : place + size]) == self.opening for place in places)

    @staticmethod
    def _error(sample: Sample, found: str, expected: str) -> DataError:
        return DataError(
            f"mask of sample {sample.id} ({sample.source})",
            found,
            expected,
            "The mask is shifted, or was made for another chat template: prepare the samples again.",
        )


def _common_end(contexts: list[list[int]]) -> list[int]:
    """The tokens all contexts end with, at most `_LONGEST_OPENING`."""
    end: list[int] = []
    for nearest in zip(*(reversed(context[-_LONGEST_OPENING:]) for context in contexts), strict=False):
        if len(set(nearest)) > 1:
            break
        end.insert(0, nearest[0])
    return end


def runs(mask: list[int]) -> list[tuple[int, int]]:
    """Stretches [start, stop) of ones."""
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    bounds = [0, *edges, len(mask)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if a < b and mask[a]]
