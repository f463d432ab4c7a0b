"""Prediction against reality: compared on the very replies that were served, looked into when they differ, never
promoted when the cause is a spoiled drafter. Serving is played by the replay of what a server would run."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafter.diagnosis import as_served, read_weights, replayed
from drafter.model import TargetWeights
from hidden_states.shard_file import SampleRows
from tasks import prediction as module
from tasks.champion import reasons_against
from tasks.evaluation import GREEDY, Answer, Evaluation, SetRecord
from tasks.prediction import prediction
from tasks.prompt_sets import HELD_OUT
from tests.drafter.conftest import one_thread
from tests.drafter.test_acceptance import BLOCKS, PROMPT, STEPS
from tests.drafter.test_diagnosis import (
    Made,
    Spoil,
    made,
    shuffled_map,
    spoiled,
    wrong_layers,
    wrong_scaling,
    wrong_theta,
)

FIXTURES = (made, one_thread)

pytestmark = pytest.mark.slow


class Served:
    """A job whose drafter has been served: 8 held-out prompts, whose replies are the dataset's."""

    def __init__(self, made: Made, folder: Path, *, bound: float = 0.1, foreign: int = 0) -> None:
        """`foreign`: so many replies are other texts than the dataset's."""
        self.folder, documents = folder, {f"s{n}": d for n, d in enumerate(made.documents)}
        found = as_served(folder, made.target, "float32")
        rows = made.rows(found.config.after_block)
        assert rows is not None
        self.acceptance = replayed(found, read_weights(folder), TargetWeights.load(made.target), rows, STEPS)
        hits = round(1000 * (self.acceptance - 1))
        histogram = [1000 - hits, hits] if hits <= 1000 else [0, 2000 - hits, hits - 1000]

        def read(sample: str) -> SampleRows:
            d = documents[sample]
            return SampleRows(d["ids"], d["learn"].to(torch.uint8), d["aux"], d["final"])

        dataset = SimpleNamespace(
            read=read, read_tokens=lambda s: (documents[s]["ids"].tolist(), documents[s]["learn"].tolist()),
            vocab_map=lambda: SimpleNamespace(d2t=read_weights(made.folder)["d2t"]),
            manifest=SimpleNamespace(
                after_block=BLOCKS, final_norm="post", layout=lambda _: SimpleNamespace(dtype="float32"),
                fingerprint=SimpleNamespace(fields={}),
            ),
        )  # fmt: skip
        replies = [d["ids"][PROMPT:].tolist() for d in documents.values()]
        for n in range(foreign):
            replies[n] = [1, *replies[n][1:]]
        answers = [
            Answer(f"p{n}", f"s{n}", PROMPT, histogram, len(reply), 1.0, len(reply), 2.0)
            for n, reply in enumerate(replies)
        ]
        record = SetRecord(HELD_OUT, "v", "d", HELD_OUT, GREEDY, 0, answers)
        evaluate = SimpleNamespace(max_prediction_gap=bound, num_steps=STEPS, min_acceptance_length=None, required=None)
        target = SimpleNamespace(model_path=str(made.target), trust_remote_code=False)
        recipe = SimpleNamespace(evaluate=evaluate, target=target, register_=SimpleNamespace(promote=True, margin=0.0))
        figures = {
            "predicted_acceptance_length": 1.9, "served_acceptance_length": record.acceptance_length,
            "served_sets": {HELD_OUT: record.figures()},
            "manifest_digest": "m", "fingerprint": "f", "dataset_uri": "u",
        }  # fmt: skip
        plain = SimpleNamespace(answers={HELD_OUT: [SimpleNamespace(output_ids=reply) for reply in replies]})
        evaluation = Evaluation.of("drafter", {"dtype": "float32"}, [record])
        self.job: Any = SimpleNamespace(
            recipe=recipe, dataset=dataset, plain=plain, evaluation=evaluation, figures=figures
        )


def test_a_drafter_that_serves_as_predicted_has_no_gap(made: Made) -> None:
    served = Served(made, made.folder)
    found = prediction(served.job, made.folder)
    assert abs(found["gap"]) < 0.01 and found["diagnosis"] is None and found["prompts"] == 8
    assert found["simulated"] == 1.9 and found["replayed"] == pytest.approx(served.acceptance, abs=1e-3)
    served.job.figures["prediction"] = found
    assert reasons_against(served.job) == []


@pytest.mark.parametrize(
    ("spoil", "cause"), [(wrong_layers, "layer ids"), (wrong_theta, "rope"), (shuffled_map, "vocabulary map")]
)
def test_a_spoiled_drafter_is_not_promoted_and_the_reason_names_the_cause(
    made: Made, tmp_path: Path, spoil: Spoil, cause: str
) -> None:
    served = Served(made, spoiled(made, tmp_path / "spoiled", spoil))
    found = prediction(served.job, served.folder)
    assert found["gap"] > found["bound"] and found["cause"] == cause
    assert json.loads(json.dumps(found)) == found  # it goes into evaluation.json
    served.job.figures["prediction"] = found
    (reason,) = reasons_against(served.job)
    assert "serves worse than it was predicted to" in reason and reason.endswith(cause)


def test_a_spoiled_drafter_that_serves_nearly_as_well_is_not_promoted_either(made: Made, tmp_path: Path) -> None:
    served = Served(made, spoiled(made, tmp_path / "spoiled", wrong_scaling))
    found = prediction(served.job, served.folder)
    assert found["gap"] <= found["bound"] and found["differs"] == ["rope"] and found["cause"] == "rope"
    served.job.figures["prediction"] = found
    assert reasons_against(served.job) == ["it is served otherwise than it was trained: rope"]


def test_the_layer_ids_are_named_also_where_the_target_is_too_large_for_a_forward_pass(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFERENCE_SHARE", 0.0)
    served = Served(made, spoiled(made, tmp_path / "spoiled", wrong_layers))
    found = prediction(served.job, served.folder)
    assert found["cause"] == "layer ids" and found["diagnosis"]["suspects"][0]["alone"] is None


def test_only_prompts_whose_reply_is_the_datasets_are_compared(made: Made) -> None:
    assert prediction(Served(made, made.folder, foreign=3).job, made.folder)["prompts"] == 5
    none = prediction(Served(made, made.folder, foreign=8).job, made.folder)
    assert "replayed" not in none and "not those in the dataset" in none["why_not"]


def test_a_gap_that_no_choice_explains_names_what_changed_in_the_target(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(made, made.folder)
    answers = served.job.evaluation.sets[HELD_OUT].answers
    for number, answer in enumerate(answers):  # a server that accepts next to nothing, for reasons of its own
        answers[number] = Answer(**{**vars(answer), "histogram": [99, 1]})
    changed: Callable[..., list[str]] = lambda *_: ["template: a / b"]  # noqa: E731
    monkeypatch.setattr(module, "changed_since_capture", changed)
    found = prediction(served.job, made.folder)
    assert found["diagnosis"]["cause"] is None and found["cause"] == "template"
