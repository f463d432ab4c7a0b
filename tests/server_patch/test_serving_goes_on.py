"""Whatever goes wrong in capture: requests are answered as stock, the server starts and ends, and it is said why."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas_capture import contract, lifecycle, memory
from eyas_capture.capture import Capture
from eyas_capture.identity import Identity
from eyas_capture.layers import CaptureLayers
from eyas_capture.lifecycle import Lifecycle
from eyas_capture.settings import Settings
from eyas_capture.writer import Writer
from tests.server_patch.bench import Bench, Model, Request
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import PAGE, Fence, filled, submit


def test_a_request_that_is_not_what_the_plugin_knows_ends_capture_and_not_the_server(bench: Bench) -> None:
    r = Request("r", 5)
    del r.sampling_params
    bench.run([(r, 0, 5)])
    assert bench.end() == {} and bench.writer.state == contract.BROKEN


def test_trouble_of_the_writing_rank_alone_leaves_it_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks run their capture path for the same passes."""
    bench = Bench(tmp_path, ranks=2)

    def fail() -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(bench.capture, "close_ended", fail)
    seen = []

    def forward(*args: Any) -> Any:
        seen.append(list(bench.model.llama.model.layers_to_capture))
        return bench.model.forward(*args)

    r = Request("r", 5)
    batch = bench.announce([(r, 0, 5)])
    bench.capture.forward(forward, (batch.input_ids, None, batch), {})
    assert seen == [[2, 4]] and bench.writer.state == contract.BROKEN


def test_a_rank_of_its_own_without_a_writer_runs_the_stock_model(tmp_path: Path) -> None:
    model = Model(packed=True)
    capture = Capture(CaptureLayers(model.llama, (1, 3)), "all", None)
    r = Request("r", 5)
    batch = Bench(tmp_path / "unused").batch([(r, 0, 5)])
    capture.announce([r], batch)

    def forward(*args: Any) -> Any:
        assert not model.llama.model.layers_to_capture
        return model.forward(*args)

    assert isinstance(capture.forward(forward, (batch.input_ids, None, batch), {}), torch.Tensor)


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


@pytest.mark.parametrize("missing", ["threads", "memory"])
def test_a_writer_that_cannot_start_leaves_one_word_of_it_and_the_rank_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Other ranks capture, and may wait for this one in a collective: it goes the same way, without a writer."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread") if missing == "threads" else OSError(24, "Too many open files")

    if missing == "threads":
        monkeypatch.setattr(threading.Thread, "start", fail)
    else:
        monkeypatch.setattr(memory.os, "memfd_create", fail)
    one = Lifecycle({contract.ENV_DUMP_DIR: str(tmp_path)})
    one._settings = Settings.from_env({})
    assert one._started_writer(Identity(tmp_path, None, {}), torch.device("cpu")) is None
    (file,) = tmp_path.glob(f"*/{contract.WRITER_FILE}")
    written = json.loads(file.read_text())
    assert written["state"] == contract.REFUSED and len(written["refused"]) == 1


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


def test_after_an_end_that_could_not_wait_the_books_are_closed(
    disk: SlowDisk, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no publisher has been sent is lost; what one has stays pending, as it may still appear."""
    disk.wait()
    one = made()
    submit(one, filled(one), None)
    monkeypatch.setattr(one._handover, "_send", lambda: None)  # it has as much to do as it can remember
    for _ in range(2):
        submit(one, filled(one), None)
    flying = [filled(one) for _ in range(3)]
    for assembly in flying:
        assembly.fence = Fence()  # its rows are still on the way from the GPU
        one.submit(assembly, None)
    assert [one.stop(0.2), one.stop(0.2)] == [False, False]
    totals = one.totals.as_json()
    assert totals["lost"] == {contract.SERVER_STOPPED: 5} and totals["pending"] == 1
    assert totals["queue_bytes"] == PAGE, "what is under way or waiting"
    assert all(assembly.places for assembly in flying), "the GPU may still write there"
    for assembly in flying:
        assembly.fence.passed = True
    one.look()  # a forward pass that went on
    assert one.totals.as_json()["pending"] == 1


def test_a_gpu_that_fails_takes_its_dump_and_neither_those_behind_it_nor_the_end(made: Callable[..., Writer]) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    one = made()
    first, second = filled(one), filled(one)
    first.fence = SimpleNamespace(query=fail)
    one.submit(first, None)
    one.submit(second, None)
    assert one.stop(10)
    assert one.totals.as_json()["lost"] == {"RuntimeError": 1} and one.totals.complete == 1
    assert one.totals.queue_bytes == 0


def test_an_end_of_capture_that_fails_hides_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("ours")

    def loop(scheduler: Any) -> None:
        raise ValueError("the scheduler's own")

    bench.run([(Request("r", 5), 0, 5)])
    monkeypatch.setattr(bench.capture, "close_all", fail)
    with pytest.raises(ValueError, match="the scheduler's own"):
        begun(bench).around_event_loop(loop, None)
    assert bench.totals["complete"] == 1, "the queue is written all the same"


def test_memory_that_is_not_to_be_had_is_an_error_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Populating a mapping would be silent about it, and the first touch end the server."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", fail)
    bench.run([(Request("r", 5), 0, 5)])
    assert bench.end() == {} and bench.totals["lost"] == {"No space left on device": 1}
    assert bench.writer.memory.bytes_in_use == 0 == os.fstat(bench.writer.memory.descriptor).st_blocks


def test_an_order_that_is_too_long_for_a_message_is_lost_alone(made: Callable[..., Writer]) -> None:
    one = made()
    assemblies = [filled(one) for _ in range(3)]
    assemblies[1].request_id = "\N{EAGLE}" * 100_000
    for assembly in assemblies:
        submit(one, assembly, None)
    assert one.stop(10)
    assert one.totals.complete == 2 and one.totals.lost.total() == 1
