"""Tiny tokenizers with the chat templates people publish: each has a habit that makes loss masks go wrong elsewhere."""

import copy
import functools

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import tiny_tokenizer

_TURN = "'<|im_start|>' + m['role'] + '\\n'"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_CHATML_TURN = "{{ " + _TURN + " + m['content'] + '<|im_end|>\\n' }}"

CHATML = "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _PROMPT

CHATML_TAGGED = (
    "{% for m in messages %}{{ " + _TURN + " }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}" + _PROMPT
)

# A system prompt of its own when none is given, as SmolLM2's.
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" + _CHATML_TURN + "{% endfor %}" + _PROMPT
)

# Opens every exchange with a BOS, puts spaces around texts, wants user and assistant in turn.
LLAMA2 = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# Thinking is shown in the replies after the last question only, as Qwen3 does; tools are known.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages %}{{ " + _TURN + " }}"
    "{% if m['role'] == 'assistant' and m['reasoning_content'] and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + m['reasoning_content'] + '\\n</think>\\n\\n' }}{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (c['function'] | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    + _PROMPT
)

STRIPS = CHATML.replace("m['content']", "m['content'] | trim")

# The role of the last turn is shouted: what was rendered before is no prefix of what is rendered now.
REWRITES = CHATML.replace("+ m['content']", "+ ('!!! ' if loop.last else '') + m['content']")

NO_PROMPT = "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}"

# The generation prompt ends in a space, which any reply swallows into its first token.
SPACED_PROMPT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# The generation prompt opens a thinking block that a rendered reply does not have.
THINKING_PROMPT = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")


@functools.cache
def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """The tiny byte-level BPE with chatml's markers as special tokens, and this template."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    marks = [AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if template is not LLAMA2:
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer
