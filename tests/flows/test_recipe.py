"""A recipe is checked before anything starts, and says in words what is wrong with it."""

import re
from pathlib import Path

import pytest
import torch

from hidden_states.dataset_writer import check_name
from hidden_states.errors import DatasetError, RecipeError, StoreError
from hidden_states.store import open_store
from infra.recipe_file import RECIPES, load_recipe

SHIPPED = sorted(p.stem for p in RECIPES.glob("*.yaml"))
NUMBERS = sorted(
    {key for key, value in load_recipe("demo-smollm2").flat().items() if isinstance(value, float)}
    | {"train.max_seconds", "evaluate.min_acceptance_length"}
)


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
        ("=3", r"override '=3': no key before the `=`"),
        (".=1", r"the key `\.` has an empty part"),
        ("train..lr=1", r"the key `train\.\.lr` has an empty part"),
        ("train.=1", r"the key `train\.` has an empty part"),
        ("name.x=1", r"`name` is not a section"),
        ("train=1", r"`train`: 1 \(int\); expected a section: a mapping of keys"),
        ("register=[1]", r"`register`: \[1\] \(list\); expected a section"),
        ("capture.servers=[1]", r"`capture\.servers\.0`: 1 \(int\); expected a section"),
        ("server.flags=1", r"`server\.flags`: 1 \(int\); expected a mapping of keys"),
        ("server.env={1: a}", r"the key 1 is no word"),
        ("data.conversations=[]", r"expected one entry at least"),
        ("train.lr=2026-13-45", r"2026-13-45 looks like a date and is none"),
        ("train.lr=" + "9" * 5000, r"looks like an integer and is none"),
        ("train.lr=" + "[" * 3000, r"nested too deeply"),
        ("train.lr=[", r"not readable as YAML"),
        ("name=" + "x y" * 2000, r"`name`: 'x y.*\.\.\. \(6,002 characters\)"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_key_and_what_was_expected(override: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as refusal:
        load_recipe("demo-smollm2", [override])
    said = str(refusal.value)
    assert len(said) < 600 and "\n" not in said
    assert not re.search(r"instance of|dictionary|Input should|unicode string|Traceback|pydantic", said)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e400"])
@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_is_infinite_or_none(key: str, value: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(key)):
        load_recipe("demo-smollm2", [f"{key}={value}"])


@pytest.mark.parametrize("value", ['"a\\0b"', "!!binary /w==", "!!binary aGk=", "{a: [!!binary aGk=]}", '{a: "\\0"}'])
@pytest.mark.parametrize("key", ["target.model_path", "server.dump_dir", "data.template_kwargs", "server.flags"])
def test_no_value_holds_bytes_that_are_no_text(key: str, value: str) -> None:
    """No path can have them, and the recipe's digest and the pages are text."""
    with pytest.raises(RecipeError, match="bytes that are no text"):
        load_recipe("demo-smollm2", [f"{key}={value}"])


@pytest.mark.parametrize(
    "uri", ["file:///a?b", "file:///a#b", "s3://b/p?q", "s3://b/p#q", "s3://[x", "file://[x", "s3://"]
)
def test_a_store_that_another_folder_would_be_taken_for_is_none(uri: str) -> None:
    with pytest.raises(RecipeError, match=r"`store\.uri`.*is no store"):
        load_recipe("demo-smollm2", [f"store.uri={uri!r}"])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**400])
def test_a_seed_is_what_the_generators_take(seed: int) -> None:
    with pytest.raises(RecipeError, match=r"train\.seed"):
        load_recipe("demo-smollm2", [f"train.seed={seed}"])
    for possible in (2**64 - 1, -(2**63)):
        torch.Generator().manual_seed(load_recipe("demo-smollm2", [f"train.seed={possible}"]).train.seed)


@pytest.mark.parametrize("name", ["-x", "..", ".", ".hidden", "_", "a/b", "a b", "", "ü", "a", "0", "A.b_c-d", "a.."])
def test_a_name_is_one_that_the_dataset_writer_takes(name: str) -> None:
    """The dataset's, the recipe's (which is the dataset's where that has none), and a prompt set's."""
    for given in (f"dataset.name={name!r}", f"name={name!r}", f"evaluate.sets=[{{name: {name!r}, path: p}}]"):
        more = ["evaluate.required=null"]
        try:
            check_name(name)
        except DatasetError:
            with pytest.raises(RecipeError, match="name"):
                load_recipe("demo-smollm2", [given, *more])
        else:
            load_recipe("demo-smollm2", [given, *more])


