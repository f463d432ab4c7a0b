"""Does this drafter fit this target? In words, for any drafter folder SGLang can load."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.config import LatentSizes, is_positive, read_target_config, resolve_rope
from drafter.layer_ids import blocks_sglang_captures
from drafter.naming import map_problem, to_sglang_name
from hidden_states.errors import TrainingError
from hidden_states.target_config import is_size, language_config

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "draft_vocab_size", "target_hidden_size", "max_position_embeddings", "num_aux_hidden_states")  # fmt: skip
# `get_rope` of SGLang 0.5.23
_ROPES = ("default", "linear", "llama3", "dynamic", "yarn", "deepseek_yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Inspection:
    """facts: what the drafter is. problems: what does not fit; empty = SGLang will serve it as it was trained."""

    facts: dict[str, Any]
    problems: list[str]

    def text(self) -> str:
        """A few lines to read."""
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines += [f"PROBLEM: {problem}" for problem in self.problems] or ["fits"]
        return "\n".join(lines)


def inspect_drafter(folder: str | Path, target: str | Path | None = None) -> Inspection:
    """Reads a drafter's config and tensor names and holds them against each other and against the target.

    Raises: TrainingError when there is no config.json to read, or it is none of a model's.
    """
    folder = Path(folder)
    config = read_target_config(folder)
    target_config = None if target is None else read_target_config(target)
    if not config:
        raise TrainingError(str(folder / "config.json"), "an empty object", "a drafter's config", "Export it again.")
    try:
        return _inspected(folder, config, target_config)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ZeroDivisionError) as error:
        raise TrainingError(
            str(folder / "config.json"), f"a value of another kind than a model's config has ({error!r})",
            "a drafter's config" + ("" if target is None else f", and a model's in {target}"), "Export it again.",
        ) from error  # fmt: skip


def _inspected(folder: Path, config: dict[str, Any], target: dict[str, Any] | None) -> Inspection:
    for name in _SIZES:
        if config.get(name) is not None and not is_size(config[name]):
            raise TypeError(f"`{name}` is {config[name]!r}")
    if not is_positive(config.get("rms_norm_eps", 1e-6)):
        raise TypeError(f"`rms_norm_eps` is {config['rms_norm_eps']!r}")
    shapes, d2t, unreadable = _tensors(folder)
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or None
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise TypeError(f"`eagle_aux_hidden_state_layer_ids` is {ids!r}")
    if not isinstance(config.get("architectures") or [], list):
        raise TypeError(f"`architectures` is {config['architectures']!r}")
    rope = resolve_rope(config)
    hidden, draft_vocab = config.get("hidden_size"), config.get("draft_vocab_size")
    facts: dict[str, Any] = {
        "architecture": (config.get("architectures") or ["none named"])[0],
        "hidden_size": hidden,
        "heads": f"{config.get('num_attention_heads')} query, {config.get('num_key_value_heads')} key/value",
        "vocabulary": f"{draft_vocab} of {config.get('vocab_size')} tokens",
        "rope": json.dumps(rope),
        "dtype": config.get("torch_dtype") or config.get("dtype"),
        "layer ids": ids,
        "parameters": sum(_count(s) for n, s in shapes.items() if n not in ("d2t", "t2d")),
    }
    problems = unreadable + _own_problems(config, shapes, ids)
    if rope["rope_type"] not in _ROPES:
        problems.append(f"rope_type is {rope['rope_type']!r}; SGLang knows {', '.join(_ROPES)}")
    if d2t is not None and d2t.dim() == 1 and config.get("vocab_size"):
        problems += filter(None, [map_problem(d2t, config["vocab_size"])])
    if target is not None:
        problems += _misfits(config, target, ids, facts)
    return Inspection(facts, problems)


def _tensors(folder: Path) -> tuple[dict[str, list[int]], Tensor | None, list[str]]:
    """Every tensor's shape by SGLang's name for it; the vocabulary map; and what cannot be read, or not as weights."""
    shapes: dict[str, list[int]] = {}
    d2t, wrong = None, []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for given in tensors.keys():  # noqa: SIM118
                    name, stored = to_sglang_name(given), tensors.get_slice(given)
                    if name in shapes:
                        wrong.append(f"{name} is there twice ({given} in {file.name} is not the first)")
                    shapes[name] = stored.get_shape()
                    if name == "d2t":
                        d2t = tensors.get_tensor(given)
                    elif name != "t2d" and not stored.get_dtype().startswith(("F", "BF")):
                        wrong.append(
                            f"{name} holds {stored.get_dtype()}; SGLang would take the bare numbers for weights"
                        )
        except (SafetensorError, OSError) as error:
            wrong.append(f"{file.name} cannot be read ({error})")
    return shapes, d2t, wrong


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _grouped(config: dict[str, Any], h: int) -> dict[str, list[int]]:
    heads = config.get("num_attention_heads") or 0
    size = config.get("head_dim") or h // max(1, heads)
    q, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
    return {"q_proj": [q, 2 * h], "k_proj": [kv, 2 * h], "v_proj": [kv, 2 * h], "o_proj": [h, q]}


def _latent(config: dict[str, Any], h: int) -> dict[str, list[int]]:
    heads = config.get("num_attention_heads") or 0
    q, kv, nope, rope, v = (int(config.get(f.name) or 0) for f in fields(LatentSizes))
    return {
        "q_a_proj": [q, 2 * h], "q_a_layernorm": [q], "q_b_proj": [heads * (nope + rope), q],
        "kv_a_proj_with_mqa": [kv + rope, 2 * h], "kv_a_layernorm": [kv], "kv_b_proj": [heads * (nope + v), kv],
        "o_proj": [h, heads * v],
    }  # fmt: skip


# The classes SGLang 0.5.23 serves as EAGLE-3 drafters, and the shapes of their attention.
_ATTENTION = {"LlamaForCausalLMEagle3": _grouped, "Eagle3DeepseekV2ForCausalLM": _latent}
DRAFTERS = tuple(_ATTENTION)


def _own_problems(config: dict[str, Any], shapes: dict[str, list[int]], ids: list[int] | None) -> list[str]:
    """What is wrong within the folder."""
    problems = []
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in _ATTENTION:
        problems.append(f"architectures says {architecture or 'nothing'}; SGLang looks for {' or '.join(_ATTENTION)}")
    if not shapes:
        return [*problems, "there is no *.safetensors file with tensors in it"]
    if config.get("num_hidden_layers") != 1:
        problems.append(f"num_hidden_layers is {config.get('num_hidden_layers')}; an EAGLE-3 drafter has 1 block")
    h = config.get("hidden_size") or 0
    width = config.get("target_hidden_size") or h
    aux = config.get("num_aux_hidden_states") or len(ids or [0, 0, 0])
    i, d = config.get("intermediate_size"), config.get("draft_vocab_size") or config.get("vocab_size")
    wanted: dict[str, list[Any]] = {
        "fc.weight": [h, width * aux], "norm.weight": [h], "lm_head.weight": [d, h],
        "midlayer.mlp.gate_proj.weight": [i, h], "midlayer.mlp.up_proj.weight": [i, h],
        "midlayer.mlp.down_proj.weight": [h, i], "midlayer.input_layernorm.weight": [h],
        "midlayer.hidden_norm.weight": [h], "midlayer.post_attention_layernorm.weight": [h],
    }  # fmt: skip
    attention = _ATTENTION.get(architecture, _grouped)(config, h)
    wanted |= {f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()}
    if config.get("draft_vocab_size") not in (None, config.get("vocab_size")):
        wanted["d2t"] = [d]
    if config.get("fc_norm") or config.get("use_aux_norm"):
        wanted |= {f"fc_norm.{a}.weight": [width] for a in range(aux)}
    if (config.get("eagle_config") or {}).get("norm_before_fc") or config.get("norm_before_fc"):
        wanted["input_norm.weight"] = [width * aux]
    if config.get("attention_bias") or config.get("bias"):  # q, k and v never have one in this class
        wanted["midlayer.self_attn.o_proj.bias"] = [h]
    if config.get("bias"):
        wanted["fc.bias"] = [h]
    lent = config.get("tie_word_embeddings") or config.get("draft_vocab_size") is None  # the head is the target's then
    if lent and "lm_head.weight" not in shapes:
        del wanted["lm_head.weight"]
    for name, shape in wanted.items():
        if name not in shapes:
            problems.append(f"{name} is missing: SGLang would keep random values for it")
        elif list(shapes[name]) != shape:
            problems.append(f"{name} is {list(shapes[name])}; the config asks for {shape}")
    ignored = {"t2d", "embed_tokens.weight", "d2t"}
    problems += [f"{n} is a name SGLang skips silently" for n in shapes if n not in wanted and n not in ignored]
    if ids is None:
        problems.append("eagle_config names no layer ids: SGLang would capture its own default blocks")
    elif ids != sorted(set(ids)):
        problems.append(f"layer ids {ids} do not ascend: SGLang hands out each block once, in the model's order")
    elif aux != len(ids):
        problems.append(f"num_aux_hidden_states is {aux}; there are {len(ids)} layer ids")
    return problems


def _misfits(config: dict[str, Any], target: dict[str, Any], ids: list[int] | None, facts: dict[str, Any]) -> list[str]:
    """What does not fit the target."""
    text = language_config(target)
    architecture = (target.get("architectures") or ["unknown"])[0]
    problems = []
    width = config.get("target_hidden_size") or config.get("hidden_size")
    for name, ours, theirs in (
        ("hidden_size", width, text.get("hidden_size")),
        ("vocab_size", config.get("vocab_size"), text.get("vocab_size")),
    ):
        if ours != theirs:
            problems.append(f"{name} is {ours}, the target's is {theirs}")
    said = config.get("eyas") or {}
    if said.get("target_architecture", architecture) != architecture:
        problems.append(f"it was made for {said['target_architecture']}, the target is {architecture}")
    if ids is not None:
        blocks = blocks_sglang_captures(ids, architecture)
        facts["SGLang will feed it the outputs of blocks"] = blocks
        if said.get("after_block", blocks) != blocks:
            problems.append(
                f"it was trained on the outputs of blocks {said['after_block']}, SGLang will capture {blocks}"
            )
        beyond = [block for block in blocks if not 0 <= block < text["num_hidden_layers"]]
        problems += [f"block {block} is beyond the target's {text['num_hidden_layers']} blocks" for block in beyond]
    reach = text.get("max_position_embeddings") or 0
    if (config.get("max_position_embeddings") or 0) < reach:
        problems.append(f"max_position_embeddings is {config.get('max_position_embeddings')}, the target's {reach}")
    rope, theirs = resolve_rope(config), resolve_rope(text)
    if rope != theirs:
        facts["note"] = f"its rope is its own; the target's is {json.dumps(theirs)}"
    return problems
