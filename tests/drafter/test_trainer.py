"""The training loop: nothing lost by a stop, nothing changed by packing, nothing learned from a broken batch."""

import json
import math
import os
import signal
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from drafter.batch import Row
from drafter.checkpoint import Checkpoint, CheckpointFolder
from drafter.config import DrafterConfig
from drafter.loss import LossConfig
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.schedule import Schedule
from drafter.trainer import StepMetrics, TrainConfig, Trainer, stop_on_sigterm
from hidden_states.errors import TrainingError
from tests.drafter.packing import document, pack, random_drafter, small_config

COURSE = TrainConfig(
    ttt_steps=3, schedule=Schedule(lr=3e-3, kind="linear", warmup_steps=3), max_steps=12,
    loss=LossConfig(out_of_vocab="renormalise"),
)  # fmt: skip
EPOCHS = replace(COURSE, max_steps=None, epochs=2, schedule=Schedule(lr=3e-3, kind="linear", warmup_steps=1))


def world(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Eagle3Drafter, TargetWeights, list[dict]]:
    """A drafter, its target and nine documents: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    config = small_config()
    drafter, target = random_drafter(config, generator, dtype)
    return drafter, target, [document(generator, n, config) for n in (9, 12, 7, 15, 4, 10, 8, 11, 13)]


def rows_of(documents: list[dict], each: int = 2) -> list[Row]:
    groups = [documents[i : i + each] for i in range(0, len(documents), each)]
    return [
        pack(g, torch.float32, [f"doc-{n * each + i}" for i in range(len(g))]) for n, g in enumerate(groups)
    ]  # fmt: skip


def train(
    course: TrainConfig = COURSE, folder: Path | None = None, stop_after: int | None = None, batches=None
) -> dict:
    """Trains the world of seed 0; losses by step, weights, and how it ended."""
    drafter, target, documents = world()
    losses: dict[int, float] = {}

    def note(metrics: StepMetrics) -> None:
        losses[metrics.step] = metrics.loss

    trainer = Trainer(
        course, drafter, target, batches or (lambda epoch: rows_of(documents)), folder, on_step=note,
        stop=lambda: stop_after is not None and len(losses) >= stop_after,
    )  # fmt: skip
    result = trainer.run()
    return {"losses": losses, "weights": drafter.state_dict(), "result": result}


def saved_at(folder: Path) -> tuple[Eagle3Drafter, torch.optim.Optimizer]:
    """Drafter and optimiser of the newest checkpoint."""
    drafter = world(seed=1)[0]
    optimiser = torch.optim.AdamW(drafter.parameters())
    CheckpointFolder(folder).load_state(drafter, optimiser)
    return drafter, optimiser


class Positioned:
    """A stream that remembers where it is and shares its rows among ranks, as `hidden_states.stream` does."""

    def __init__(self, rows: list[Row], rank: int = 0, ranks: int = 1) -> None:
        self.rows, self.at, self.rank, self.ranks = rows, 0, rank, ranks

    def __iter__(self) -> Iterable[Row]:
        mine = self.rows[self.at + self.rank :: self.ranks]
        for row in mine:
            self.at = min(self.at + self.ranks, len(self.rows))
            yield row

    def __len__(self) -> int:
        return len(self.rows[self.at + self.rank :: self.ranks])

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("stop_after", [1, 4, 5, 7, 11])
@pytest.mark.parametrize("positioned", [True, False])
def test_a_training_stopped_at_any_step_resumes_to_the_same_bit(tmp_path, stop_after, positioned) -> None:
    def batches(epoch: int):
        rows = rows_of(world()[2])
        rows = rows[epoch % 3 :] + rows[: epoch % 3]
        return Positioned(rows) if positioned else rows

    whole = train(batches=batches)
    first = train(folder=tmp_path, stop_after=stop_after, batches=batches)
    assert first["result"].stopped and first["result"].steps == stop_after
    second = train(folder=tmp_path, batches=batches)
    assert not second["result"].stopped
    assert {**first["losses"], **second["losses"]} == whole["losses"]
    assert all(torch.equal(second["weights"][n], w) for n, w in whole["weights"].items())
    assert second["result"].loss_first == whole["result"].loss_first
    assert second["result"].tokens == whole["result"].tokens


def test_a_finished_training_run_again_does_nothing(tmp_path) -> None:
    done = train(folder=tmp_path)
    again = train(folder=tmp_path)
    assert again["losses"] == {}
    assert again["result"].steps == done["result"].steps
    assert all(torch.equal(again["weights"][n], w) for n, w in done["weights"].items())


@pytest.mark.parametrize("validate_every", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("checkpoint_every", [0, 2, 5])
def test_a_finished_training_run_again_says_the_same_of_itself(tmp_path, validate_every, checkpoint_every) -> None:
    """It is when the run was killed afterwards: the drafter is exported from what this says."""
    course = replace(COURSE, validate_every=validate_every, checkpoint_every=checkpoint_every)

    def run():
        drafter, target, documents = world()
        return Trainer(
            course, drafter, target, lambda epoch: rows_of(documents), tmp_path, validation=lambda: rows_of(documents)
        ).run()

    done = run()
    again = run()
    assert done.validation is not None and asdict(again) == asdict(done)


@pytest.mark.parametrize(("each", "accumulate"), [(1, 9), (2, 5), (3, 3), (9, 1)])
def test_packing_and_accumulation_do_not_change_the_loss_or_the_update(each, accumulate) -> None:
    """The documents of one optimiser step in one row, in several, in one each: counts weigh tokens, not rows."""
    steps = []
    for e, a in ((9, 1), (each, accumulate)):
        drafter, target, documents = world(dtype=torch.float64)
        rows = [pack(documents[i : i + e]) for i in range(0, len(documents), e)]
        losses: list[StepMetrics] = []
        course = replace(COURSE, accumulate=a, max_steps=3)
        trainer = Trainer(course, drafter, target, lambda epoch, rows=rows: rows, on_step=losses.append)
        trainer.dtype = torch.float64
        trainer.teacher.embedding, trainer.teacher.head = target.embedding, target.head
        trainer.teacher.draft_head = target.head[drafter.draft_ids]
        trainer.run()
        steps.append(
            ([m.loss for m in losses], [m.grad_norm for m in losses], losses[-1].figures, drafter.state_dict())
        )
    (loss_a, norm_a, figures_a, weights_a), (loss_b, norm_b, figures_b, weights_b) = steps
    assert loss_a == pytest.approx(loss_b, rel=1e-9)
    assert norm_a == pytest.approx(norm_b, rel=1e-9)
    assert figures_a.flat() == pytest.approx(figures_b.flat(), rel=1e-9)
    assert all(torch.allclose(weights_a[n], weights_b[n], rtol=1e-7) for n in weights_a if n != "d2t")


def test_bfloat16_is_for_the_products_only() -> None:
    """Weights, their sums and the optimiser stay float32; the losses are those of float32 but for the rounding."""
    wide, narrow = train(), train(replace(COURSE, dtype="bfloat16"))
    assert all(w.dtype == torch.float32 for n, w in narrow["weights"].items() if n != "d2t")
    assert narrow["losses"] != wide["losses"]
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=0.02)


def test_a_row_without_tokens_to_learn_is_passed_over() -> None:
    documents = world()[2]
    for doc in documents[:4]:
        doc["learn"] = torch.zeros_like(doc["learn"])
    run = train(replace(COURSE, max_steps=5), batches=lambda epoch: rows_of(documents))
    assert all(math.isfinite(loss) for loss in run["losses"].values())
    assert run["losses"][1] == 0.0


def test_a_value_that_is_not_a_number_stops_before_the_update_and_names_the_samples(tmp_path) -> None:
    documents = world()[2]
    documents[4]["aux"][1] = float("nan")
    documents[4]["learn"] = torch.ones_like(documents[4]["learn"])
    course = replace(COURSE, checkpoint_every=1)
    with pytest.raises(TrainingError, match=r"doc-4, doc-5") as caught:
        train(course, tmp_path, batches=lambda epoch: rows_of(documents))
    assert "step 3" in str(caught.value) and "doc-0" not in str(caught.value)
    newest = CheckpointFolder(tmp_path).load_newest()
    assert newest is not None and newest.progress["step"] == 2
    drafter, optimiser = saved_at(tmp_path)
    assert all(bool(w.isfinite().all()) for w in drafter.parameters())
    assert all(bool(s["exp_avg_sq"].isfinite().all()) for s in optimiser.state.values())


def test_a_jump_of_the_loss_stops_and_names_the_samples() -> None:
    drafter, target, documents = world()

    def break_it(metrics: StepMetrics) -> None:
        if metrics.step == 25:
            with torch.no_grad():
                drafter.lm_head.weight.mul_(100)

    trainer = Trainer(replace(COURSE, max_steps=60), drafter, target, lambda e: rows_of(documents), on_step=break_it)
    with pytest.raises(TrainingError, match=r"step 26, samples doc-0, doc-1: .* running mean"):
        trainer.run()


def test_checkpoints_of_another_training_are_not_continued(tmp_path) -> None:
    train(replace(COURSE, max_steps=2), tmp_path)
    with pytest.raises(TrainingError, match="ttt_steps"):
        train(replace(COURSE, ttt_steps=2), tmp_path)


def test_only_the_newest_checkpoints_are_kept_and_a_torn_one_is_never_seen(tmp_path) -> None:
    (tmp_path / ".tmp-step-3").mkdir()
    (tmp_path / ".tmp-step-3" / "drafter.safetensors").write_text("half")
    train(replace(COURSE, checkpoint_every=2, keep=2), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000012"]


@pytest.mark.parametrize("file", ["training.pt", "progress.json", "state/.metadata", "state/__0_0.distcp"])
def test_a_damaged_checkpoint_says_which_folder_to_remove(tmp_path, file, caplog) -> None:
    train(replace(COURSE, max_steps=2), tmp_path)
    (tmp_path / "step-00000002" / file).write_bytes(b"rubbish")
    with pytest.raises(TrainingError, match="step-00000002") as refused:
        train(folder=tmp_path)
    said = str(refused.value)  # in a line of ours: torch's own are tracebacks, and advice to load without checks
    assert "\n" not in said and "weights_only" not in said and "Traceback" not in said
    assert not [record for record in caplog.records if record.name == "root"]


WRONG: dict[str, list] = {
    **{name: [None, "x", [], -1, 1.5] for name in ("step", "epoch", "in_epoch", "tokens")},
    **{name: [None, "x", []] for name in ("seconds", "loss_first", "loss_last", "running_loss")},
    "best": ["x", [1]], "training": [None, "x", []], "of a later program": [1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_checkpoint_with_values_of_another_kind_is_refused(tmp_path, name, value) -> None:
    train(replace(COURSE, max_steps=2), tmp_path)
    path = tmp_path / "step-00000002" / "progress.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(TrainingError, match=r"step-00000002: unreadable .* Remove this folder"):
        train(folder=tmp_path)


@pytest.mark.parametrize("training", [{}, [1], {"random": torch.zeros(3), "ranks": 1}, {"ranks": "x"}])
def test_a_checkpoint_without_its_random_state_is_refused(tmp_path, training) -> None:
    train(replace(COURSE, max_steps=2), tmp_path)
    whole = {"random": torch.get_rng_state(), **training} if training == {"ranks": "x"} else training
    torch.save(whole, tmp_path / "step-00000002" / "training.pt")
    with pytest.raises(TrainingError, match="step-00000002: unreadable"):
        train(folder=tmp_path)


@pytest.mark.parametrize("name", ["step-old", "step-", "step-00000002 (copy)"])
def test_folders_of_other_names_are_no_checkpoints(tmp_path, name) -> None:
    train(replace(COURSE, max_steps=2), tmp_path)
    (tmp_path / name).mkdir()
    assert train(folder=tmp_path)["result"].steps == 12 and (tmp_path / name).exists()


@pytest.mark.parametrize("file", ["drafter.safetensors", "figures.json"])
def test_a_damaged_best_drafter_is_named(tmp_path, file) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save_best({"a": torch.ones(2)}, {"step": 1, "acceptance_length": 1.5})
    (tmp_path / "best" / file).write_bytes(b"{")
    with pytest.raises(TrainingError, match=r"best: unreadable .* Remove this folder"):
        folder.load_best()


@pytest.mark.parametrize("before", [4, 12])
def test_where_the_best_drafter_was_removed_the_best_that_still_comes_is_kept(tmp_path, before) -> None:
    def run(steps: int, best: float | None) -> None:
        drafter, target, documents = world()
        course = replace(COURSE, max_steps=steps, validate_every=4)
        trainer = Trainer(
            course, drafter, target, lambda epoch: rows_of(documents), tmp_path, validation=lambda: rows_of(documents)
        )
        trainer.progress.best = best
        trainer.run()

    run(before, best=99.0)  # as the checkpoint remembers it
    assert CheckpointFolder(tmp_path).load_best() is None
    run(12, best=None)
    assert CheckpointFolder(tmp_path).load_best() is not None


@pytest.mark.parametrize("name", ["best", "step-00000002"])
def test_a_crash_between_the_renames_of_a_replacement_loses_nothing(tmp_path, name) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save_best({"a": torch.ones(2)}, {"step": 1, "acceptance_length": 1.5})
    train(replace(COURSE, max_steps=2), tmp_path)
    (tmp_path / name).rename(tmp_path / f".tmp-replaced-{name}")
    (tmp_path / f".tmp-{name}").mkdir()
    again = CheckpointFolder(tmp_path)
    assert again.load_best() is not None and again.steps() == [2] and not list(tmp_path.glob(".tmp-*"))


def test_a_checkpoint_replaces_one_of_the_same_step(tmp_path) -> None:
    folder, (drafter, _, _) = CheckpointFolder(tmp_path), world()
    optimiser = torch.optim.AdamW(drafter.parameters())
    for value in (1.0, 2.0):
        with torch.no_grad():
            drafter.norm.weight.fill_(value)
        folder.save(5, drafter, optimiser, Checkpoint({}, {}))
    assert folder.steps() == [5]
    assert saved_at(tmp_path)[0].norm.weight.tolist() == [2.0] * 16


def test_sigterm_saves_and_returns(tmp_path) -> None:
    drafter, target, documents = world()

    def send(metrics: StepMetrics) -> None:
        if metrics.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with stop_on_sigterm() as stop:
        result = Trainer(
            COURSE, drafter, target, lambda epoch: rows_of(documents), tmp_path, on_step=send, stop=stop
        ).run()  # fmt: skip
    assert result.stopped and result.steps == 3
    assert CheckpointFolder(tmp_path).steps() == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(TrainingError, match="no packed rows"):
        train(batches=lambda epoch: [])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [1.0, 0.75, 0.5, 0.25]), ("cosine", [1.0, 0.8536, 0.5, 0.1464]), ("wsd", [1.0, 1.0, 1.0, 0.5])],
)
def test_schedules(kind, expected) -> None:
    schedule = Schedule(lr=1.0, kind=kind, warmup_steps=0, decay_share=0.5)
    assert [round(schedule.at(n, n / 4), 4) for n in range(4)] == expected
    assert replace(schedule, warmup_steps=4).at(0, 0.0) == 0.25


def test_it_learns_what_can_be_learned() -> None:
    """A target whose next token is a function of the current one: the drafter becomes right at every step."""
    generator = torch.Generator().manual_seed(1)
    config: DrafterConfig = small_config(hidden_size=32, vocab_size=24, draft_vocab_size=24, after_block=(1, 3))
    drafter, target = random_drafter(config, generator, torch.float32)
    drafter.initialise(target.head, seed=0)
    follows = torch.randperm(24, generator=generator)
    documents = []
    for _ in range(24):
        ids = [int(torch.randint(24, (), generator=generator))]
        while len(ids) < 12:
            ids.append(int(follows[ids[-1]]))
        tokens = torch.tensor(ids)
        states = target.embedding[tokens]
        documents.append(
            {
                "ids": tokens, "learn": torch.ones_like(tokens), "aux": states[:, None].repeat(1, 2, 1),
                "final": 3 * target.head[follows[tokens]],
            }
        )  # fmt: skip
    course = TrainConfig(ttt_steps=3, schedule=Schedule(lr=5e-3, warmup_steps=10), max_steps=120)
    trainer = Trainer(course, drafter, target, lambda epoch: [pack(documents, torch.float32)])
    before = trainer.evaluate([pack(documents, torch.float32)])
    trainer.run()
    after = trainer.evaluate([pack(documents, torch.float32)])
    assert before.acceptance_length < 1.5
    assert after.acceptance_length > 3.9
    assert after.loss < before.loss