@pytest.mark.parametrize(
    "uri",
    ["foo", "", "s3://", "s3:///x", "s3:x", "http://x", "file://x", "file:x", "/data", "gs://b/x", "s3://u:p@b/x",
     "s3://b", "s3://b/x/y", "file:///data/x"],
)  # fmt: skip
def test_a_store_is_one_that_can_be_opened(uri: str) -> None:
    try:
        open_store(uri)
    except StoreError:
        with pytest.raises(RecipeError, match=r"`store\.uri`") as refusal:
            load_recipe("demo-smollm2", [f"store.uri={uri!r}"])
        assert "u:p" not in str(refusal.value)
    else:
        assert load_recipe("demo-smollm2", [f"store.uri={uri!r}"]).store.uri == uri


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_bound_on_acceptance_is_one_that_can_be_met(steps: int) -> None:
    drafted = f"evaluate.num_steps={steps}"
    load_recipe("demo-smollm2", [drafted, f"evaluate.min_acceptance_length={steps + 1}"])
    with pytest.raises(RecipeError, match=f"can never be met.*at most {steps + 1}"):
        load_recipe("demo-smollm2", [drafted, f"evaluate.min_acceptance_length={steps + 1.01}"])


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text((RECIPES / "demo-smollm2.yaml").read_text() + "\nname: again\n")
    with pytest.raises(RecipeError, match="given twice"):
        load_recipe(str(file))


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ("? [1, 2]\n: 3\n", "a key is a sequence, not a word"),
        ("? {a: 1}\n: 3\n", "a key is a mapping, not a word"),
        ("? !!set {a}\n: 3\n", "a key is a mapping"),
        ("&a [*a]: 3\n", "a key is a sequence"),
        ("3: 4\n", "the key 3 is no word"),
        ("yes: 4\n", "the key yes is no word"),
        ("2026-13-45: 4\n", "2026-13-45 looks like a date and is none"),
        ("x: 2026-13-45\n", "2026-13-45 looks like a date and is none"),
        ("x: 2026-11-30 99:00:00\n", "looks like a date and is none"),
        ("x: !!timestamp x\n", "looks like a date and is none"),
        ("x: !!int x\n", "looks like an integer and is none"),
        ("x: !!float x\n", "looks like a number and is none"),
        ("x: !!bool x\n", "looks like true or false and is none"),
        ("x: !!python/object:os.system 1\n", "could not determine a constructor"),
        ("x: &x [*x]\n", "recursive"),
        ("x: *nowhere\n", "found undefined alias"),
        ("<<: 3\n", "for merging"),
        ("<<: *nowhere\n", "found undefined alias"),
        ("name: again\n", "key 'name' is given twice"),
    ],
)
def test_yaml_that_is_no_recipe_is_refused_with_its_line(added: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    text = (RECIPES / "demo-smollm2.yaml").read_text()
    file.write_text(text + added)
    with pytest.raises(RecipeError, match=re.escape(says)) as refusal:
        load_recipe(str(file))
    assert f"line {text.count(chr(10)) + 1}: " in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_merge_key_brings_what_the_mapping_does_not_say_itself(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    text = (RECIPES / "demo-smollm2.yaml").read_text()
    assert "capture:" in text
    two = "\n  servers:\n    - &one {dump_dir: a, env: {A: a}}\n    - {<<: *one, dump_dir: b}"
    file.write_text(re.sub(r"(?m)^capture:.*$", lambda match: match[0] + two, text))
    first, second = load_recipe(str(file)).capture.servers
    assert (first.dump_dir, second.dump_dir, second.env) == ("a", "b", {"A": "a"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 5000, "it cannot be looked up"), ("/" + "x/" * 3000, "it cannot be looked up"), ("", "no such recipe"),
        ("a\0b", "no such recipe"), (".", "it is a folder"), ("..", "it is a folder"), ("nowhere/x", "no such recipe"),
    ],
    ids=["long", "long-path", "empty", "nul", "folder", "parent", "nowhere"],
)  # fmt: skip
def test_a_name_that_leads_to_no_recipe_is_refused(name: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as refusal:
        load_recipe(name)
    assert ", ".join(SHIPPED) in str(refusal.value) and len(str(refusal.value)) < 300


def test_a_folder_called_like_a_shipped_recipe_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo-smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_recipe("demo-smollm2").name == "demo-smollm2"


@pytest.mark.parametrize("content", ["- a\n- b\n", "just words", "a: [", "\x00", "", "[" * 3000])
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
