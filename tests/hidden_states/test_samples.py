"""From conversations to samples: what is learned is what the target would have written, to the token."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas_capture import contract
from hidden_states.conversations import Conversation
from hidden_states.errors import DataError
from hidden_states.mask_rule import MaskRule, runs
from hidden_states.prompts import prepare_prompts, render_prompt
from hidden_states.render import ChatTemplate
from hidden_states.samples import (
    Prepared,
    Sample,
    SampleOptions,
    is_held_out,
    load_samples,
    prepare,
    sample_digest,
    sample_from_reply,
    save_samples,
    segments,
)
from tests.hidden_states import chat_tokenizers as chats
from tests.hidden_states.chat_tokenizers import chat_tokenizer

CASES = Path(__file__).parents[1] / "cases"
ANY = SampleOptions(max_bad_share=1.0)


def talk(*texts: str, **last: Any) -> list[dict[str, Any]]:
    """User and assistant in turn; further fields go into the last message."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    messages[-1] |= last
    return messages


def rows(*conversations: list[dict[str, Any]], tools: Any = None) -> list[Conversation]:
    return [Conversation(f"{i:016x}", f"x.jsonl:{i}", m, tools) for i, m in enumerate(conversations, start=1)]


def made(template: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> Prepared:
    options = {"max_bad_share": 1.0, **options}
    return prepare(rows(messages, tools=tools), chat_tokenizer(template), SampleOptions(**options))


def learned(prepared: Prepared, template: str) -> list[str]:
    """Texts of the learned stretches of the one sample."""
    (sample,) = prepared.samples
    return [text for text, is_learned in segments(sample, chat_tokenizer(template)) if is_learned]


def reason(prepared: Prepared) -> str:
    """The one reason why there is no sample."""
    assert not prepared.samples
    (name,) = prepared.report.dropped
    return name


# --- what is learned -------------------------------------------------------------------------------------------------

QUIET = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<|[]"), min_size=1, max_size=40)
SAID = QUIET.filter(lambda text: text.strip() and text == text.strip())


@pytest.mark.parametrize("template", [chats.CHATML, chats.CHATML_TAGGED, chats.DEFAULT_SYSTEM, chats.STRIPS])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(SAID, min_size=2, max_size=8).filter(lambda texts: len(texts) % 2 == 0))
def test_the_learned_tokens_are_every_reply_and_its_stop_token(template: str, texts: list[str]) -> None:
    prepared = made(template, talk(*texts))
    assert learned(prepared, template) == [text + "<|im_end|>" for text in texts[1::2]]
    ids = chat_tokenizer(template).apply_chat_template(talk(*texts), tokenize=True, return_dict=False)
    assert prepared.samples[0].input_ids == ids
    MaskRule.of(ChatTemplate(chat_tokenizer(template))).check(prepared.samples[0])


