"""What a run shows while it works, and what it costs when those it shows it to are away."""

import threading
import time
from dataclasses import replace

import pytest
from mlflow.exceptions import MlflowException

from drafter.course import StepMetrics
from infra.recipe_file import load_recipe
from tasks import page, training
from tasks.server_log import MOST, ServerLog

LINES = [
    "[2026-11-30 00:30:31 TP0] Load weight begin. avail mem=20.1 GB",
    "[2026-11-30 00:30:33 TP0] Load weight end. type=DeepseekV3ForCausalLM, avail mem=19.8 GB",
    "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]  50%|#####     | 1/2",
    '[2026-11-30 00:30:40] INFO:     127.0.0.1:43210 - "POST /generate HTTP/1.1" 200 OK',
    "[2026-11-30 01:14:08] Ignore import error when loading sglang.srt.models.falcon_mamba: cannot import name",
    "[2026-11-30 00:30:41] Prefill batch, #new-seq: 1, #new-token: 27",
    "[2026-11-30 00:30:45] The server is fired up and ready to roll!",
]


def test_of_sglangs_log_the_run_shows_what_it_loads_and_what_goes_wrong_not_its_requests() -> None:
    said: list[str] = []
    log = ServerLog(said.append, "SGLang")
    for line in [*LINES, *LINES, "RuntimeError: CUDA out of memory"]:
        log.line(line)
    assert [line.split(": ", 1)[1][:15] for line in said] == [
        "Load weight beg", "Load weight end", "The server is f", "RuntimeError: C",
    ]  # fmt: skip


def test_a_server_that_complains_without_end_does_not_flood_the_run() -> None:
    said: list[str] = []
    log = ServerLog(said.append, "SGLang")
    for number in range(1000):
        log.line(f"ERROR number {number}")
    assert len(said) == MOST
    assert "further lines only in its own log" in said[-1]


class Away:
    """An MLflow that does not answer until it is back."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.took: list[tuple[int, dict[str, float]]] = []
        self.asked = 0

    def metrics(self, figures: dict[str, float], step: int = 0) -> None:
        self.asked += 1
        if not self.back.is_set():
            raise MlflowException("no answer")
        self.took.append((step, figures))


class Figures:
    top1 = (0.5, 0.25)
    loss = acceptance_length = 1.0

    def flat(self) -> dict[str, float]:
        return {"loss": 1.0}


def test_a_training_goes_on_while_mlflow_is_away_and_every_step_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_EVERY_S", 0.0)
    bars: list[float] = []
    monkeypatch.setattr(training, "Progress", lambda *_: type("Bar", (), {"update": lambda _, p, w: bars.append(p)})())
    mlflow, said = Away(), []
    config = replace(training.train_config(load_recipe("demo-smollm2")), max_steps=50, max_seconds=None, epochs=None)
    watch = training.TrainingWatch(mlflow, said.append, config)  # type: ignore[arg-type]
    started = time.monotonic()
    for step in range(1, 41):
        watch.step(StepMetrics(step, 0, 1e-3, 1.0, 1.0, 10, 100.0, float(step), Figures()))  # type: ignore[arg-type]
        if step == 20:
            assert mlflow.asked and not mlflow.took
            mlflow.back.set()
    assert time.monotonic() - started < 5
    watch.end(True)
    assert [step for step, _ in mlflow.took] == list(range(1, 41))
    assert any("MLflow does not take the figures" in line for line in said)
    assert bars == sorted(bars) and bars[-2:] == [80.0, 100.0]


def test_a_prefect_server_that_is_away_costs_a_table_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    said: list[str] = []

    class Log:
        def warning(self, text: str, *args: object) -> None:
            said.append(text % args)

    monkeypatch.setattr(page, "get_run_logger", Log)

    def fails() -> None:
        raise httpx.ConnectError("refused")

    assert page.shown(fails) is None
    assert "does not answer: refused" in said[0]
    monkeypatch.setattr(page, "create_progress_artifact", lambda *_, **__: fails())
    bar = page.Progress("key", 0.0, "begins")
    monkeypatch.setattr(page, "create_progress_artifact", lambda *_, **__: "id")
    updated: list[object] = []
    monkeypatch.setattr(page, "update_progress_artifact", lambda *a: updated.append(a))
    bar.update(5.0, "back: made now")
    bar.update(6.0, "on")
    assert updated == [("id", 6.0, "on")]


def test_every_event_of_eyas_has_an_automation_and_every_automation_an_event_that_is_sent() -> None:
    from flows.automations import read_automations
    from tasks import events

    sent = {value for name, value in vars(events).items() if name.isupper() and str(value).startswith("eyas.")}
    awaited = {name for automation in read_automations() for name in automation.trigger.expect if name[:5] == "eyas."}
    assert sent == awaited and len(sent) == 3
