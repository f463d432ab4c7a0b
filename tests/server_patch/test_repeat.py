"""The model's capture path fails: passes that are done again as stock, and those that must not be."""

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas_capture import contract
from eyas_capture.layers import CaptureLayers
from tests.server_patch.bench import Bench, H, Model, Request


class Broken(Model):
    """A model whose capture path raises, in the place of one whose capture the plugin switches."""

    def __init__(self, like: Model, error: Exception) -> None:
        super().__init__(like.packed)
        self.llama, self.error = like.llama, error

    def forward(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any) -> Any:
        if self.llama.model.layers_to_capture:
            raise self.error
        return super().forward(input_ids, positions, forward_batch)


def test_a_capture_path_that_raises_on_first_use_ends_capture_and_not_the_request(bench: Bench) -> None:
    """A model file that changed under the plugin: the first pass is a dry run, and is done again without capture."""

    stock = bench.model = Broken(
        bench.model, AttributeError("'AuxHiddenStatePacker' object has no attribute 'capture'")
    )
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


class Troubled(Model):
    """A model whose capture path fails on passes of `longest` tokens and more, with something big in its hands."""

    longest = 9

    def forward(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any, embeds: Any = None) -> Any:
        if self.llama.model.layers_to_capture and len(forward_batch.input_ids) >= self.longest:
            if embeds is not None:
                embeds += 1  # as fused kernels do
            held = torch.zeros(9)
            self.held = weakref.ref(held)
            raise torch.OutOfMemoryError
        assert not hasattr(self, "held") or self.held() is None, "the stock path must have the memory of the failed one"
        return super().forward(forward_batch.input_ids if embeds is None else embeds[:, 0], positions, forward_batch)

    def run(self, bench: Bench, request: Request, given: bool) -> torch.Tensor:
        """One pass through the capture; `given`: as embeddings, as a multimodal wrapper does it."""
        batch = bench.announce([(request, 0, len(request.origin_input_ids))])
        embeds = {"embeds": batch.input_ids[:, None].repeat(1, H).float()} if given else {}
        result: torch.Tensor = bench.capture.forward(self.forward, (batch.input_ids, None, batch), embeds)
        assert torch.equal(result[:, 0], batch.input_ids.float())
        return result


@pytest.mark.parametrize(("ranks", "given"), [(1, False), (1, True), (2, False)])
def test_a_pass_that_captures_no_memory_for_is_answered_where_it_may_be_repeated(
    tmp_path: Path, ranks: int, given: bool
) -> None:
    """Captured rows take memory which the stock path does not: a longer pass may find none. Not with other ranks, which
    may be in a collective, nor with embeddings that the failed pass may have changed."""
    bench = Bench(tmp_path, ranks=ranks)
    model = Troubled(packed=True)
    model.llama = bench.model.llama
    model.run(bench, Request("short", 5), given)
    if ranks > 1 or given:
        with pytest.raises(torch.OutOfMemoryError):
            model.run(bench, Request("long", 9), given)
    else:
        model.run(bench, Request("long", 9), given)
        assert bench.writer.state == contract.BROKEN
    assert "short" in bench.end()


@pytest.mark.parametrize("given", [False, True])
def test_the_dry_run_changes_nothing_that_the_stock_path_reads(bench: Bench, given: bool) -> None:
    model = Troubled(packed=True)
    model.longest, model.llama = 0, bench.model.llama
    for name in ("first", "second"):
        model.run(bench, Request(name, 5), given)
    assert bench.end() == {} and bench.writer.state == contract.BROKEN


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        torch.distributed.DistBackendError("NCCL error: unhandled system error"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        OSError(24, "Too many open files"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_trouble_of_one_rank_in_the_dry_run_does_not_leave_its_peers_in_a_collective(
    tmp_path: Path, error: Exception
) -> None:
    bench = Bench(tmp_path, ranks=2)
    batch = bench.announce([(Request("r", 5), 0, 5)])

    model = Broken(bench.model, error)
    with pytest.raises(type(error)):
        bench.capture.forward(model.forward, (batch.input_ids, None, batch), {})


@pytest.mark.parametrize("error", [AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError])
def test_a_defect_that_every_rank_meets_in_the_dry_run_costs_no_request(tmp_path: Path, error: type[Exception]) -> None:
    bench = Bench(tmp_path, ranks=2)

    bench.model = Broken(bench.model, error("mat1 and mat2 shapes cannot be multiplied"))
    bench.run([(Request("r", 5), 0, 5)])
    assert bench.end() == {} and bench.writer.state == contract.BROKEN


def test_a_pass_that_goes_on_from_a_recurrent_state_is_not_repeated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed one has moved the state on. So such a pass is not the dry run of a model that nobody has compared."""
    monkeypatch.setattr(CaptureLayers, "proven", False)
    model, prompt, other = Troubled(packed=True), Request("prompt", 9), Request("other", 5)
    model.llama, bench.model = bench.model.llama, model
    bench.run([(prompt, 4, 9), (other, 0, 5)])
    assert bench.totals["unseen_passes"] == 1 and bench.writer.state == contract.CAPTURING
    model.run(bench, Request("whole", 5), False)
    bench.run([(Request("hit", 9), 4, 9)])
    batch = bench.announce([(Request("long", 20), 4, 20)])
    with pytest.raises(torch.OutOfMemoryError):
        bench.capture.forward(model.forward, (batch.input_ids, None, batch), {})
    assert {name: record["complete"] for name, record in bench.end().items()} == {"whole": True, "hit": False}


@pytest.mark.parametrize("proven", [True, False])
def test_the_servers_warm_up_is_the_dry_run_also_where_nobody_opted_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proven: bool
) -> None:
    monkeypatch.setattr(CaptureLayers, "proven", proven)
    bench = Bench(tmp_path, mode="opted-in")
    bench.run([(Request("warm-up", 5), 0, 5)])
    bench.run([(Request("somebody's", 9), 4, 9), (Request("eyas-r", 5), 0, 5)])
    assert bench.end().keys() == {"eyas-r"} and bench.totals["unseen_passes"] == 0


def test_a_capture_path_that_fails_in_the_warm_up_is_told_before_anybody_is_captured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="opted-in")
    model = Troubled(packed=True)
    model.longest, model.llama = 0, bench.model.llama
    model.run(bench, Request("warm-up", 5), False)
    assert bench.writer.state == contract.BROKEN


def test_the_books_are_kept_while_a_pass_waits_for_the_disk(bench: Bench) -> None:
    """It holds the lock that ends of prefills need, and writer.json is rewritten by the thread that asks for them."""
    bench.run([(Request("open", 9), 0, 4)])
    with bench.capture._lock:
        thread = threading.Thread(target=bench.capture.close_ended, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
