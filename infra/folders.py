"""Folders that may not exist yet."""

from pathlib import Path


def nearest(path: Path) -> Path:
    """What is there of an absolute path: itself, or the lowest of its parents that exists (which may be a file).

    Raises: OSError where it cannot be looked up.
    """
    return next(place for place in (path, *path.parents) if place.exists())
