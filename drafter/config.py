"""The drafter's shape: everything that decides its tensors, and what the serving engine must be told.

A draft block is Llama-shaped, or has latent attention where its target has it and this is asked for; `from_target`
takes from the target what must be equal (hidden size, vocabulary, the captured blocks) and what is a good default
(heads, MLP width, rope, eps).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hidden_states.errors import DataError, TrainingError
from hidden_states.target_config import is_size, language_config, read_config

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention, by DeepSeek's names."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and choices of one EAGLE-3 drafter. `after_block` are outputs of target blocks, 0-based and ascending. With
    `latent` sizes, head_dim and num_key_value_heads have no meaning."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope: dict[str, Any]  # rope_type, rope_theta and the scaling's own keys, nothing left to an engine's default
    after_block: tuple[int, ...]
    target_architecture: str
    target_blocks: int
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm per captured block before fc
    norm_output: bool = False  # EAGLE-3.1: the recurrence carries norm(out) instead of out
    latent: LatentSizes | None = None  # latent attention in place of grouped heads
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "after_block", tuple(self.after_block))
        if isinstance(self.latent, dict):
            object.__setattr__(self, "latent", LatentSizes(**self.latent))
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "vocab_size", "max_position_embeddings")  # fmt: skip
        if wrong := [f"`{name}` is {getattr(self, name)!r}" for name in sizes if not is_size(getattr(self, name))]:
            raise TrainingError("drafter sizes", ", ".join(wrong), "whole numbers above 0", "Correct the config.")
        if not is_positive(self.rms_norm_eps):
            raise TrainingError("drafter rms_norm_eps", f"{self.rms_norm_eps!r}", "a number above 0", "")
        blocks = self.after_block
        if not blocks or list(blocks) != sorted(set(blocks)) or blocks[0] < 0 or blocks[-1] >= self.target_blocks:
            raise TrainingError(
                "drafter after_block", f"{list(blocks)}", f"ascending block numbers below {self.target_blocks}",
                "Name the captured blocks as the dataset's manifest does (outputs of blocks, counted from 0).",
            )  # fmt: skip
        if self.num_attention_heads % self.num_key_value_heads:
            raise TrainingError(
                "drafter heads", f"{self.num_attention_heads} query and {self.num_key_value_heads} key/value heads",
                "a multiple", "Change num_key_value_heads.",
            )  # fmt: skip
        if self.latent and self.rope.get("rope_type") not in ("default", "yarn"):
            raise TrainingError(
                "drafter rope", f"rope_type {self.rope.get('rope_type')!r} with latent attention", "default or yarn",
                "SGLang takes any other scaling of a latent drafter for yarn.",
            )  # fmt: skip
        if self.head_dim % 2:
            raise TrainingError("drafter head_dim", f"{self.head_dim}", "an even number (rope turns pairs)", "")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise TrainingError(
                "drafter draft_vocab_size", f"{self.draft_vocab_size}", f"1 to {self.vocab_size}",
                "Lower draft_vocab_size to at most the target's vocabulary.",
            )  # fmt: skip
        if self.rope.get("rope_type") not in _ROPE_TYPES:
            raise TrainingError(
                "drafter rope", f"rope_type {self.rope.get('rope_type')!r}", f"one of {', '.join(_ROPE_TYPES)}",
                "Give the drafter a rope of its own, for example rope={'rope_type': 'default', 'rope_theta': 10000.0}.",
            )  # fmt: skip

    @property
    def rope_dim(self) -> int:
        """What of a head rope turns."""
        return self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def states_width(self) -> int:
        """Width of the concatenated captured states, the input of `fc`."""
        return self.hidden_size * len(self.after_block)

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        after_block: Sequence[int],
        draft_vocab_size: int,
        latent_attention: bool = False,
        **overrides: Any,
    ) -> "DrafterConfig":
        """A drafter for the target with this `config.json`; any field may be overridden by name.

        Multimodal targets are read through their `text_config`. For a target with latent attention (no key/value
        heads worth copying) the drafter gets heads of 128 and an eighth of them for keys and values, or with
        `latent_attention` the target's own latent sizes: its cache entries are then as small as the target's.

        Raises: TrainingError for an unknown override, a rope that cannot be expressed, or a target whose config lacks a
            size.
        """
        text = language_config(target_config)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(overrides) - known):
            raise TrainingError("drafter overrides", f"{', '.join(unknown)}", f"some of {', '.join(sorted(known))}")
        architecture = (target_config.get("architectures") or text.get("architectures") or ["unknown"])[0]
        sizes = ("num_attention_heads", "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
        if wrong := [f"`{name}` is {text.get(name)!r}" for name in sizes if not is_size(text.get(name))]:
            raise TrainingError("target config", ", ".join(wrong), "whole numbers above 0", "Is the folder complete?")
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        latent = None
        if latent_attention:
            missing = [f.name for f in fields(LatentSizes) if not text.get(f.name)]
            if missing and "latent" not in overrides:
                raise TrainingError(
                    "drafter latent_attention", f"a target without {', '.join(missing)}",
                    "a target with latent attention", "Leave latent_attention out, or give the sizes as `latent`.",
                )  # fmt: skip
            latent = overrides.get("latent") or LatentSizes(**{f.name: text[f.name] for f in fields(LatentSizes)})
        if text.get("kv_lora_rank"):
            head_dim, kv_heads = 128, max(1, heads // 8)
        else:
            head_dim = text.get("head_dim") or hidden // heads
            kv_heads = text.get("num_key_value_heads") or heads
        values: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": text["intermediate_size"],
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
            "vocab_size": text["vocab_size"],
            "draft_vocab_size": draft_vocab_size,
            "max_position_embeddings": text.get("max_position_embeddings", 8192),
            "after_block": tuple(after_block),
            "target_architecture": architecture,
            "target_blocks": text["num_hidden_layers"],
            "latent": latent,
            **{name: text.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **overrides,
        }
        if values["hidden_size"] != hidden:
            raise TrainingError(
                "drafter hidden_size", f"{values['hidden_size']}", f"the target's {hidden}",
                "SGLang shares the target's embedding with the drafter, which needs equal widths.",
            )  # fmt: skip
        given = overrides.get("rope")
        values["rope"] = resolve_rope(text if given is None else {**text, "rope_parameters": given})
        return cls(**values)

    def with_draft_vocab(self, size: int) -> "DrafterConfig":
        """The same drafter with another draft vocabulary size."""
        return replace(self, draft_vocab_size=size)

    def to_json(self) -> str:
        """One JSON object; `from_json` gives back an equal config."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "DrafterConfig":
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))


