"""A target's config.json, read the same way by everybody."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings: a wrapper's (Kimi-K2.5: `text_config`) lie over those outside."""
    return {**config, **(config.get("text_config") or {})}


def read_language_config(target_folder: Path | str) -> dict[str, Any]:
    """The same, of a Hugging Face folder."""
    return language_config(json.loads((Path(target_folder) / "config.json").read_text(encoding="utf-8")))
