"""What would fail after hours is refused by the plan."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.deployments import deployments
from hidden_states.errors import DataError, RecipeError, TrainingError
from infra.recipe import Recipe
from infra.recipe_file import load_recipe
from tasks.planning import make_plan
from tests.flows.runs import tiny_recipe


def rows(*messages: list[dict[str, str]], **more: Any) -> bytes:
    return "".join(json.dumps({"messages": list(turns), **more}) + "\n" for turns in messages).encode()


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


UNUSABLE: dict[str, tuple[bytes, str]] = {
    "binary": (bytes(range(128, 256)) * 8, "not UTF-8 on line 1"),
    "random": (b"\x00" + os.urandom(500) + b"\n", "on line 1"),
    "empty": (b"", "no rows in it"),
    "blank": (b"\n  \n\n", "no rows in it"),
    "no JSON": (b"What is 1 and 1?\n", "not JSON on line 1"),
    "an array": (json.dumps([{"messages": asks("a")}]).encode(), "one JSON array"),
    "UTF-16": (rows(asks("a")).decode().encode("utf-16"), "encoded in UTF-16"),
    "cut gzip": (gzip.compress(rows(*[asks(str(n)) for n in range(900)]))[:-20], "ends early"),
    "a bad row": (rows(asks("a")) + b'{"text": 1}\n', "jsonl:2"),
    "another domain": (rows(asks("a"), asks("b"), domain="chat"), "no usable prompt of domain code"),
    "nothing to answer": (rows([{"role": "assistant", "content": "a"}]), "nothing to answer"),
    "too long": (rows(asks("a b c " * 3000)), "too long"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    tiny_recipe(made)
    return made


def recipe_with(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(str(folder / "recipe.yaml"), overrides)


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_prompt_set_of_which_nothing_could_be_served_is_refused_by_name(folder: Path, kind: str) -> None:
    content, says = UNUSABLE[kind]
    path = folder / "set.jsonl"
    path.write_bytes(content)
    given = f"evaluate.sets={json.dumps([{'name': 'mine', 'path': str(path), 'domain': 'code'}])}"
    with pytest.raises(DataError, match=says) as refusal:
        make_plan(recipe_with(folder, given))
    assert refusal.value.where == f"prompt set mine, {path}" and "evaluate.sets" in refusal.value.do
    assert make_plan(recipe_with(folder, given, "evaluate.enabled=false")).count


def test_a_prompt_set_that_can_be_served_is_planned(folder: Path) -> None:
    path = folder / "set.jsonl"
    path.write_bytes(rows(asks("a"), domain="chat") + rows(asks("b"), domain="code"))
    assert make_plan(recipe_with(folder, f"evaluate.sets=[{{name: mine, path: {path}, domain: code}}]")).count


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("train.drafter={fc_nrom: true}", "fc_nrom"),
        ("train.drafter={after_block: [1]}", "after_block"),
        ("train.drafter={hidden_size: 7}", "hidden_size"),
        ("train.start_from=/nowhere", "/nowhere"),
    ],
)
def test_a_drafter_that_cannot_be_trained_is_refused_before_anything_is_captured(
    folder: Path, given: str, says: str
) -> None:
    with pytest.raises(TrainingError, match=says):
        make_plan(recipe_with(folder, given))
    assert make_plan(recipe_with(folder, "train.drafter={fc_norm: true}")).count


def by_plan(recipe: Path) -> None:
    make_plan(load_recipe(str(recipe)))


def by_serve(recipe: Path) -> None:
    deployments([str(recipe)])


@pytest.mark.parametrize("refuses", [by_plan, by_serve])
@pytest.mark.parametrize(
    ("schedule", "key", "says"),
    [
        ({"cron": "every night"}, "cron", "every night"),
        ({"cron": "61 * * * *"}, "cron", "61"),
        ({"cron": "* * *"}, "cron", r"\* \* \*"),
        ({"cron": "R * * * *"}, "cron", "unsupported"),
        ({"cron": ""}, "cron", "Invalid cron"),
        ({"cron": "0 3 * * *", "timezone": "Mars/Olympus"}, "timezone", "Mars/Olympus"),
    ],
)
def test_a_schedule_that_is_none_is_refused_by_the_plan_as_it_is_by_serve(
    tmp_path: Path, refuses: Callable[[Path], None], schedule: dict[str, str], key: str, says: str
) -> None:
    with pytest.raises(RecipeError, match=says) as refusal:
        refuses(tiny_recipe(tmp_path, schedule=schedule))
    assert refusal.value.where == f"recipe tiny, `schedule.{key}`"
