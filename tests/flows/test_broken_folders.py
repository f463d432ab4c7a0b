"""A broken target, drafter, program or folder is named in a refusal, never shown as a traceback."""

import argparse
import json
import os
from pathlib import Path

import pytest

from flows import environment
from flows.cli import NO_ACCESS, main
from flows.doctor import examine
from hidden_states.errors import ServerError
from infra.lifeline import boot_id
from infra.object_store import credentials
from infra.recipe_file import load_recipe
from infra.services import LocalStack
from tests.flows.house import Break, House, config, text, without
from tests.tiny_models import make_tiny_draft

# --- the target's folder ---------------------------------------------------------------------------------------------

REMOTE = '{"tokenizer_class": "Kimi", "auto_map": {"AutoTokenizer": ["tokenization_kimi.Kimi", null]}}'
BROKEN_TARGETS: dict[str, tuple[Break, str, int]] = {
    "config empty": (text("config.json", ""), "not JSON", 2),
    "config cut": (text("config.json", '{"hidden_size": 1'), "not JSON", 2),
    "config a list": (text("config.json", "[]"), "no object (list)", 2),
    "config without keys": (text("config.json", "{}"), "`hidden_size` is None", 2),
    "hidden size x": (config(hidden_size="x"), "`hidden_size` is 'x'", 2),
    "hidden size true": (config(hidden_size=True), "`hidden_size` is True", 2),
    "blocks 1.5": (config(num_hidden_layers=1.5), "`num_hidden_layers` is 1.5", 2),
    "blocks -5": (config(num_hidden_layers=-5), "`num_hidden_layers` is -5", 2),
    "vocabulary 0": (config(vocab_size=0), "`vocab_size` is 0", 2),
    "context a word": (config(max_position_embeddings="long"), "`max_position_embeddings` is 'long'", 2),
    "text_config 3": (config(text_config=3), "`text_config` is no object", 2),
    "no tokenizer": (without("tokenizer*"), "cannot load its tokenizer", 3),
    "tokenizer {}": (text("tokenizer.json", "{}"), "cannot load its tokenizer", 3),
    "tokenizer a list": (text("tokenizer.json", "[]"), "cannot load its tokenizer", 3),
    "tokenizer cut": (text("tokenizer.json", '{"added_'), "cannot load its tokenizer", 3),
    "tokenizer_config a list": (text("tokenizer_config.json", "[]"), "cannot load its tokenizer", 3),
    "tokenizer_config cut": (text("tokenizer_config.json", "{"), "cannot load its tokenizer", 3),
    "tokenizer is code": (text("tokenizer_config.json", REMOTE), "`target.trust_remote_code: true`", 2),
}


@pytest.mark.parametrize("broken", BROKEN_TARGETS)
def test_a_broken_target_is_refused_by_plan_inspect_and_doctor(house: House, broken: str) -> None:
    change, says, code = BROKEN_TARGETS[broken]
    change(house.model)
    said = house.refused("plan", house.recipe, code=code, says=says)
    assert str(house.model) in said
    if code == 3 or "trust" in says:  # conversations need the tokenizer alone
        house.refused("inspect", "conversations.jsonl", "--recipe", house.recipe, code=code, says=says)
    found, said = house.run("doctor", house.recipe, f"store.uri={house.store}")
    lines = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert found == 1 and len([line for line in said.splitlines() if line[:4] in ("ok  ", "FAIL")]) == 7, said
    assert any(says in line and "conversations" in line for line in lines), said


# --- drafters and other things to inspect ----------------------------------------------------------------------------


