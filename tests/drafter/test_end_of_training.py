"""How a training ends: by which count, with which rate until then, and which drafter it leaves."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from drafter.acceptance import Figures
from drafter.batch import Row
from drafter.checkpoint import CheckpointFolder
from drafter.schedule import Schedule
from drafter.trainer import TrainConfig, Trainer
from hidden_states.errors import TrainingError
from tests.drafter.test_trainer import COURSE, EPOCHS, Positioned, rows_of, train, world


def test_the_best_drafter_by_simulated_acceptance_is_kept(tmp_path) -> None:
    drafter, target, documents = world()
    seen: list[float] = []

    def note(step: int, figures: Figures) -> None:
        seen.append(figures.acceptance_length)

    result = Trainer(
        replace(COURSE, validate_every=3), drafter, target, lambda epoch: rows_of(documents), tmp_path,
        validation=lambda: rows_of(documents), on_validation=note,
    ).run()  # fmt: skip
    best = CheckpointFolder(tmp_path).load_best()
    assert best is not None and best[1]["acceptance_length"] == max(seen) == result.best_acceptance_length
    assert len(seen) == 4


def test_a_validation_that_fails_costs_no_training_and_is_made_up_for(tmp_path) -> None:
    """A store that is away at the end of the night: the steps are saved, and the same command validates them."""

    def course(trouble: bool) -> Trainer:
        drafter, target, documents = world()

        def held_out() -> list[Row]:
            if trouble:
                raise OSError("the store is away")
            return rows_of(documents)

        return Trainer(COURSE, drafter, target, lambda epoch: rows_of(documents), tmp_path, validation=held_out)

    with pytest.raises(OSError, match="the store is away"):
        course(True).run()
    assert CheckpointFolder(tmp_path).steps() == [12]
    result = course(False).run()
    assert result.steps == 12 and result.validation is not None
    assert result.best_acceptance_length == result.validation.acceptance_length


def test_a_longer_course_does_not_put_a_worse_drafter_in_the_place_of_the_best(tmp_path, monkeypatch) -> None:
    """The best was found by the last validation, after the last checkpoint. (Its acceptance lengths are stand-ins.)"""
    lengths = iter([1.9, 1.4])
    figures = Trainer.evaluate

    def evaluate(self: Trainer, batches: Iterable[Row]) -> Figures:
        return replace(figures(self, batches), acceptance_length=next(lengths))

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    for steps in (6, 12):
        drafter, target, documents = world()
        result = Trainer(
            replace(COURSE, max_steps=steps), drafter, target, lambda epoch, d=documents: rows_of(d), tmp_path,
            validation=lambda d=documents: rows_of(d),
        ).run()  # fmt: skip
        assert result.steps == steps and result.best_acceptance_length == 1.9
    best = CheckpointFolder(tmp_path).best_figures()
    assert best is not None and best["step"] == 6


@pytest.mark.parametrize("stop_after", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("positioned", [True, False])
def test_a_rate_that_falls_with_the_epochs_is_the_same_after_a_stop(tmp_path, stop_after, positioned) -> None:
    def batches(epoch: int):
        return Positioned(rows_of(world()[2])) if positioned else rows_of(world()[2])

    whole = train(EPOCHS, batches=batches)
    first = train(EPOCHS, tmp_path, stop_after, batches)
    second = train(EPOCHS, tmp_path, batches=batches)
    assert {**first["losses"], **second["losses"]} == whole["losses"] and len(whole["losses"]) == 10


def test_a_course_of_epochs_ends_after_them_and_its_rate_falls_within_them() -> None:
    rates: list[float] = []
    drafter, target, documents = world()
    course = replace(COURSE, max_steps=None, epochs=2, schedule=Schedule(lr=1.0, kind="linear", warmup_steps=0))
    result = Trainer(
        course, drafter, target, lambda epoch: Positioned(rows_of(documents)), on_step=lambda m: rates.append(m.lr)
    ).run()  # fmt: skip
    assert result.steps == len(rates) == 10
    assert rates == pytest.approx([1 - n / 10 for n in range(10)])


def test_a_course_without_an_end_is_refused() -> None:
    with pytest.raises(TrainingError, match="max_steps"):
        TrainConfig()
