"""A recipe that lists servers: batches are shared out, and a server that dies costs its batch in flight."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eyas_capture import contract
from hidden_states.errors import DatasetError, ServerError
from infra.server import SGLangServer
from tasks.capture_pool import CapturePool, Ending
from tasks.dataset import shared_fingerprint
from tests.flows.runs import Place, tiny_recipe, wait_for
from tests.hidden_states.stored import Capture
from tests.servers import running_server


class Session:
    """Stands in for a CaptureSession: nothing is captured here, the pool only hands it out."""

    def __init__(self, owned: bool = True) -> None:
        self.owned, self.alive, self.revived, self.starts = owned, True, 0, 1

    def revive(self) -> None:
        self.revived += not self.alive
        self.alive = True

    def stop(self) -> None:
        self.alive = False


def pool_of(*sessions: Session) -> CapturePool:
    return CapturePool(list(sessions))  # type: ignore[arg-type]


def test_a_session_is_one_batchs_alone() -> None:
    pool = pool_of(Session(), Session())
    with pool.take() as one, pool.take() as other:
        assert one is not other
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(pool.take().__enter__()))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not got
    thread.join(10)
    assert len(got) == 1


@pytest.mark.parametrize("owned", [True, False])
def test_a_session_that_failed_is_avoided_while_another_is_free(owned: bool) -> None:
    bad, good = Session(owned), Session()
    pool = pool_of(bad, good)
    with pytest.raises(ServerError), pool.take() as taken:
        assert taken is bad
        bad.alive = False
        raise ServerError("server", "died")
    with pool.take() as taken:
        assert taken is good


def test_our_own_server_is_started_again_when_the_others_are_busy() -> None:
    bad, good = Session(), Session()
    pool = pool_of(bad, good)
    with pytest.raises(ServerError), pool.take():
        bad.alive = False
        raise ServerError("server", "died")
    with pool.take() as first, pool.take() as second:
        assert (first, second) == (good, bad)
        assert bad.revived == 1


def test_somebody_elses_dead_server_is_left_alone_until_all_are_dead() -> None:
    theirs, ours = Session(owned=False), Session()
    pool = pool_of(theirs, ours)
    with pytest.raises(ServerError), pool.take():
        theirs.alive = False
        raise ServerError("server", "died")
    for _ in range(3):
        with pool.take() as taken:
            assert taken is ours
    with pytest.raises(ServerError), pool.take():
        raise ServerError("server", "died")
    with pool.take() as first, pool.take() as second:
        assert {first, second} == {ours, theirs}


def test_nobody_waits_for_somebody_elses_server_that_died_between_two_batches() -> None:
    theirs, ours = Session(owned=False), Session()
    pool = pool_of(theirs, ours)
    theirs.alive = False
    for _ in range(3):
        with pool.take() as taken:
            assert taken is ours
    assert theirs.revived == 0


def test_an_ended_pool_hands_out_nothing_and_starts_nothing_again() -> None:
    session = Session()
    pool = pool_of(session)
    pool.stop()
    with pytest.raises(Ending), pool.take():
        pass
    assert session.revived == 0


@pytest.mark.parametrize(
    ("field", "value"), [("sglang_version", "0.5.22"), ("plugin_version", "0.0.9"), ("dtype", "float16")]
)
def test_servers_whose_states_may_not_be_mixed_are_refused_before_a_batch_is_captured(
    tmp_path: Path, field: str, value: str
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")
    writers = [Capture(tmp_path / "dumps", writer_id=f"20261129T150000-{pid}").writer for pid in (1, 2, 3)]
    assert shared_fingerprint(target, "replies", writers) == shared_fingerprint(target, "replies", writers[:1])
    writers[2] = replace(writers[2], **{field: value})
    with pytest.raises(DatasetError, match=f"150000-1 and .*150000-3: .*{field}: .* / {value}"):
        shared_fingerprint(target, "replies", writers)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[tuple[Place, SGLangServer]]:
    """A capturing server that somebody else runs, and a place with a recipe for its model."""
    place = Place(tmp_path / "here")
    place.folder.mkdir()
    tiny_recipe(place.folder)
    env = {contract.ENV_DUMP_DIR: str(tmp_path / "theirs"), contract.ENV_AFTER_BLOCK: "1,2,4"}
    with running_server(place.folder / "tiny-deepseek-v3", tmp_path / "server", env=env) as server:
        yield place, server


@pytest.mark.long
def test_a_dump_folder_that_is_not_the_servers_is_refused_and_a_server_that_dies_costs_its_batch(
    theirs: tuple[Place, SGLangServer],
) -> None:
    place, server = theirs
    where = {"store": {"uri": f"file://{place.folder}/store"}, "extract": {"batch_tokens": 80}}
    dumps = place.folder.parent / "theirs"
    (place.folder / "elsewhere").mkdir()
    other = {"url": server.base_url, "dump_dir": str(place.folder / "elsewhere")}
    recipe = str(tiny_recipe(place.folder, capture={"servers": [other]}, **where))
    for writer in dumps.iterdir():  # the writer is seen, its dumps are not
        (place.folder / "elsewhere" / writer.name).mkdir()
        (place.folder / "elsewhere" / writer.name / "writer.json").write_bytes((writer / "writer.json").read_bytes())
    status, output = place.run("extract", recipe)
    assert status == 4, output
    assert "its dump does not show here" in output and "Traceback" not in output
    assert "run `eyas extract` with this recipe on the server's own host" in output

    both = [{}, {"url": server.base_url, "dump_dir": str(dumps)}]
    recipe = str(tiny_recipe(place.folder, capture={"servers": both}, **where))
    process = place.start("extract", recipe)
    try:
        assert wait_for(lambda: len(list((place.folder / "store").glob("*/shards/*.json"))) >= 2, 300)
        server.stop()
        output = process.communicate(timeout=400)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    summary = place.summaries()[-1]
    assert (summary["samples_valid"], summary["samples_quarantined"]) == (40, 0)
    assert not place.wait_empty(10)
