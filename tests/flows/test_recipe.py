"""A recipe is checked before anything starts, and says in words what is wrong with it."""

import re
from pathlib import Path

import pytest

from hidden_states.errors import RecipeError
from infra.recipe_file import RECIPES, load_recipe

SHIPPED = sorted(p.stem for p in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_is_valid_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    import yaml

    recipe = load_recipe(name)
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(recipe.as_dict()))
    # both numberings and both servers are optional: what was left out stays left out
    assert load_recipe(str(copy)).digest == recipe.digest


@pytest.mark.parametrize("key", sorted(load_recipe("demo-smollm2").flat()))
def test_a_misspelt_key_names_the_one_that_was_meant(key: str) -> None:
    *section, last = key.split(".")
    misspelt = ".".join([*section, last[:1] + last[2:] if len(last) > 3 else last + "s"])
    with pytest.raises(RecipeError) as refusal:
        load_recipe("demo-smollm2", [f"{misspelt}=1"])
    assert f"`{misspelt}`" in str(refusal.value)
    assert f"The nearest known key is `{key}`" in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr=fast", r"`train\.lr`: 'fast' \(str\); expected number"),
        ("train.lr=-1", r"`train\.lr`: -1 \(int\); expected greater than 0"),
        ("train.lr=true", r"`train\.lr`: True \(bool\)"),
        ("evaluate.prompts=2.5", r"`evaluate\.prompts`: 2\.5 \(float\); expected integer"),
        ("evaluate.prompts='12'", r"`evaluate\.prompts`: '12' \(str\)"),
        ("data.conversations=one.jsonl", r"`data\.conversations`: 'one\.jsonl' \(str\); expected list"),
        ("data.held_out_share=1.5", r"expected less than or equal to 1"),
        ("capture.after_block=[5, 3]", r"ascending"),
        ("capture.after_block=[-1, 3]", r"not negative"),
        ("capture.capture_points=[2, 3]", r"either `after_block` or `capture_points`"),
        ("server.python=null", r"give `python`.*or `url`"),
        ("server.url=http://127.0.0.1:1", r"with `url`, `dump_dir` must name"),
        ("server.port=70000", r"`server\.port`: 70000"),
        ("train.max_seconds=null", r"training needs an end"),
        ("train.schedule=exponential", r"'cosine', 'linear' or 'wsd'"),
        ("name=a b", r"`name`: 'a b'"),
        ("target=null", r"`target`"),
        ("evaluate.sets=[{name: held-out, path: p}]", r"two prompt sets are called held-out"),
        ("evaluate.sets=[{name: code}]", r"`evaluate\.sets\.0\.path`: missing"),
        ("evaluate.required=[maths]", r"`required` names maths; the sets are held-out, code, chat"),
        ("evaluate.required=[]", r"`evaluate\.required`"),
        ("evaluate.sampling={temperature: 0.7}", r"on a CPU SGLang verifies greedily"),
        ("evaluate.sampling={top_p: 0.7}", r"`evaluate\.sampling\.temperature`: missing"),
        ("nothing", r"it has no `=`"),
        ("name.x=1", r"`name` is not a section"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_key_and_what_was_expected(override: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe("demo-smollm2", [override])


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text((RECIPES / "demo-smollm2.yaml").read_text() + "\nname: again\n")
    with pytest.raises(RecipeError, match="given twice"):
        load_recipe(str(file))


@pytest.mark.parametrize("content", ["- a\n- b\n", "just words", "a: [", "\x00", ""])
def test_a_file_that_is_no_recipe_is_refused_not_crashed_on(content: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError, match=re.escape(str(file))):
        load_recipe(str(file))


def test_a_recipe_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(RecipeError, match=", ".join(SHIPPED)):
        load_recipe("demo")


def test_both_numberings_mean_the_same_blocks() -> None:
    assert load_recipe("kimi-k2.5").capture.blocks == [2, 30, 58]
    assert load_recipe(
        "kimi-k2.5", ["capture.capture_points=null", "capture.after_block=[2, 30, 58]"]
    ).capture.blocks == [
        2,
        30,
        58,
    ]


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert load_recipe("demo-smollm2", ["train.lr=1e-4"]).train.lr == 1e-4


def test_the_page_of_recipe_keys_is_that_of_the_code() -> None:
    from infra.recipe_reference import reference

    page = RECIPES.parents[1] / "docs" / "recipe.md"
    assert page.read_text() == reference(), "run: .venv/bin/python -m infra.recipe_reference > docs/recipe.md"
