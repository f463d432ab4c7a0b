"""Whatever goes wrong in capture: requests are answered as stock, the server starts and ends, and it is said why."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas_capture import contract, lifecycle
from eyas_capture.lifecycle import Lifecycle
from eyas_capture.refusals import Drift
from eyas_capture.writer import Writer
from tests.server_patch.bench import Bench, H, Model, Request
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import filled, submit


@pytest.mark.parametrize(
    "result",
    [
        lambda hidden: hidden,
        lambda hidden: (hidden, torch.zeros(len(hidden), H)),
        lambda hidden: (hidden, [torch.zeros(len(hidden), H)] * 3),
        lambda hidden: (hidden[:-1], torch.zeros(len(hidden) - 1, 2 * H)),
    ],
    ids=["nothing captured", "one block", "three blocks", "a row short"],
)
def test_a_model_that_captures_something_else_ends_capture_and_not_the_server(
    bench: Bench, result: Callable[[torch.Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    begun, r = Request("begun", 9), Request("r", 5)
    bench.run([(begun, 0, 4)])
    batch = bench.announce([(r, 0, 5)])
    hidden = torch.arange(5.0)[:, None].repeat(1, H)
    returned = bench.capture.forward(lambda *_: result(hidden), (batch.input_ids, None, batch), {})
    assert isinstance(returned, torch.Tensor)
    bench.run([(Request("later", 3), 0, 3)])
    assert bench.end()["begun"]["incomplete_reason"] == contract.CAPTURE_FAILED
    written = json.loads((bench.folder / contract.WRITER_FILE).read_text())
    assert written["state"] == contract.BROKEN and written["refused"]
    assert "EYAS CAPTURE HAS STOPPED" in caplog.text


def test_a_request_that_is_not_what_the_plugin_knows_ends_capture_and_not_the_server(bench: Bench) -> None:
    r = Request("r", 5)
    del r.sampling_params
    bench.run([(r, 0, 5)])
    assert bench.end() == {} and bench.writer.state == contract.BROKEN


def test_a_capture_path_that_raises_on_first_use_ends_capture_and_not_the_request(bench: Bench) -> None:
    """A model file that changed under the plugin: the first pass is a dry run, and is done again without capture."""

    class Changed(Model):
        def forward(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any) -> Any:
            if self.llama.model.layers_to_capture:
                raise AttributeError("'AuxHiddenStatePacker' object has no attribute 'capture'")
            return super().forward(input_ids, positions, forward_batch)

    stock = Changed(packed=True)
    stock.llama = bench.model.llama  # the one whose capture the plugin switches
    bench.model = stock
    for name in ("first", "second"):
        bench.run([(Request(name, 5), 0, 5)])
    assert stock.passes == 2 and bench.end() == {}
    assert bench.writer.state == contract.BROKEN and "AuxHiddenStatePacker" in bench.writer.refused[0]


def test_an_error_of_the_model_is_the_servers_own(bench: Bench) -> None:
    batch = bench.announce([(Request("r", 5), 0, 5)])

    def out_of_memory(*_: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        bench.capture.forward(out_of_memory, (batch.input_ids, None, batch), {})
    assert not bench.model.llama.model.layers_to_capture


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["no memory", "another shape"])
def test_later_trouble_of_the_capture_path_costs_no_request_unless_other_ranks_wait(
    tmp_path: Path, how: str, ranks: int
) -> None:
    """Captured rows take memory which the stock path does not: a longer pass may find none."""

    class Troubled(Model):
        def forward(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any) -> Any:
            result = super().forward(input_ids, positions, forward_batch)
            if len(input_ids) < 9 or isinstance(result, torch.Tensor):
                return result
            if how == "no memory":
                raise MemoryError
            return *result, None

    bench = Bench(tmp_path, ranks=ranks)
    model = Troubled(packed=True)
    model.llama, bench.model = bench.model.llama, model
    bench.run([(Request("short", 5), 0, 5)])
    long = [(Request("long", 9), 0, 9)]
    if ranks > 1:
        with pytest.raises((MemoryError, Drift)):
            bench.run(long)
    else:
        bench.run(long)
        assert bench.writer.state == contract.BROKEN
    assert bench.end().keys() == {"short"}


@pytest.mark.parametrize("lengths", [None, [], [5, 5], ["five"]], ids=str)
def test_a_batch_that_is_not_what_the_plugin_knows_is_answered(bench: Bench, lengths: Any) -> None:
    known, r = Request("known", 5), Request("r", 5)
    bench.run([(known, 0, 5)])
    batch = bench.batch([(r, 0, 5)])
    batch.extend_seq_lens_cpu = lengths
    bench.capture.announce([r], batch)
    result = bench.capture.forward(bench.model.forward, (batch.input_ids, None, batch), {})
    assert torch.equal(result[:, 0], batch.input_ids.float())
    assert bench.end().keys() == {"known"} and bench.writer.state == contract.BROKEN


def test_capture_that_has_stopped_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abc":
        r = Request(name, 5)
        del r.sampling_params
        bench.run([(r, 0, 5)])
    assert caplog.text.count("EYAS CAPTURE HAS STOPPED") == 1


def begun(bench: Bench) -> Lifecycle:
    """The plugin of a server that captures."""
    one = Lifecycle({contract.ENV_DUMP_DIR: str(bench.folder.parent)})
    one._capture, one._writer = bench.capture, bench.writer
    return one


def test_new_weights_end_capture(bench: Bench) -> None:
    """Dumps would name the model that was there before."""
    bench.run([(Request("old", 5), 0, 5)])
    assert begun(bench).before_new_weights(None, None) is None, "the call must go on as it came"
    bench.run([(Request("new", 5), 0, 5)])
    assert bench.end().keys() == {"old"}
    written = json.loads((bench.folder / contract.WRITER_FILE).read_text())
    assert written["state"] == contract.BROKEN and "other weights" in written["refused"][0]


@pytest.mark.parametrize("name", ["x" * 300, "file/below"])
def test_a_server_starts_when_its_dump_folder_cannot_even_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").touch()
    one = Lifecycle({contract.ENV_DUMP_DIR: str(tmp_path / name)})

    def fail(runner: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(one, "_begin", fail)
    one.after_load_model(None, SimpleNamespace(is_draft_worker=False))
    assert "EYAS CAPTURE IS OFF" in caplog.text and "cannot write" in caplog.text


def test_capture_that_fails_to_begin_leaves_one_word_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = begun(bench)

    def fail(runner: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(one, "_begin", fail)
    one.after_load_model(None, SimpleNamespace(is_draft_worker=False))
    (file,) = bench.folder.parent.glob(f"*/{contract.WRITER_FILE}")
    written = json.loads(file.read_text())
    assert written["state"] == contract.REFUSED and "new thread" in written["refused"][0]


@pytest.mark.parametrize("error", [RuntimeError, None])
def test_a_crash_is_heard_of_soon_and_an_end_in_order_waits_for_the_disk(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    monkeypatch.setattr(lifecycle, "CRASH_DRAIN_SECONDS", 0.2)
    monkeypatch.setattr(lifecycle, "DRAIN_SECONDS", 2.0)
    disk.wait()
    bench = Bench(tmp_path / "dumps")
    bench.run([(Request("r", 5), 0, 5)])

    def loop(scheduler: Any) -> str:
        if error:
            raise error("the scheduler's own")
        return "over"

    started = time.monotonic()
    one = begun(bench)
    if error:
        with pytest.raises(error, match="the scheduler's own"):
            one.around_event_loop(loop, None)
    else:
        assert one.around_event_loop(loop, None) == "over"
    assert (time.monotonic() - started < 1.5) == bool(error)


def test_after_an_end_that_could_not_wait_the_books_are_closed(disk: SlowDisk, made: Callable[..., Writer]) -> None:
    """What no publisher has been sent is lost; what one has stays pending, as it may still appear."""
    disk.wait()
    one = made()
    first = filled(one)
    submit(one, first, None)
    waiting = [filled(one) for _ in range(3)]
    for assembly in waiting:
        one.submit(assembly, None)
        assembly.fence = SimpleNamespace(query=lambda: False)  # its rows never land
    assert [one.stop(0.2), one.stop(0.2)] == [False, False]
    totals = one.totals.as_json()
    assert totals["lost"] == {contract.SERVER_STOPPED: 3} and totals["pending"] == 1


def test_an_order_that_is_too_long_for_a_message_is_lost_alone(made: Callable[..., Writer]) -> None:
    one = made()
    assemblies = [filled(one) for _ in range(3)]
    assemblies[1].request_id = "\N{EAGLE}" * 100_000
    for assembly in assemblies:
        submit(one, assembly, None)
    assert one.stop(10)
    assert one.totals.complete == 2 and one.totals.lost.total() == 1