BROKEN_DRAFTERS: dict[str, tuple[Break, str, int]] = {
    "config empty": (text("config.json", ""), "not JSON", 9),
    "config {}": (text("config.json", "{}"), "an empty object", 9),
    "config a list": (text("config.json", "[]"), "no object (list)", 9),
    "config a number": (text("config.json", "3"), "no object (int)", 9),
    "heads a word": (config(num_attention_heads="x"), "of another kind", 9),
    "architectures 3": (config(architectures=3), "of another kind", 9),
    "layer ids 3": (config(eagle_config={"eagle_aux_hidden_state_layer_ids": 3}), "of another kind", 9),
    "rope a word": (config(rope_scaling="x", rope_parameters="x"), "rope_type and numbers", 9),
    "weights cut": (text("model.safetensors", "x" * 100), "model.safetensors cannot be read", 1),
    "weights empty": (text("model.safetensors", ""), "model.safetensors cannot be read", 1),
    "no weights": (without("*.safetensors"), "there is no *.safetensors", 1),
    "lineage cut": (text("lineage.json", "{"), "lineage.json: it cannot be read", 1),
    "lineage a list": (text("lineage.json", "[]"), "lineage.json: no object (list)", 1),
}


@pytest.mark.parametrize("broken", BROKEN_DRAFTERS)
@pytest.mark.parametrize("with_recipe", [False, True], ids=["alone", "recipe"])
def test_a_broken_drafter_is_described_or_refused(house: House, broken: str, with_recipe: bool) -> None:
    change, says, code = BROKEN_DRAFTERS[broken]
    draft = Path(make_tiny_draft(house.model, house.folder / "draft"))
    change(draft)
    found, said = house.run("inspect", str(draft), *(["--recipe", house.recipe] if with_recipe else []))
    assert found == code and says in said, said


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        ("s3://", "no dataset's URI"), ("s3://bucket", "no dataset's URI"), ("s3://bucket/", "no dataset's URI"),
        ("s3:///x", "no dataset's URI"), ("foo://x/y", "no dataset's URI"), ("://", "no dataset's URI"),
        ("file://", "no dataset's URI"), ("file:///nowhere/x", "nothing there"), ("nowhere", "no such file or folder"),
        ("recipe.yaml/x", "no such file or folder"), ("x" * 5000, "it cannot be looked up"), ("", "no such file"),
        ("a\0b", "it cannot be looked up"), ("home", "no such file"),
    ],
)  # fmt: skip
def test_what_is_nothing_is_refused_by_name(house: House, thing: str, says: str) -> None:
    said = house.refused("inspect", thing, code=7 if says == "nothing there" else 2, says=says)
    assert ": : " not in said


# --- doctor ----------------------------------------------------------------------------------------------------------


PYTHONS = {
    "/bin/true": "it says nothing", "/bin/false": "ends with 1: it says nothing", "/bin/echo": "is no Python",
    "#!/nowhere/python\n": "cannot be started", "no program at all": "cannot be started",
    "#!/bin/sh\necho '[1]'\n": "is no Python", "#!/bin/sh\necho out of it >&2\nexit 3\n": "ends with 3: out of it",
    "#!/bin/sh\nprintf '\\377'\n": "is no Python", "#!/bin/sh\nexec sleep 60\n": "has not answered after 1 s",
}  # fmt: skip


@pytest.mark.parametrize("python", PYTHONS)
def test_a_program_that_is_no_python_with_sglang_is_one_line_of_doctor(
    house: House, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.doctor.ANSWERS_WITHIN_S", 1 if "sleep" in python else 60)
    path = python
    if not python.startswith("/"):
        script = house.folder / "python"
        script.write_text(python)
        script.chmod(0o755)
        path = str(script)
    found, said = house.run("doctor", house.recipe, f"server.python={path}", f"store.uri={house.store}")
    (line,) = [line for line in said.splitlines() if line[6:13] == "server "]
    assert found == 1 and line.startswith("FAIL") and PYTHONS[python] in line and path in line, said


@pytest.mark.parametrize("place", ["a-file", "a-file/below", "n" * 300, "fine/below"])
def test_a_dump_folder_that_cannot_be_one_is_not_called_fine(house: House, place: str) -> None:
    (house.folder / "a-file").write_text("")
    (house.folder / "fine").mkdir()
    recipe = load_recipe(house.recipe, [f"server.dump_dir={house.folder / place}", "server.python=/bin/false",
                                        f"store.uri={house.store}"])  # fmt: skip
    (found,) = [finding for finding in examine(recipe) if finding["part"] == "dump folder"]
    assert found["ok"] is (place == "fine/below"), found


# --- the state folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yaml/below", "n" * 300])
def test_a_state_folder_that_can_be_none_is_refused(house: House, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_HOME", name)
    monkeypatch.setattr("flows.cli.settle", environment.settle)
    monkeypatch.setattr(os, "environ", {key: v for key, v in os.environ.items() if not key.startswith("PREFECT")})
    house.refused("plan", house.recipe, code=2, says="EYAS_HOME")


def test_an_empty_eyas_home_is_none_and_prefects_home_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"EYAS_HOME": "", "HOME": str(tmp_path)})
    assert environment.state_dir() == tmp_path / ".eyas"
    environment.settle()
    assert Path(os.environ["PREFECT_HOME"]).parent.is_dir()  # Prefect makes one folder, not two


