"""Captured blocks in the numbering of the engine that will serve the drafter.

Ours are outputs of blocks, counted from 0. An engine's list must make it hand the drafter the very same tensors; each
engine, and in SGLang each model file, reads the list in its own way. Wrong ids give no error: acceptance is merely low.
"""

from collections.abc import Sequence

from hidden_states.errors import TrainingError

# How `set_eagle3_layers_to_capture(ids)` of SGLang 0.5.23 turns ids into capture points. Capture point p is what enters
# block p, which is the output of block p - 1.
#
#   model file                           architectures                 capture points
#   deepseek_v2.py, glm4_moe_lite.py     those below                   ids + 1 if the first id is 1, else the ids
#   every other                          all others                    ids + 1
_TAKEN_LITERALLY = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "MistralLarge3ForCausalLM",
        # these hand the ids on to a DeepSeek language model
        "KimiK25ForConditionalGeneration",
    }
)


def sglang_layer_ids(after_block: Sequence[int], architecture: str) -> list[int]:
    """`eagle_aux_hidden_state_layer_ids` that make SGLang capture the outputs of these blocks.

    Raises: TrainingError when no list does: a DeepSeek-type model cannot be told to begin with block 0.
    """
    blocks = list(after_block)
    if architecture not in _TAKEN_LITERALLY or blocks[0] == 1:
        return blocks  # the engine adds 1
    ids = [block + 1 for block in blocks]
    if ids[0] == 1:
        raise TrainingError(
            f"after_block {blocks} for {architecture}", "the output of block 0", "block 1 or later first",
            "SGLang would take a list that begins with 1 for block outputs and add 1 to all of it.",
        )  # fmt: skip
    return ids


def blocks_sglang_captures(ids: Sequence[int], architecture: str) -> list[int]:
    """The block outputs SGLang captures for these ids: what a drafter of unknown origin will be fed."""
    if architecture in _TAKEN_LITERALLY and list(ids)[:1] != [1]:
        return [i - 1 for i in ids]
    return list(ids)


def vllm_layer_ids(after_block: Sequence[int]) -> list[int]:
    """The same for vLLM, whose ids are boundaries: id k is the output of block k - 1."""
    return [block + 1 for block in after_block]