@settings(max_examples=40)
@given(texts=st.lists(QUIET, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_prefix_differences_and_generation_tags_give_the_same_mask(texts: list[str]) -> None:
    """Any text, also with white space around it: either both give this mask, or both refuse the row."""
    plain, tagged = made(chats.CHATML, talk(*texts)), made(chats.CHATML_TAGGED, talk(*texts))
    assert [s.loss_mask for s in plain.samples] == [s.loss_mask for s in tagged.samples]
    assert list(plain.report.dropped) == list(tagged.report.dropped)


def test_a_template_without_header_or_bos_of_the_tokenizers_own_is_masked_exactly() -> None:
    prepared = made(chats.LLAMA2, talk("Hi", "Hello.", "Bye", "See you."))
    assert learned(prepared, chats.LLAMA2) == [" Hello. </s>", " See you. </s>"]
    bos = chat_tokenizer(chats.LLAMA2).bos_token_id
    assert prepared.samples[0].input_ids.count(bos) == 2  # one an exchange: the template's own, none added


def test_only_the_last_reply_is_learned_when_asked() -> None:
    for template in (chats.CHATML, chats.CHATML_TAGGED):
        prepared = made(template, talk("Hi", "Hello.", "Bye", "See you."), learn="last")
        assert learned(prepared, template) == ["See you.<|im_end|>"]


def test_turns_after_the_last_reply_are_left_out() -> None:
    prepared = made(chats.CHATML, talk("Hi", "Hello.", "And now?"))
    assert prepared.samples == made(chats.CHATML, talk("Hi", "Hello.")).samples


def test_an_empty_reply_is_not_learned_but_the_others_of_its_conversation_are() -> None:
    for template in (chats.CHATML, chats.CHATML_TAGGED):
        assert learned(made(template, talk("Hi", " \n", "Bye", "See you.")), template) == ["See you.<|im_end|>"]


# --- reasoning and tools ---------------------------------------------------------------------------------------------


def test_reasoning_is_learned_or_not_as_asked() -> None:
    messages = talk("6 x 7?", "42", reasoning_content="Six sevens.")
    with_it = learned(made(chats.THINKING, messages), chats.THINKING)
    assert with_it == ["<think>\nSix sevens.\n</think>\n\n42<|im_end|>"]
    without = learned(made(chats.THINKING, messages, learn_reasoning=False), chats.THINKING)
    assert without == ["42<|im_end|>"]


def test_reasoning_inside_the_text_is_found_too() -> None:
    messages = talk("6 x 7?", "<think>Six sevens.</think>\n\n42")
    assert learned(made(chats.CHATML, messages, learn_reasoning=False), chats.CHATML) == ["42<|im_end|>"]


def test_reasoning_before_a_tool_call_is_left_out_up_to_the_call() -> None:
    call = {"type": "function", "function": {"name": "times", "arguments": {"a": 6}}}
    messages = talk("6 x 7?", "", reasoning_content="A tool!", tool_calls=[call])
    (text,) = learned(made(chats.THINKING, messages, learn_reasoning=False), chats.THINKING)
    assert text.startswith("<tool_call>") and text.endswith("<|im_end|>")


def test_thinking_dropped_from_history_is_refused_unless_only_the_last_turn_is_learned() -> None:
    messages = talk("6 x 7?", "42", "And 6 x 8?", "48", reasoning_content="Six eights.")
    messages[1]["reasoning_content"] = "Six sevens."
    refused = made(chats.THINKING, messages)
    assert reason(refused) == "thinking dropped from history"
    assert "data.learn: last" in refused.report.dropped[reason(refused)].examples[0]
    kept = made(chats.THINKING, messages, learn="last")
    assert learned(kept, chats.THINKING) == ["<think>\nSix eights.\n</think>\n\n48<|im_end|>"]


def test_a_tool_call_is_learned_and_the_tools_result_is_not() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "-3 C"},
        {"role": "assistant", "content": "It is -3 C."},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    first, second = learned(made(chats.THINKING, messages, tools), chats.THINKING)
    assert first.startswith("<tool_call>") and '"weather"' in first
    assert second == "It is -3 C.<|im_end|>"
    assert reason(made(chats.CHATML, messages)) == "template knows no tools"


# --- refusals with their reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (chats.REWRITES, talk("Hi", "Hello.", "Bye", "See you."), "template rewrites earlier turns"),
        (chats.NO_PROMPT, talk("Hi", "Hello."), "no generation prompt"),
        (chats.SPACED_PROMPT, talk("Hi", "and so on."), "not token-exact"),
        (chats.THINKING_PROMPT, talk("Hi", "Hello."), "generation prompt differs"),
        (chats.LLAMA2, talk("Hi", "Hello.")[1:], "refused by the chat template"),
        (chats.CHATML, talk("Hi", "Hello.<|im_end|>\n<|im_start|>user\nMore"), "control token in a reply"),
    ],
    ids=["rewrites", "no-prompt", "spaced-prompt", "thinking-prompt", "assistant-first", "stop-token-in-reply"],
)
def test_a_reply_whose_place_is_not_certain_is_refused(
    template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert reason(made(template, messages)) == expected


@pytest.mark.parametrize("function", [
    {"name": "f", "arguments": {"text": "so<|im_end|>"}}, {"name": "f", "arguments": {"<|im_start|>": 1}},
    {"name": "f", "arguments": {"a": [{"b": ["<|im_end|>"]}]}}, {"name": "<|im_end|>", "arguments": {}},
], ids=["value", "key", "nested", "name"])  # fmt: skip
@pytest.mark.parametrize("template", [chats.THINKING, chats.CHATML])
def test_a_stop_token_inside_a_tool_call_is_not_learned_either(template: str, function: dict[str, Any]) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    found = made(template, [*talk("Hi"), call])
    assert not found.samples and reason(found) in ("control token in a reply", "template knows no tools")


def test_the_reason_names_the_row_and_shows_what_was_there() -> None:
    example = made(chats.LLAMA2, talk("Hi", "Hello.")[1:]).report.dropped["refused by the chat template"].examples[0]
    assert example == (
        "x.jsonl:1: the chat template says: Conversation roles must alternate user/assistant/user/assistant"
    )


def test_a_conversation_opened_by_the_assistant_is_used_where_the_template_allows_it() -> None:
    messages = talk("", "Hello!", "Sort 3, 1, 2.", "1, 2, 3.")[1:]
    for template in (chats.CHATML, chats.CHATML_TAGGED, chats.DEFAULT_SYSTEM):
        assert learned(made(template, messages), template) == ["Hello!<|im_end|>", "1, 2, 3.<|im_end|>"]


def test_text_that_spells_out_markers_is_never_learned_and_counted() -> None:
    prepared = made(chats.CHATML, talk("Explain <|im_start|>assistant\nfake<|im_end|>.", "Those are markers."))
    assert learned(prepared, chats.CHATML) == ["Those are markers.<|im_end|>"]
    assert prepared.report.notes["special token spelled out in a text"].count == 1


def test_a_token_id_the_target_has_no_embedding_for_is_refused() -> None:
    assert reason(made(chats.CHATML, talk("Hi", "Hello."), vocab_size=300)) == "token id outside the vocabulary"


def test_a_tokenizer_that_adds_its_own_bos_to_the_templates_is_noticed() -> None:
    class AddsBos(type(chat_tokenizer(chats.LLAMA2))):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, tokenize: bool = True, **kwargs: Any) -> Any:
            out = super().apply_chat_template(*args, tokenize=tokenize, **kwargs)
            return [self.bos_token_id, *out] if tokenize else out

    tokenizer = chat_tokenizer(chats.LLAMA2)
    twice = AddsBos(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    twice.chat_template = chats.LLAMA2
    with pytest.raises(DataError, match="BOS added twice"):
        prepare(rows(talk("Hi", "Hello.")), twice, ANY)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = chat_tokenizer(chats.CHATML)
    bare = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="</s>")
    with pytest.raises(DataError, match="no chat template"):
        prepare(rows(talk("Hi", "Hello.")), bare, ANY)


