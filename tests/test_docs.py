"""What the papers point at exists: files, modules, recipe keys, commands."""

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from flows.cli import main, parser
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


# --- commands ------------------------------------------------------------------------------------------------------

PROMPT = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?(eyas|make|docker|sbatch|prefect)\s+(.*)$")


def commands(paper: Path) -> list[tuple[str, str]]:
    """(program, arguments) of every command in a paper: in a code block, or in the text between backticks."""
    text = paper.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    indented = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines = [line for block in blocks for line in block.splitlines()] + indented
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = []
    for line in lines:
        if match := PROMPT.match(line.split(" #")[0].strip()):
            found.append((match[1], re.split(r"\s{3,}|\s\(|;\s", match[2])[0].strip()))
    return found


EVERY = [(paper, *command) for paper in PAPERS for command in commands(paper)]


def ours(program: str) -> list[object]:
    return [pytest.param(rest, id=f"{paper.stem}: {rest}"[:70]) for paper, name, rest in EVERY if name == program]


@pytest.mark.parametrize("words", ours("eyas"))
def test_every_eyas_command_in_the_papers_is_one_that_eyas_takes(words: str) -> None:
    """Up to its placeholders: `RECIPE`, `<dataset>`, `...`, `list|show`."""
    first = shlex.split(words.replace("...", "").replace("[key=value ]", "").replace("[key=value]", ""))
    for number, word in enumerate(first):
        if "|" in word and not word.startswith("<"):
            first[number] = word.split("|")[0]
    line = [word for word in first if word]
    commands_of_eyas = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert line[0] in commands_of_eyas, f"eyas has no command {line[0]}"
    options = {name for action in commands_of_eyas[line[0]]._actions for name in action.option_strings}
    assert not [word for word in line[1:] if word.startswith("--") and word.split("=")[0] not in options]
    if len(line) > 1 and not any(word.isupper() or "<" in word for word in line):
        parser().parse_args(line)


@pytest.mark.parametrize("words", ours("make"))
def test_every_make_command_in_the_papers_is_a_target(words: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert words.split()[0] in targets or "=" in words.split()[0]


@pytest.mark.parametrize("words", [*ours("docker"), *ours("sbatch")])
def test_files_and_services_that_the_papers_start_exist(words: str) -> None:
    services = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
    named = re.findall(r"infra/[\w./-]+", words)
    assert named and all((ROOT / name).exists() for name in named)
    if run := re.search(r"run --rm (\w+)", words):
        assert run[1] in services


@pytest.mark.parametrize("words", ours("prefect"))
def test_every_prefect_command_in_the_papers_is_one_of_those_tried(words: str) -> None:
    known = ("--no-prompt deploy", "worker start", "work-pool create", "automation create", "flow-run retry",
             "gcl update")  # fmt: skip
    assert words.startswith(known), words


def test_the_sizes_and_times_of_kimi_follow_from_its_shape_and_the_rates_beside_them() -> None:
    text = (ROOT / "docs" / "kimi-k2.5.md").read_text(encoding="utf-8")
    small, large = (samples * 2048 for samples in (10_000, 600_000))
    assert f"({small / 1e6:.1f} million tokens)" in text and f"({large / 1e9:.2f} billion tokens)" in text
    assert "57,344" in text and 4 * 7168 * 2 == 57_344
    sizes = re.findall(r"\| ([\d,]+) \| ([\d.]+) TB \| ([\d.]+) TB \|", text)
    assert len(sizes) == 4
    for per_token, one, other in sizes:
        of_a_token = int(per_token.replace(",", ""))
        assert float(one) == round(small * of_a_token / 1e12, 2)
        assert float(other) == round(large * of_a_token / 1e12, 1)
    hour = 3600
    for row, per_sample, rate in (
        ("prefill at 10,000", 2048, 10_000), ("prefill at 40,000", 2048, 40_000),
        ("upload as captured", 2048 * 57_344, 1e9), ("upload as `int8`", 2048 * 28_688, 1e9),
        ("replies of 1,024 tokens at 2,000", 1024, 2_000), ("replies of 1,024 tokens at 10,000", 1024, 10_000),
    ):  # fmt: skip
        found = re.search(re.escape(row) + r"[^|]*\| ([\d.]+) (min|h) \| ([\d.]+) h \|", text)
        assert found is not None, row
        seconds = [samples * per_sample / rate for samples in (10_000, 600_000)]
        assert float(found[1]) == pytest.approx(seconds[0] / (60 if found[2] == "min" else hour), rel=0.05)
        assert float(found[3]) == pytest.approx(seconds[1] / hour, rel=0.05)


def test_what_the_papers_show_of_a_plan_is_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kimi-k2.5"]) == 0
    said = capsys.readouterr().out.splitlines()
    guide = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8")
    shown = guide.partition("$ eyas plan kimi-k2.5\n")[2].partition("\n\n")[0].splitlines()
    assert [line.removeprefix("    ") for line in shown] == said
    kimi = (ROOT / "docs" / "kimi-k2.5.md").read_text(encoding="utf-8")
    (on_disk,) = [line for line in said if line.startswith("on local disk")]
    size = re.search(r"about ([\d.]+ GB)", on_disk)
    assert size and f"holds a few batches, {size[1]} with the recipe as shipped" in kimi
    lines = kimi.partition("    eyas plan kimi-k2.5\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == 3 and {line.strip() for line in lines} <= set(said)