STATE_FILES = {
    "stack.json": ("", "[]", "null", "3", '"x"', "{", '{"urls": []}', '{"urls": null}', '{"urls": {"prefect": 3}}'),
    "services/prefect.pid.json": ("", "[]", "{}", "null", *(
        json.dumps({"lifeline": {"pid": 1, "start_time": 1}, "command": {"pid": 1, "start_time": 1}, "mark": "m",
                    "owner": {"pid": 1, "start_time": 1}, "boot_id": boot_id(), part: value})
        for part in ("lifeline", "command", "owner") for value in (None, 3, "x", [], {}, {"pid": 1})
    )),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, c) for name, found in STATE_FILES.items() for c in found])
def test_what_the_stack_wrote_down_may_be_damaged(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "stack.json").write_text('{"urls": {"prefect": "http://127.0.0.1:1/api"}}')
    (tmp_path / name).write_text(content)
    stack = LocalStack(tmp_path)
    assert stack.environment() == {} and not any(found["running"] for found in stack.status()["services"].values())
    assert stack.down() == [] and not (tmp_path / "stack.json").exists()


@pytest.mark.parametrize("content", ["", "[]", "null", "{", "{}", '{"access_key": "a"}'])
def test_damaged_credentials_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "credentials.json").write_text(content)
    with pytest.raises(ServerError, match=r"credentials\.json: damaged; .* Remove it"):
        credentials(tmp_path)


@pytest.mark.parametrize("code", NO_ACCESS)
@pytest.mark.parametrize("command", [["up"], ["down"], ["champion", "m"], ["datasets", "list"], ["compare", "a", "b"]])
def test_a_state_folder_that_cannot_be_written_is_named(
    house: House, command: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), "/state/prefect")

    monkeypatch.setattr(f"flows.cli.{command[0]}", refuse)
    house.refused(*command, code=1, says=f"/state/prefect: {os.strerror(code)}; expected room")


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["evaluate R --drafter D a=1 b=2", "evaluate R a=1 --drafter D b=2", "evaluate --drafter D R a=1 b=2",
     "evaluate R --json a=1 --drafter D b=2"],
)  # fmt: skip
def test_overrides_may_stand_behind_options(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr("flows.cli.evaluate", lambda args: seen.append(args) or 0)
    assert main(words.split()) == 0
    assert (seen[0].recipe, seen[0].overrides, seen[0].drafter) == ("R", ["a=1", "b=2"], "D")


@pytest.mark.parametrize(
    "words", ["rm D --yes --recipe R", "rm --yes D --recipe R", "rm --recipe R --yes D", "--yes --recipe R rm D"]
)
def test_a_dataset_may_be_named_behind_options(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr("flows.cli.datasets", lambda args: seen.append(args) or 0)
    assert main(["datasets", *words.split()]) == 0
    assert (seen[0].action, seen[0].place, seen[0].yes, seen[0].recipe) == ("rm", "D", True, "R")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plan R --jsn a=1", "unrecognized arguments: --jsn a=1"), ("plan", "arguments are required: recipe\n"),
        ("inspect x y", "unrecognized arguments: y"), ("champion m 3", "unrecognized arguments: 3"), ("", "COMMAND"),
        ("datasets rm --yes a b", "unrecognized arguments: a b"),
        ("datasets rm a --yes b", "unrecognized arguments: b"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("action", ["show", "verify", "rm"])
def test_a_dataset_must_be_named(house: House, action: str) -> None:
    house.refused("datasets", action, code=2, says="no dataset is named")
