"""The prompts drafters are judged on: named, digested, and none of them seen in training."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from eyas_capture import contract
from hidden_states.dataset import Dataset, DatasetWriter
from hidden_states.errors import DataError
from hidden_states.plan import plan_batches
from hidden_states.prompts import render_prompt
from hidden_states.samples import Sample
from hidden_states.shard import pack_shard
from hidden_states.store import open_store
from infra.recipe_file import load_recipe
from tasks import prompt_sets as module
from tasks.evaluation import GREEDY
from tasks.prompt_sets import HELD_OUT, PromptSet, describe, prompt_sets
from tasks.serving import passes_of
from tests.flows.runs import tiny_recipe
from tests.hidden_states.stored import FINGERPRINT, Capture

QUESTIONS = [f"What is {n} and {n}?" for n in range(12)]


class Place:
    """A tiny target, and a dataset whose samples answer the first six questions: two are held out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe_path = tiny_recipe(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tiny-deepseek-v3")
        self.ids = [render_prompt([{"role": "user", "content": question}], tokenizer) for question in QUESTIONS]
        samples = [Sample.of([*ids, 7, 8, 9], [0] * len(ids) + [1, 1, 1], "test") for ids in self.ids[:6]]
        # the same prompt on both sides of the split, with another reply: data that brings its own replies can do that
        samples.append(Sample.of([*self.ids[0], 9, 9], [0] * len(self.ids[0]) + [1, 1], "test"))
        self.held_out = [samples[5], samples[6]]
        store = open_store((folder / "store").as_uri())
        writer, batches = DatasetWriter(store, "data-v1", FINGERPRINT), plan_batches(samples, 200)
        dumps = Capture(folder / "dumps").dumps(samples)
        for batch in batches:
            writer.commit_batch(pack_shard(batch, dumps, folder / "shard"))
        writer.commit_manifest(
            [b.id for b in batches], held_out_share=0.1, held_out=frozenset(s.id for s in self.held_out)
        )
        self.dataset = Dataset.open(store, "data-v1")

    def write(self, name: str, rows: list[dict[str, Any]]) -> str:
        path, text = self.folder / name, "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    def sets(self, *sections: dict[str, Any], **evaluate: Any) -> dict[str, PromptSet]:
        overrides = [f"evaluate.sets={json.dumps(sections)}", *(f"evaluate.{k}={v}" for k, v in evaluate.items())]
        return {s.name: s for s in prompt_sets(load_recipe(str(self.recipe_path), overrides), self.dataset)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(tmp_path_factory.mktemp("sets"))


def chat(questions: list[str], **more: Any) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "x"}], **more} for q in questions
    ]


def test_the_held_out_set_leaves_out_what_training_has_seen_in_other_words(place: Place) -> None:
    found = place.sets()[HELD_OUT]
    assert [prompt.ids for prompt in found.prompts] == [place.ids[5]]
    assert found.in_training == 1  # its prompt is in the training split with another reply
    assert found.version == "data-v1" and found.prompts[0].source == place.held_out[0].id


def test_a_prompt_of_a_named_set_that_is_in_training_is_left_out_and_counted(place: Place) -> None:
    path = place.write("chat.jsonl", chat(QUESTIONS))
    found = place.sets({"name": "chat", "path": path, "version": "3"})["chat"]
    assert found.in_training == 5
    assert sorted(prompt.ids for prompt in found.prompts) == sorted(place.ids[5:])
    assert all(contract.tokens_sha256(prompt.ids) == prompt.digest for prompt in found.prompts)
    assert (found.version, found.domain) == ("3", "chat")


def test_human_eval_is_read_as_it_is_published(place: Place) -> None:
    rows = [
        {"task_id": f"HumanEval/{n}", "prompt": q, "entry_point": "f", "test": "t"} for n, q in enumerate(QUESTIONS)
    ]
    path = place.write("HumanEval.jsonl.gz", rows)
    found = place.sets({"name": "humaneval", "path": path, "prompts": 3})["humaneval"]
    assert len(found.prompts) == 3 and found.in_training == 5
    assert [prompt.digest for prompt in found.prompts] == sorted(prompt.digest for prompt in found.prompts)


def test_rows_of_another_domain_are_left_out_and_the_digest_is_of_the_content(place: Place) -> None:
    code, talk = chat(QUESTIONS[6:9], domain="code"), chat(QUESTIONS[9:], domain="chat")
    both = place.write("both.jsonl", [*code, *talk])
    alone = place.write("code.jsonl", list(reversed(code)))
    other = place.write("other.jsonl", [*code, *chat(["What is new?"], domain="code")])
    names = {"a": both, "b": alone, "c": other}
    found = place.sets(*({"name": name, "path": path, "domain": "code", "prompts": 2} for name, path in names.items()))
    assert found["a"].digest == found["b"].digest != found["c"].digest
    assert found["a"].prompts[0].ids == found["b"].prompts[0].ids
    assert found["a"].domain == "code"


@pytest.mark.parametrize(
    ("questions", "section", "says"),
    [
        (QUESTIONS[:5], {}, "all 5 prompts are in the training split"),
        (QUESTIONS, {"domain": "maths"}, "no usable prompt of domain maths"),
        (None, {}, "cannot be read"),
    ],
)
def test_a_set_of_which_nothing_is_left_is_refused(place: Place, questions: Any, section: Any, says: str) -> None:
    path = str(place.folder / "none.jsonl")
    if questions:
        path = place.write("rows.jsonl", chat(questions, domain="chat"))
    with pytest.raises(DataError, match=says):
        place.sets({"name": "s", "path": path, **section})


def test_production_settings_are_served_after_the_greedy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SimpleNamespace(model_dump=lambda: {"temperature": 0.7, "top_p": 0.9, "top_k": -1})
    sets = [PromptSet(name, "1", "d", name, []) for name in ("held-out", "code")]
    job = SimpleNamespace(recipe=SimpleNamespace(evaluate=SimpleNamespace(sampling=sampling)))
    passes = passes_of(job, sets)  # type: ignore[arg-type]
    assert [one.key for one in passes] == ["held-out", "code", "held-out/production", "code/production"]
    assert [one.sampling == GREEDY for one in passes] == [True, True, False, False]
    said: list[str] = []
    log = SimpleNamespace(info=lambda *a: None, warning=lambda text, *a: said.append(text % a))
    monkeypatch.setattr(module, "get_run_logger", lambda: log)
    assert describe([PromptSet("code", "2", "d", "code", [], in_training=3)])[0]["in_training"] == 3
    assert said == ["prompt set code: 3 prompts are in the training split and were left out"]