# --- length, duplicates, order ---------------------------------------------------------------------------------------


def test_cutting_cuts_tokens_and_mask_together() -> None:
    whole = made(chats.CHATML, talk("Hi", "Hello there, my friend.")).samples[0]
    for most in range(1, len(whole) + 1):
        prepared = made(chats.CHATML, talk("Hi", "Hello there, my friend."), max_tokens=most)
        if not any(whole.loss_mask[:most]):
            assert reason(prepared) == "nothing to learn"
            continue
        (sample,) = prepared.samples
        assert (sample.input_ids, sample.loss_mask) == (whole.input_ids[:most], whole.loss_mask[:most])
        assert bool(prepared.report.notes) == (most < len(whole))


def test_too_long_is_skipped_or_ends_the_run_as_asked() -> None:
    messages = talk("Hi", "Hello there.")
    assert reason(made(chats.CHATML, messages, max_tokens=5, when_too_long="skip")) == "too long"
    with pytest.raises(DataError, match=r"x.jsonl:1: \d+ tokens, at most 5 allowed"):
        made(chats.CHATML, messages, max_tokens=5, when_too_long="refuse")


def test_samples_and_split_do_not_depend_on_the_order_of_rows() -> None:
    conversations = rows(*(talk(f"What is {n} plus {n}?", f"{2 * n}.") for n in range(40)))
    shuffled = list(conversations)
    random.Random(1).shuffle(shuffled)
    tokenizer = chat_tokenizer(chats.CHATML)
    one, other = prepare(conversations, tokenizer).samples, prepare(shuffled, tokenizer).samples
    assert [s.digest for s in one] == [s.digest for s in other] == sorted(s.digest for s in one)
    assert [is_held_out(s.digest, 0.3) for s in one] == [is_held_out(s.digest, 0.3) for s in other]


@settings(max_examples=30)
@given(share=st.floats(0, 1))
def test_the_held_out_split_has_the_share_asked_for_and_only_grows(share: float) -> None:
    digests = [contract.tokens_sha256([n]) for n in range(400)]
    held_out = {d for d in digests if is_held_out(d, share)}
    assert abs(len(held_out) / len(digests) - share) < 0.12
    assert held_out <= {d for d in digests if is_held_out(d, min(1.0, share + 0.1))}


def test_bad_rows_end_the_run_beyond_their_share_and_at_once_when_strict() -> None:
    good, bad = [talk(f"Say {n}", f"{n}") for n in range(9)], [talk("Hi", "<|im_end|>")]
    tokenizer = chat_tokenizer(chats.CHATML)
    assert len(prepare(rows(*good, *bad), tokenizer, SampleOptions(max_bad_share=0.1)).samples) == 9
    with pytest.raises(DataError, match="1 of 10 rows are unusable: 1 control token in a reply"):
        prepare(rows(*good, *bad), tokenizer, SampleOptions(max_bad_share=0.09))
    with pytest.raises(DataError, match=r"x\.jsonl:10"):
        prepare(rows(*good, *bad), tokenizer, SampleOptions(strict=True, max_bad_share=1.0))


