"""Tiny random models with real architectures, tokenizer and chat template, and EAGLE-3 drafts for them.

Small enough to serve on two cores in seconds, real enough that SGLang and transformers load them as they would load the
big ones: a deepseek_v3 has multi-head latent attention, a dense first block and routed experts in the others. The same
arguments give the same files to the byte.

    make_tiny("deepseek_v3", folder)                  6 blocks, hidden size 128, vocabulary 1024, float32
    make_tiny_draft(folder, draft_folder)             a random LlamaForCausalLMEagle3 for it
"""

import functools
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 1024
HIDDEN = 128
BLOCKS = 6
CONTEXT = 4096
KINDS = ("deepseek_v3", "deepseek_v2", "llama", "qwen3", "qwen3_moe")

BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Text to train the tokenizer on: modules whose words are plain English and that every Python 3.11 has.
CORPUS = ("argparse.py", "ast.py", "asyncio/base_events.py", "calendar.py", "csv.py", "datetime.py", "difflib.py",
          "doctest.py", "fractions.py", "functools.py", "gettext.py", "heapq.py", "inspect.py", "json/decoder.py",
          "logging/__init__.py", "random.py", "statistics.py", "tarfile.py", "textwrap.py", "this.py", "typing.py",
          "unittest/mock.py")  # fmt: skip

# MLA on SGLang's CPU path knows this rope only; with a plain one its `get_rope_cpu` fails an assertion.
_YARN = {
    "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 32, "n_shared_experts": 1, "n_routed_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "rope_parameters": _YARN, **_EXPERTS,
}  # fmt: skip
_GQA = {"num_key_value_heads": 2, "head_dim": 32}
_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_MLA, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                    "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v2": {**_MLA, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
                    "topk_method": "greedy", "scoring_func": "softmax", "aux_loss_alpha": 0.0, "seq_aux": True},
    "llama": _GQA,
    "qwen3": _GQA,
    "qwen3_moe": {**_GQA, **_EXPERTS, "num_experts": 8, "decoder_sparse_step": 1, "norm_topk_prob": True,
                  "mlp_only_layers": []},
}  # fmt: skip


def make_tiny(
    kind: str, folder: Path | str, *, blocks: int = BLOCKS, dtype: str = "float32", seed: int = 0, tied: bool = False
) -> Path:
    """Write a random model of one of `KINDS`, with its tokenizer, as a Hugging Face folder.

    Args:
        kind: transformers' model type.
        blocks: number of decoder blocks.
        dtype: dtype of the weights on disk.
        tied: one matrix for embedding and head, as small models have.
    """
    folder = Path(folder)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=blocks,
        num_attention_heads=4, max_position_embeddings=CONTEXT, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        tie_word_embeddings=tied, **_ARCHITECTURE[kind],
    )  # fmt: skip
    for key, value in _ARCHITECTURE[kind].items():  # keys this transformers does not know, but SGLang reads
        if not hasattr(config, key):
            setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            # Wider than the usual initialisation: with it the states of all blocks would be nearly the embedding.
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for name, buffer in sorted(model.named_buffers()):
            if "e_score_correction_bias" in name:  # zeros would leave DeepSeek's expert choice half tested
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,024 tokens, trained on the standard library's own sources."""
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(library / name).read_text(encoding="utf-8") for name in CORPUS], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=CONTEXT
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_tiny_draft(
    target_folder: Path | str,
    folder: Path | str,
    *,
    after_block: tuple[int, ...] = (1, 2, 3),
    draft_vocab_size: int = 512,
    draft_tokens: Sequence[int] | None = None,
    seed: int = 1,
) -> Path:
    """Write a random EAGLE-3 draft for a target folder, in the form SGLang serves as LlamaForCausalLMEagle3.

    Args:
        after_block: target blocks (from 0) whose outputs the draft reads.
        draft_tokens: target ids it can propose, in place of `draft_vocab_size` random ones. A few that the target often
            says make a random draft right now and then, so that verifications accept some and refuse some.
    """
    target = json.loads((Path(target_folder) / "config.json").read_text())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hidden, vocab, heads, kv_heads, head_dim = target["hidden_size"], target["vocab_size"], 4, 2, 32
    inner = 2 * hidden
    generator = torch.Generator().manual_seed(seed)
    chosen = draft_tokens or torch.randperm(vocab, generator=generator)[:draft_vocab_size].tolist()
    kept = torch.tensor(sorted(set(chosen)))
    dtype_name = target.get("dtype") or target["torch_dtype"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": CONTEXT, "vocab_size": vocab,
        "draft_vocab_size": len(kept), "target_hidden_size": hidden, "tie_word_embeddings": False,
        "torch_dtype": dtype_name, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": serving_layer_ids(target["model_type"], after_block),
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))

    dtype = getattr(torch, dtype_name)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.05).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + torch.randn(hidden, generator=generator) * 0.1).to(dtype)

    in_draft = torch.zeros(vocab, dtype=torch.bool)
    in_draft[kept] = True
    weights = {
        "fc.weight": matrix(hidden, len(after_block) * hidden),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(len(kept), hidden),
        "d2t": kept - torch.arange(len(kept)),
        "t2d": in_draft,
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def serving_layer_ids(model_type: str, after_block: tuple[int, ...]) -> list[int]:
    """The ids that make SGLang 0.5.23 hand the outputs of these blocks to the draft.

    Its deepseek_v2.py takes ids as block *inputs* (unless the first is 1), the other model files as block outputs.
    """
    if not model_type.startswith("deepseek"):
        return list(after_block)
    if after_block[0] == 0:
        raise ValueError("SGLang's DeepSeek code cannot be told to hand out the output of block 0")
    return [block + 1 for block in after_block]