def read_target_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face model folder, as it lies there.

    Raises: TrainingError when the folder has none, or it is no JSON object.
    """
    try:
        return read_config(folder)
    except DataError as error:
        raise TrainingError(error.where, error.found, error.expected, error.do) from error


def resolve_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters of a Hugging Face config in one form, from the two that exist.

    transformers 5 writes `rope_parameters` (theta inside, perhaps one per layer type); older files have `rope_theta`
    beside `rope_scaling`, whose type is called `type` or `rope_type`. SGLang reads the former when present. Where a
    scaling leaves a parameter out, SGLang's default is written in, so that no engine's own default decides.

    Raises: TrainingError when they are no such parameters.
    """
    try:
        return _rope(config)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        given = config.get("rope_parameters") or config.get("rope_scaling")
        raise TrainingError(
            "config.json, rope", f"{given!r} with rope_theta {config.get('rope_theta')!r}",
            "an object with rope_type and numbers", "Is this the model's own config?",
        ) from error  # fmt: skip


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in given:
        given = given["full_attention"]
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind == "default":
        return _with_numbers(rope)
    rope["factor"] = float(given.get("factor", 1.0))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = int(
            given.get("original_max_position_embeddings") or config.get("max_position_embeddings", 8192)
        )
    if kind == "llama3":
        rope["low_freq_factor"] = float(given.get("low_freq_factor", 1.0))
        rope["high_freq_factor"] = float(given.get("high_freq_factor", 4.0))
    if kind == "yarn":
        rope["beta_fast"] = float(given.get("beta_fast") or 32)
        rope["beta_slow"] = float(given.get("beta_slow") or 1)
        rope["truncate"] = bool(given.get("truncate", True))
        for name in ("mscale", "mscale_all_dim"):
            if given.get(name) is not None:
                rope[name] = float(given[name])
    return _with_numbers(rope)


def _with_numbers(rope: dict[str, Any]) -> dict[str, Any]:
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        if not is_positive(rope.get(name, 1)):
            raise ValueError(f"{name} is {rope[name]}")
    return rope


def is_positive(value: Any) -> bool:
    """Whether a value of a config is a number above 0, and a finite one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
