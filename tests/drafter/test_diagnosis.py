"""A drafter that is served in another way than it was trained for: the choice that differs is named, each of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafter.batch import Row
from drafter.config import DrafterConfig, read_target_config
from drafter.diagnosis import Diagnosis, as_served, as_trained, diagnose, differing, read_weights, replayed
from drafter.export import export_drafter
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.schedule import Schedule
from drafter.trainer import TrainConfig, Trainer
from tests.drafter.packing import pack
from tests.drafter.test_acceptance import BLOCKS, PROMPT, STEPS, written_by
from tests.tiny_models import VOCAB, make_tiny

BOUND = 0.1


@dataclass
class Made:
    """A trained drafter's folder, its target, and the documents it was trained on."""

    folder: Path
    target: Path
    documents: list[dict[str, Any]]

    def rows(self, blocks: tuple[int, ...]) -> list[Row] | None:
        """The documents with the outputs of these blocks; None where the target has no such block."""
        if max(blocks) >= read_target_config(self.target)["num_hidden_layers"]:
            return None
        if blocks == BLOCKS:
            return [pack(self.documents, torch.float32)]
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        with torch.no_grad():
            states = model(torch.stack([d["ids"] for d in self.documents]), output_hidden_states=True).hidden_states
        aux = torch.stack([states[k + 1] for k in blocks], 2)
        return [pack([{**d, "aux": a} for d, a in zip(self.documents, aux, strict=True)], torch.float32)]

    def ask(self, folder: Path, served: float | None = None, dtype: str = "float32") -> Diagnosis:
        """Diagnose a folder; left out, `served` is what a server that obeys the folder would measure."""
        target = TargetWeights.load(self.target)
        weights, found = read_weights(folder), as_served(folder, self.target, dtype)
        trained = as_trained(found, folder, self.target, BLOCKS, read_weights(self.folder)["d2t"], "float32")
        if served is None:
            states = self.rows(found.config.after_block)
            assert states is not None
            served = replayed(found, weights, target, states, STEPS)
        return diagnose(found, trained, weights, target, self.rows, STEPS, served, BOUND)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("diagnosis")
    target = make_tiny("llama", folder / "target")
    prompts = torch.randint(3, VOCAB, (64, PROMPT), generator=torch.Generator().manual_seed(2))
    documents = written_by(target, prompts)
    weights = TargetWeights.load(target)
    drafter = Eagle3Drafter(
        DrafterConfig.from_target(read_target_config(target), BLOCKS, VOCAB), torch.zeros(VOCAB, dtype=torch.int64)
    )
    drafter.initialise(weights.head, seed=0)
    rows = [pack(documents[i : i + 8], torch.float32) for i in range(0, len(documents), 8)]
    course = TrainConfig(ttt_steps=STEPS, schedule=Schedule(lr=5e-3, warmup_steps=10), max_steps=100)
    Trainer(course, drafter, weights, lambda epoch: rows).run()
    return Made(export_drafter(drafter, folder / "drafter"), target, documents[:8])


Spoil = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def wrong_layers(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 3, 5]


def beyond_the_target(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 40]


def wrong_theta(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 12.0


def wrong_scaling(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["rope_scaling"] = {"rope_type": "linear", "factor": 16.0}
    config["rope_parameters"] = {"rope_type": "linear", "factor": 16.0, "rope_theta": config["rope_theta"]}


def shuffled_map(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    weights["d2t"] = ids - torch.arange(VOCAB)


def shifted_map(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] += 1  # the last one is beyond the vocabulary


def norm_flag(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["fc_norm"] = True


def recurrence_flag(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["norm_output"] = True


def spoiled(made: Made, folder: Path, spoil: Spoil) -> Path:
    shutil.copytree(made.folder, folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    spoil(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (wrong_layers, "layer ids"), (wrong_theta, "rope"), (shuffled_map, "vocabulary map"),
        (shifted_map, "vocabulary map"), (norm_flag, "norm before fc"),
    ],
)  # fmt: skip
def test_the_spoilt_choice_is_named_and_its_effect_explains_the_gap(
    made: Made, tmp_path: Path, spoil: Spoil, cause: str
) -> None:
    found = made.ask(spoiled(made, tmp_path / "spoiled", spoil))
    print(found.in_words())
    assert found.replayed - found.served > BOUND, "a spoil that costs nothing shows nothing"
    assert found.cause == cause
    assert [suspect.name for suspect in found.suspects] == [cause]
    assert found.suspects[0].alone == pytest.approx(found.served, abs=1e-3)
    assert cause in found.in_words()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "name"),
    [(wrong_scaling, "rope"), (recurrence_flag, "norm of the recurrence")],
    ids=["rope", "recurrence"],
)
def test_a_difference_that_costs_nothing_is_said_but_not_accused(
    made: Made, tmp_path: Path, spoil: Spoil, name: str
) -> None:
    found = made.ask(spoiled(made, tmp_path / "spoiled", spoil), served=1.0)
    assert [suspect.name for suspect in found.suspects] == [name]
    assert found.cause is None


@pytest.mark.slow
def test_a_difference_is_named_even_when_it_costs_too_little_to_be_seen(made: Made, tmp_path: Path) -> None:
    found = made.ask(spoiled(made, tmp_path / "spoiled", wrong_scaling))
    assert abs(found.replayed - found.served) < BOUND
    assert found.cause == "rope" and "the rope, served as" in found.in_words()


@pytest.mark.slow
def test_of_two_differences_the_one_that_explains_the_gap_is_named_first(made: Made, tmp_path: Path) -> None:
    def both(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        shuffled_map(config, weights)
        config["rms_norm_eps"] *= 1.01  # of no consequence

    found = made.ask(spoiled(made, tmp_path / "spoiled", both))
    assert found.cause == "vocabulary map"
    assert [suspect.name for suspect in found.suspects] == ["vocabulary map", "norm epsilon"]


@pytest.mark.slow
def test_what_cannot_be_replayed_is_named_by_its_difference(made: Made, tmp_path: Path) -> None:
    found = made.ask(spoiled(made, tmp_path / "spoiled", beyond_the_target), served=1.0)
    assert found.cause == "layer ids" and found.suspects[0].alone is None


@pytest.mark.slow
def test_a_drafter_as_it_was_exported_has_no_cause_to_name(made: Made) -> None:
    found = made.ask(made.folder, served=1.0)  # a server that does something else altogether
    assert found.cause is None and found.suspects == []
    assert "no cause found" in found.in_words() and "rope" in found.in_words()
    assert made.ask(made.folder).replayed == pytest.approx(made.ask(made.folder).served)


@pytest.mark.slow
def test_another_dtype_in_serving_is_a_suspect(made: Made) -> None:
    found = made.ask(made.folder, served=1.0, dtype="bfloat16")
    (suspect,) = found.suspects
    assert (suspect.name, suspect.served, suspect.trained) == ("dtype", "bfloat16", "float32")
    assert found.cause is None  # rounding to bfloat16 does not cost this much: it is said, but not accused


def test_a_drafter_that_kept_the_vocabulary_of_a_published_one_is_no_suspect(made: Made) -> None:
    """The dataset it was trained on further has a map of its own."""
    served = as_served(made.folder, made.target, "float32")
    datasets = read_weights(made.folder)["d2t"] + torch.randint(0, 2, (VOCAB,))
    assert differing(served, as_trained(served, made.folder, made.target, BLOCKS, datasets, "float32")) == []
