"""Entry point of the SGLang plugin."""


def register() -> None:
    """Called by SGLang in each of its processes."""
