"""Settings that come from a file: a value that no loop could mean is named, not used."""

from typing import Any

from hidden_states.errors import TrainingError


def refuse_values(where: str, settings: Any, **good: bool) -> None:
    """Raises: TrainingError naming the values that are not `good`."""
    if wrong := [f"`{name}` is {getattr(settings, name)!r}" for name, fine in good.items() if not fine]:
        raise TrainingError(
            where, ", ".join(wrong), f"values as {type(settings).__name__} describes them", "Correct them."
        )
