"""A capture, a writer and a disk under it, for each test of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyas_capture import writer
from eyas_capture.identity import Identity
from eyas_capture.writer import Writer
from tests.server_patch.bench import Bench
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import H, no_tick


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Writer]]:
    """Writers with one publisher on any machine, that are stopped in the end."""
    monkeypatch.setattr(writer, "process_count", lambda: 1)
    writers = []

    def make(queue_bytes: int = 1 << 20, wait: bool = True) -> Writer:
        one = Writer(Identity(tmp_path / "dumps", None, {"hidden_size": H}), queue_bytes, wait)
        one.start(no_tick)
        writers.append(one)
        return one

    yield make
    for one in writers:
        one.stop(10)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    one = SlowDisk(tmp_path / "disk", monkeypatch)
    yield one
    one.go_on()


@pytest.fixture(params=["packed", "list"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Both forms in which model files return captured rows."""
    one = Bench(tmp_path, packed=request.param == "packed")
    yield one
    one.writer.stop(10)
