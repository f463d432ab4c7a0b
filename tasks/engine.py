"""What an evaluation was measured with: target, engine and the lengths that decide the figures. Alike = comparable."""

import hashlib
from pathlib import Path
from typing import Any

from hidden_states.errors import ServerError
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

SHOWN = 17  # characters of a digest


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
    """What of the environment differs, `name: before / now`; of digests the beginning."""
    differing = [name for name in ENVIRONMENT if before.get(name) != now.get(name)]
    return [f"{name}: {str(before.get(name))[:SHOWN]} / {str(now.get(name))[:SHOWN]}" for name in differing]


def refuse_other_server(recipe: Recipe, url: str, info: dict[str, Any], drafter: Path | None) -> None:
    """Is a server that somebody else runs the one the recipe means?

    Args:
        drafter: folder of the drafter it should run; None = it should run without one.

    Raises:
        ServerError: another target, no drafter or another one, or another length of drafts. What lies on another
            machine's disk cannot be compared; its name is.
    """
    target = Path(recipe.target.model_path).name
    found: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    found["model"], wanted["model"] = Path(str(info.get("model_path"))).name, target
    algorithm = info.get("speculative_algorithm")
    found["speculation"], wanted["speculation"] = str(algorithm).upper(), "NONE" if drafter is None else "EAGLE3"
    if drafter is not None:
        found["drafted tokens"], wanted["drafted tokens"] = info.get("speculative_num_steps"), recipe.evaluate.num_steps
        theirs = Path(str(info.get("speculative_draft_model_path")))
        if (theirs / "config.json").is_file():
            found["drafter"], wanted["drafter"] = _identity(theirs), _identity(drafter)
    differing = [f"{name}: {found[name]}, not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differing:
        raise ServerError(
            url, "; ".join(differing), "the server this evaluation is of",
            "Correct evaluate.url or evaluate.plain_url, or take it out: Eyas then starts the server.",
        )  # fmt: skip


def _identity(folder: Path) -> str:
    """Of a drafter's folder: its config and the sizes and heads of its weights."""
    sha = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            sha.update(f"{file.name} {file.stat().st_size}".encode() + data.read(1 << 20))
    return sha.hexdigest()[:16]