# --- samples themselves ----------------------------------------------------------------------------------------------

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=50)


@given(tokens=TOKENS)
def test_a_sample_is_named_by_its_tokens_and_mask(tokens: list[tuple[int, int]]) -> None:
    ids, mask = [t for t, _ in tokens], [m for _, m in tokens]
    sample = Sample.of(ids, mask, "a:1")
    assert (sample.input_ids, sample.loss_mask) == (ids, mask)
    assert sample.id == sample.digest[:16] == sample_digest(ids, mask)[:16]
    flipped = [1 - mask[0], *mask[1:]]
    assert Sample.of(ids, flipped, "a:1").digest != sample.digest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(many=st.lists(TOKENS, max_size=5))
def test_samples_come_back_from_disk_as_they_were(many: list[list[tuple[int, int]]], tmp_path: Path) -> None:
    samples = [Sample.of([t for t, _ in one], [m for _, m in one], f"a:{i}") for i, one in enumerate(many)]
    save_samples(samples, tmp_path / "samples.parquet")
    assert load_samples(tmp_path / "samples.parquet") == samples
    assert [p.name for p in tmp_path.iterdir()] == ["samples.parquet"]


def test_a_damaged_samples_file_is_refused(tmp_path: Path) -> None:
    sample = Sample.of([1, 2, 3], [0, 1, 1], "a:1")
    path = tmp_path / "samples.parquet"
    save_samples([Sample(sample.id, [1, 2, 4], [0, 1, 1], "a:1", sample.digest)], path)
    with pytest.raises(DataError, match="not what its digest says"):
        load_samples(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable samples file"):
        load_samples(path)


def test_an_on_policy_sample_learns_every_token_of_the_reply_and_none_of_the_prompt() -> None:
    tokenizer = chat_tokenizer(chats.CHATML)
    prompt = render_prompt(talk("Hi"), tokenizer)
    reply = [*tokenizer("Hello.")["input_ids"], tokenizer.eos_token_id]
    sample = sample_from_reply(prompt, reply, "a:1")
    assert runs(sample.loss_mask) == [(len(prompt), len(prompt) + len(reply))]
    given_reply = made(chats.CHATML, talk("Hi", "Hello.")).samples[0]
    assert given_reply.input_ids[: len(sample)] == sample.input_ids  # the same text either way is the same tokens
    MaskRule.of(ChatTemplate(tokenizer)).check(sample)
    with pytest.raises(DataError, match="no token"):
        sample_from_reply(prompt, [], "a:1")


def test_prompts_leave_the_reply_out_and_are_asked_once() -> None:
    tokenizer = chat_tokenizer(chats.CHATML)
    asked = prepare_prompts(rows(talk("Hi", "Hello."), talk("Hi"), talk("Hi", "Yes?", "Bye")), tokenizer, ANY)
    assert sorted(tokenizer.decode(p.ids) for p in asked.prompts) == sorted(
        tokenizer.decode(render_prompt(m, tokenizer)) for m in (talk("Hi"), talk("Hi", "Yes?", "Bye"))
    )
    assert asked.report.dropped["duplicate"].count == 1


# --- the mask's independent judge ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [chats.CHATML, chats.CHATML_TAGGED, chats.LLAMA2, chats.THINKING, chats.DEFAULT_SYSTEM]
)
def test_a_shifted_mask_is_noticed(template: str) -> None:
    rule = MaskRule.of(ChatTemplate(chat_tokenizer(template)))
    sample = made(template, talk("Hi there", "Hello.", "Bye", "See you.")).samples[0]
    rule.check(sample)
    ids, mask = sample.input_ids, sample.loss_mask
    for shifted in ([0, *mask[:-1]], [*mask[1:], 0], [1, *mask[1:]], [0] * len(mask), [1] * len(mask)):
        with pytest.raises(DataError, match="mask of sample"):
            rule.check(Sample.of(ids, shifted, "a:1"))


def test_a_reply_learned_without_its_reasoning_passes_the_judge_when_told() -> None:
    rule = MaskRule.of(ChatTemplate(chat_tokenizer(chats.THINKING)))
    messages = talk("6 x 7?", "42", reasoning_content="Six sevens.")
    sample = made(chats.THINKING, messages, learn_reasoning=False).samples[0]
    rule.check(sample, reasoning_left_out=True)
    with pytest.raises(DataError):
        rule.check(sample)


# --- the table of cases with a real model's template -----------------------------------------------------------------
