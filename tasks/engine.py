"""What an evaluation was measured with: target, engine and the lengths that decide the figures. Alike = comparable."""

from pathlib import Path
from typing import Any

from hidden_states.fingerprint import target_fields
from infra.recipe import Recipe

# What makes a champion's figures stale when it changes. The rest of the settings are the recipe's own choices.
ENVIRONMENT = (
    "weights",
    "config",
    "tokenizer",
    "template",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "sglang_version",
)


def engine_settings(recipe: Recipe, info: dict[str, Any]) -> dict[str, Any]:
    """Settings of an evaluation.

    Args:
        info: the server's own description (`/server_info`).
    """
    evaluate = recipe.evaluate
    return {
        "target": Path(recipe.target.model_path).name,
        **target_fields(Path(recipe.target.model_path)),
        "sglang_version": info.get("version"),
        **{name: info.get(name) for name in ("dtype", "quantization", "kv_cache_dtype")},
        "num_steps": evaluate.num_steps,
        "max_new_tokens": evaluate.max_new_tokens,
        "concurrency": evaluate.concurrency,
    }


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of the environment differs, `name: before / now`."""
    return [f"{k}: {before.get(k)} / {now.get(k)}" for k in ENVIRONMENT if before.get(k) != now.get(k)]
