"""Bad input ends with a message that says what, where and what to do; no traceback, and nothing is left running."""

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.fault_proxy import poor_store
from tests.flows.runs import CHECKOUT, Place, tiny_recipe

CASES = CHECKOUT / "tests" / "cases"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refused(place: Place, *args: str, code: int | None = None) -> str:
    """Run it and check the manner of its end; returns what was said."""
    status, output = place.run(*args)
    assert status not in (0, 130), output
    if code is not None:
        assert status == code, output
    assert "Traceback" not in output, output
    assert f"eyas {args[0]}: " in output, output
    assert not place.wait_empty(10)
    return output


@pytest.mark.parametrize("command", ["run", "plan", "doctor"])
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.learning_rate=1", "unknown key"),
        ("train.lrr=1", "The nearest known key is `train.lr`"),
        ("evaluate.prompts=many", "expected integer"),
        ("capture.after_block=[4, 1]", "ascending"),
    ],
)
def test_a_bad_recipe_is_refused_by_every_command_before_anything_starts(
    place: Place, command: str, override: str, says: str
) -> None:
    recipe = tiny_recipe(place.folder)
    assert says in refused(place, command, str(recipe), override, code=2)
    assert not (place.folder / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "says", "code"),
    [
        (["target.model_path=/nonexistent/model"], "/nonexistent/model is not a model folder", 2),
        (["server.python=/nonexistent/python"], "/nonexistent/python is no program", 2),
        (["data.max_tokens=100000"], "at most the target's context of 4096", 2),
        (["regenerate.max_new_tokens=128"], "less than data.max_tokens (128)", 2),
        (["train.draft_vocab_size=5000"], "at most the target's vocabulary of 1024", 2),
        (["capture.after_block=[1, 2, 5]"], "at most block 4 of 6", 2),
        (["evaluate.sets=[{name: code, path: none.jsonl}]"], "none.jsonl is no file", 2),
        (["evaluate.url=http://127.0.0.1:9"], "it is for `eyas evaluate`", 2),
        (["data.held_out_share=0.0"], "some on either side", 3),
        (["data.conversations=[empty.jsonl]"], "empty.jsonl", 3),
        (["data.conversations=[nowhere.jsonl]"], "nowhere.jsonl", 3),
        ([f"data.conversations=[{CASES}/broken_on_line_17.jsonl]"], "broken_on_line_17.jsonl:17: not JSON", 3),
        (
            [f"data.conversations=[{CASES}/longer_than_the_context.jsonl]", "regenerate.enabled=false",
             "data.when_too_long=refuse"],
            "longer_than_the_context.jsonl:1", 3,
        ),
        (["extract.batch_tokens=100000000000"], "bytes free", 2),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_the_plan(place: Place, overrides: list[str], says: str, code: int) -> None:
    (place.folder / "empty.jsonl").write_text("")
    recipe = tiny_recipe(place.folder)
    assert says in refused(place, "plan", str(recipe), *overrides, code=code)


def test_a_token_id_outside_the_vocabulary_is_refused_by_the_plan(place: Place) -> None:
    recipe = tiny_recipe(place.folder)
    config = place.folder / "tiny-deepseek-v3" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 300}))
    said = refused(place, "plan", str(recipe), "train.draft_vocab_size=256", code=3)
    assert "the target's vocabulary has 300 entries" in said
    assert "conversations.jsonl:" in said


def test_a_refusal_is_one_json_object_when_a_program_asks(place: Place) -> None:
    process = place.start("plan", str(tiny_recipe(place.folder)), "train.lrr=1", "--json")
    output, _ = process.communicate(timeout=120)
    answer = json.loads(output[: output.index("\neyas plan:")])
    assert answer["ok"] is False
    assert answer["error"]["type"] == "RecipeError"
    assert set(answer["error"]) == {"type", "where", "found", "expected", "do"}


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached_ends_the_run_before_a_server_starts(place: Place) -> None:
    recipe = tiny_recipe(place.folder, store={"uri": "s3://eyas/x", "endpoint_url": "http://127.0.0.1:9"})
    place.env |= {"AWS_ACCESS_KEY_ID": "planted-access", "AWS_SECRET_ACCESS_KEY": "planted-secret"}
    said = refused(place, "run", str(recipe), code=6)
    assert "127.0.0.1:9" in said
    assert "planted-secret" not in said
    assert not list(place.folder.glob("runs/*/sglang*.log"))


@pytest.mark.slow
def test_a_bucket_that_cannot_be_written_ends_the_run_before_a_server_starts(place: Place) -> None:
    file = place.folder / "a-file"
    file.write_text("")
    recipe = tiny_recipe(place.folder, store={"uri": f"file://{file}/datasets"})
    assert str(file) in refused(place, "run", str(recipe), code=6)
    assert not list(place.folder.glob("runs/*/sglang*.log"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor", "run"])
def test_a_bucket_in_which_a_second_put_overwrites_is_refused_before_a_server_starts(
    place: Place, command: str
) -> None:
    """Every shard is put so that it cannot overwrite another's: the first upload would fail, after hours."""
    place.env |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with poor_store() as url:
        recipe = str(tiny_recipe(place.folder, store={"uri": "s3://bucket/x", "endpoint_url": url}))
        if command == "run":
            said = refused(place, "run", recipe, code=6)
        else:
            status, said = place.run("doctor", recipe)
            assert status != 0 and "FAIL  store " in said
    assert "a second put with If-None-Match overwrote the first" in said
    assert not list(place.folder.glob("runs/*/sglang*.log"))


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why_and_leaves_nothing(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        recipe = tiny_recipe(place.folder, store={"uri": f"file://{place.folder}/store"}, server={"port": port})
        said = refused(place, "run", str(recipe), code=4)
    assert str(port) in said and "listens there" in said


@pytest.mark.slow
def test_a_server_that_dies_on_start_shows_its_last_words(place: Place) -> None:
    recipe = tiny_recipe(
        place.folder, store={"uri": f"file://{place.folder}/store"}, server={"flags": {"no-such-flag": True}}
    )
    said = refused(place, "run", str(recipe), code=4)
    assert "no-such-flag" in said and "the server died" in said


@pytest.mark.slow
def test_a_server_that_never_gets_ready_is_ended_with_its_stacks_saved(place: Place) -> None:
    script = place.folder / "python"
    script.write_text(f"#!/bin/sh\nexec {SLEEPER}\n")
    script.chmod(0o755)
    recipe = tiny_recipe(
        place.folder,
        store={"uri": f"file://{place.folder}/store"},
        server={"python": str(script), "ready_deadline_s": 3},
    )
    said = refused(place, "run", str(recipe), code=4)
    assert "not ready after 3 s" in said
    stacks = list(place.folder.glob("runs/*/*.stacks.txt"))
    assert stacks and "threading" in stacks[0].read_text()


SLEEPER = f"""{sys.executable} -c 'import threading; threading.Event().wait()'"""
