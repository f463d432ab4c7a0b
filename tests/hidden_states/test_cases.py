"""Every file of tests/cases does what its table says, with the demo target's own tokenizer and template."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hidden_states.conversations import Conversation, read_conversations
from hidden_states.errors import DataError
from hidden_states.prompts import prepare_prompts
from hidden_states.samples import (
    SampleOptions,
    prepare,
    segments,
)

CASES = Path(__file__).parents[1] / "cases"
ANY = SampleOptions(max_bad_share=1.0)


@pytest.mark.parametrize(
    ("file", "usable", "dropped", "replies"),
    [
        ("roles_in_the_wild", 2, {"duplicate": 5}, {"Blue is a primary colour.", "Lima."}),
        ("starts_with_the_assistant", 1, {}, {"Hello! How can I help?", "1, 2, 3."}),
        ("content_in_parts", 1, {"not only text": 1}, {"Hi."}),
        ("tool_call_without_content", 0, {"template knows no tools": 1}, set()),
        ("broken_on_line_17", 40, {"not JSON": 1}, None),
        ("bom_and_crlf", 5, {}, {f"{n} plus {n} is {2 * n}." for n in range(5)}),
        ("duplicates", 2, {"duplicate": 2}, {"0 plus 0 is 0.", "1 plus 1 is 2."}),
        ("empty_replies", 1, {"nothing to learn": 2}, {"2 plus 2 is 4."}),
        ("template_tokens_in_user_text", 1, {}, {"Those are chat template markers."}),
        ("odd_unicode", 1, {"not Unicode": 1}, {"Seen."}),
        ("only_user_turns", 0, {"nothing to learn": 2}, set()),
    ],
)
def test_every_case_does_what_its_table_says(
    file: str,
    usable: int,
    dropped: dict[str, int],
    replies: set[str] | None,
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    prepared = prepare(read_conversations(CASES / f"{file}.jsonl", max_bad_share=1.0), smollm2_tokenizer, ANY)
    assert len(prepared.samples) == usable
    assert {name: entry.count for name, entry in prepared.report.dropped.items()} == dropped
    assert all(example.startswith(f"{file}.jsonl:") for e in prepared.report.dropped.values() for example in e.examples)
    said = {text for s in prepared.samples for text, is_learned in segments(s, smollm2_tokenizer) if is_learned}
    assert replies is None or said == {reply + "<|im_end|>" for reply in replies}


def test_odd_characters_come_through_to_the_token(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    first, _ = read_conversations(CASES / "odd_unicode.jsonl", max_bad_share=1.0)
    assert isinstance(first, Conversation)
    (sample,) = prepare([first], smollm2_tokenizer).samples
    assert first.messages[0]["content"] in smollm2_tokenizer.decode(sample.input_ids)


@pytest.mark.parametrize("when_too_long", ["cut", "skip", "refuse"])
def test_a_row_longer_than_the_context(when_too_long: Any, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    options = SampleOptions(max_tokens=8192, when_too_long=when_too_long)
    conversations = read_conversations(CASES / "longer_than_the_context.jsonl")
    if when_too_long == "refuse":
        with pytest.raises(DataError, match=r"longer_than_the_context\.jsonl:1"):
            prepare(conversations, smollm2_tokenizer, options)
        return
    prepared = prepare(conversations, smollm2_tokenizer, options)
    assert [len(sample) for sample in prepared.samples] == ([8192] if when_too_long == "cut" else [])
    reported = prepared.report.notes if when_too_long == "cut" else prepared.report.dropped
    assert [entry.count for entry in reported.values()] == [1]


def test_turns_without_a_reply_are_prompts_for_the_target(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    asked = prepare_prompts(read_conversations(CASES / "only_user_turns.jsonl"), smollm2_tokenizer)
    assert len(asked.prompts) == 2
    assert all(smollm2_tokenizer.decode(p.ids).endswith("<|im_start|>assistant\n") for p in asked.prompts)
