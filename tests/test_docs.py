"""What the papers point at exists: files, modules, recipe keys."""

import importlib.util
import re
from pathlib import Path

import pytest

from infra.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAPERS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "server_patch").glob("*.md")])
SECTIONS = {field.alias or name for name, field in Recipe.model_fields.items()} - {"name"}


def recipe_keys() -> set[str]:
    return {
        f"{field.alias or name}.{key}"
        for name, field in Recipe.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_links_between_the_papers_lead_somewhere(paper: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", paper.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (paper.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_files_that_the_papers_name_exist(paper: Path) -> None:
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|yaml))`", paper.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_modules_that_the_papers_run_exist(paper: Path) -> None:
    ours = re.findall(r"python -m ((?:benchmarks|infra|flows|tasks)\.\w+)", paper.read_text(encoding="utf-8"))
    assert not [name for name in ours if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_recipe_keys_that_the_papers_name_exist(paper: Path) -> None:
    named = re.findall(r"(?<![\w./])(\w+\.\w+)(?:=[\w.-]+)?(?![\w./(])", paper.read_text(encoding="utf-8"))
    keys = {name for name in named if name.split(".")[0] in SECTIONS and not name.endswith((".py", ".md", ".json"))}
    assert keys <= recipe_keys()
