"""`eyas` in this process, which takes a hundredth of a new one's time; and ways to break a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main

Break = Callable[[Path], None]


class House:
    """A working folder with a tiny recipe, its model and its conversations in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.model, self.recipe = folder / "tiny-deepseek-v3", str(folder / "recipe.yaml")
        self.store = f"file://{folder}/store"

    def run(self, *args: str) -> tuple[int, str]:
        """Exit code, and all that was said."""
        code = main(list(args))
        said = self.capsys.readouterr()
        return code, said.out + said.err

    def refused(self, *args: str, code: int, says: str) -> str:
        """It ends with this code and these words, in one line that is not endless."""
        found, said = self.run(*args)
        assert (found, says in said) == (code, True), said
        assert f"eyas {args[0]}: " in said and len(said.strip().splitlines()[-1]) < 1500
        return said


def config(**changed: Any) -> Break:
    """Keys of its config.json changed; `...` = taken out."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        content = {**json.loads(path.read_text()), **changed}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return change


def text(name: str, content: str) -> Break:
    """A file with this content."""

    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def without(pattern: str) -> Break:
    """No such files."""

    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change
