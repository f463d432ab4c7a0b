"""A target's folder, read the same way by everybody: its config.json, and what transformers loads of it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hidden_states.errors import DataError, RecipeError, Refusal

# Gemma's; Granite's, Cohere's, Falcon-H1's and MiniCPM's, by which their logits are multiplied or divided
_CHANGE_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier", "dim_model_base")


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings: a wrapper's (Kimi-K2.5: `text_config`) lie over those outside."""
    return {**config, **(config.get("text_config") or {})}


def is_size(value: Any) -> bool:
    """Whether a value of a config can be a size: a whole number above 0, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_config(folder: Path | str) -> dict[str, Any]:
    """`config.json` of a Hugging Face model folder, as it lies there.

    Raises:
        DataError: there is none, or it is no JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(str(path), "no such file", "a Hugging Face model folder", "Check the model's path.") from None
    except OSError as error:
        raise DataError(str(path), f"it cannot be read ({error.strerror})", "a model's config") from error
    except (ValueError, RecursionError) as error:
        raise DataError(str(path), f"not JSON ({error})", "a model's config", "Is the folder complete?") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config") or {}, dict):
        found = "`text_config` is no object" if isinstance(config, dict) else f"no object ({type(config).__name__})"
        raise DataError(str(path), found, "a model's config: a JSON object", "Is the folder complete?")
    return config


def read_language_config(target_folder: Path | str) -> dict[str, Any]:
    """The language model's settings of a Hugging Face folder. Raises DataError as `read_config`."""
    return language_config(read_config(target_folder))


def refuse_other_logits(target_folder: Path | str) -> None:
    """No drafter is trained for a target that samples from anything but `lm_head(final)`: its teacher would be another.

    Raises:
        DataError: it scales or caps its logits, or there is no config.json to read.
    """
    config = read_language_config(target_folder)
    # MiniCPM divides by hidden_size / dim_model_base.
    nothing = {"dim_model_base": config.get("hidden_size")}
    changed = [name for name in _CHANGE_LOGITS if config.get(name) not in (None, 0, 1, nothing.get(name))]
    if changed:
        raise DataError(
            str(Path(target_folder) / "config.json"), ", ".join(f"{name} is {config[name]!r}" for name in changed),
            "logits that are lm_head(final)",
            "The teacher would be another distribution than the one the server samples from; not supported.",
        )  # fmt: skip


@contextlib.contextmanager
def loading(what: str, folder: Path | str) -> Iterator[None]:
    """Around a load by transformers, which raises whatever it meets in a broken folder, also bare Exceptions.

    Raises:
        RecipeError: it is Python code of the model's folder, and the recipe does not let that run.
        DataError: it cannot be loaded.
    """
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            raise RecipeError(
                "target.trust_remote_code", f"the {what} of {folder} is Python code in that folder, which is not run",
                "true", "Read that code; if you trust it, set `target.trust_remote_code: true` in the recipe.",
            ) from error  # fmt: skip
        raise DataError(
            str(folder), f"transformers cannot load its {what} ({type(error).__name__}: {said[:300]})",
            "a complete Hugging Face folder", "Copy the model again, with all its files.",
        ) from error  # fmt: skip


def load_tokenizer(folder: Path | str, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a Hugging Face folder. Raises as `loading`."""
    from transformers import AutoTokenizer  # 2 s: after the cheap refusals

    with loading("tokenizer", folder):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
