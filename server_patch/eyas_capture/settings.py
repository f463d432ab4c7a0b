"""What the user asked for: the plugin's environment variables, read once."""

from collections.abc import Mapping
from dataclasses import dataclass

from eyas_capture import contract

ALL = "all"
OPTED_IN = "opted-in"
BLOCK = "block"
SKIP = "skip"
DEFAULT_QUEUE_BYTES = 4 << 30


class SettingsError(ValueError):
    """An environment variable of the plugin says something that cannot be done; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Which block outputs, whose requests, and what to do when the disk is too slow.

    `after_block` is None when the user named no blocks: the model's depth decides then (layers.default_blocks).
    `queue_bytes` bounds the memory with rows between the forward pass and the disk.
    """

    after_block: tuple[int, ...] | None
    mode: str
    queue_bytes: int
    when_full: str

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Settings":
        """Raises SettingsError."""
        return cls(
            after_block=_blocks(env),
            mode=_choice(env, contract.ENV_MODE, ALL, OPTED_IN),
            queue_bytes=_queue_bytes(env),
            when_full=_choice(env, contract.ENV_WHEN_FULL, BLOCK, SKIP),
        )


def _choice(env: Mapping[str, str], name: str, default: str, other: str) -> str:
    value = env.get(name) or default
    if value not in (default, other):
        raise SettingsError(f"{name}={value!r}: expected {default!r} or {other!r}")
    return value


def _queue_bytes(env: Mapping[str, str]) -> int:
    text = env.get(contract.ENV_QUEUE_BYTES) or str(DEFAULT_QUEUE_BYTES)
    if not text.isdigit() or int(text) == 0:
        raise SettingsError(f"{contract.ENV_QUEUE_BYTES}={text!r}: expected a number of bytes, such as 4294967296")
    return int(text)


def _blocks(env: Mapping[str, str]) -> tuple[int, ...] | None:
    blocks = _numbers(env, contract.ENV_AFTER_BLOCK)
    points = _numbers(env, contract.ENV_CAPTURE_POINTS)
    if blocks and points:
        raise SettingsError(f"{contract.ENV_AFTER_BLOCK} and {contract.ENV_CAPTURE_POINTS} are both set: keep one")
    if points:
        if points[0] == 0:
            raise SettingsError(f"{contract.ENV_CAPTURE_POINTS}: point 0 is the embedding, not the output of a block")
        # SGLang's point p is the input of block p, which is the output of block p - 1.
        return tuple(point - 1 for point in points)
    return blocks


def _numbers(env: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    text = env.get(name)
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise SettingsError(f"{name}={text!r}: expected numbers with commas between them, such as 2,30,58")
    numbers = tuple(int(part) for part in parts)
    if list(numbers) != sorted(set(numbers)):
        raise SettingsError(f"{name}={text!r}: expected ascending numbers, none twice")
    return numbers
