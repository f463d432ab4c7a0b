"""The dump folder: read with distrust, cleared without leaving halves, watched without being worn out."""

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from eyas_capture import contract
from hidden_states.dump import DumpFolder, read_record
from hidden_states.errors import DumpError
from hidden_states.record import BadDump
from tests.dump_factory import DumpFactory

IDS = list(range(20, 52))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> DumpFactory:
    return DumpFactory(tmp_path_factory.mktemp("template"), tiny_llama)


@pytest.fixture
def factory(template: DumpFactory, tmp_path: Path) -> DumpFactory:
    return template.elsewhere(tmp_path / "dumps")


@pytest.fixture
def folder(factory: DumpFactory) -> DumpFolder:
    return DumpFolder(factory.folder)


def test_a_folder_without_a_server_yet_has_no_writers_and_no_dumps(tmp_path: Path) -> None:
    for path in (tmp_path / "not there", tmp_path):
        folder = DumpFolder(path)
        assert (folder.writers(), folder.dumps(), folder.base_line(), folder.clear()) == ([], [], {}, 0)


def test_only_published_dumps_are_seen(factory: DumpFactory, folder: DumpFolder, tmp_path: Path) -> None:
    published = factory.write("eyas-1", IDS)
    (published.parent / contract.partial_name(7)).mkdir()
    (published.parent / "notes.txt").write_text("a file")
    (published.parent / "req_9").symlink_to(tmp_path)
    (factory.folder / "lost+found").mkdir()
    assert [ref.counter for ref in folder.dumps()] == [0]
    assert folder.clear() == 1
    assert tmp_path.exists() and (published.parent / "notes.txt").exists()


def test_tensors_come_as_captured(factory: DumpFactory, folder: DumpFolder) -> None:
    states = factory.states(IDS)
    factory.write("eyas-1", IDS, states)
    (dump,) = (folder.open(ref) for ref in folder.dumps())
    assert list(dump.states.tensors) == list(states)
    for name, tensor in states.items():
        assert dump.tensor(name).equal(tensor) and bytes(dump.raw(name)) == tensor.contiguous().numpy().tobytes()
    dump.verify()
    with pytest.raises(BadDump, match="no tensor 'after_block_9'"):
        dump.tensor("after_block_9")


def test_a_dump_can_be_read_after_its_folder_is_gone(factory: DumpFactory, folder: DumpFolder) -> None:
    """A batch that is done is removed while its shard may still be written from the mapped rows."""
    factory.write("eyas-1", IDS)
    (dump,) = (folder.open(ref) for ref in folder.dumps())
    final = dump.tensor(contract.FINAL)
    folder.clear()
    assert final.equal(factory.states(IDS)[contract.FINAL])


def test_the_base_line_remembers_what_was_removed(factory: DumpFactory, folder: DumpFolder) -> None:
    assert folder.base_line() == {factory.writer_id: -1}
    for n in range(3):
        factory.write(f"warm-up-{n}", IDS)
    assert folder.clear() == 3
    assert folder.base_line() == {factory.writer_id: 2}
    assert folder.seen() == {factory.writer_id: {0, 1, 2}}


def test_the_base_line_counts_a_warm_up_dump_that_is_still_being_written(factory: DumpFactory) -> None:
    factory.write_writer(totals={"captured": 5})
    assert DumpFolder(factory.folder).base_line() == {factory.writer_id: 4}


def test_waiting_ends_when_the_last_dump_appears(factory: DumpFactory, folder: DumpFolder) -> None:
    states = factory.states(IDS)
    factory.write("eyas-1", IDS, states)
    looks = []

    def publish_at_the_third_look() -> bool:
        looks.append(1)
        if len(looks) == 3:
            factory.write("eyas-2", IDS, states)
        return True

    assert folder.wait_for({"eyas-1", "eyas-2"}, 60, publish_at_the_third_look) == set()
    assert len(looks) == 3


def test_waiting_names_what_did_not_come_and_stops_when_the_server_is_gone(
    factory: DumpFactory, folder: DumpFolder
) -> None:
    factory.write("eyas-1", IDS)
    assert folder.wait_for({"eyas-1", "eyas-2"}, 0.05) == {"eyas-2"}
    assert folder.wait_for({"eyas-1", "eyas-2"}, 600, lambda: False) == {"eyas-2"}


def test_two_readers_may_clear_at_once(factory: DumpFactory) -> None:
    states = factory.states(IDS)
    for n in range(20):
        factory.write(f"eyas-{n}", IDS, states)
    removed: list[int] = []
    threads = [threading.Thread(target=lambda: removed.append(DumpFolder(factory.folder).clear())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(removed) == 20
    assert [path.name for path in (factory.folder / factory.writer_id).iterdir()] == [contract.WRITER_FILE]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_a_folder_of_another_user_is_refused(factory: DumpFactory, folder: DumpFolder) -> None:
    path = factory.write("eyas-1", IDS).parent
    path.chmod(0o500)
    with pytest.raises(DumpError, match="run it as the server's user"):
        folder.clear()
    path.chmod(0o700)


# --- distrust --------------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("contract", 2, "contract"),
    ("counter", -1, "record-file"),
    ("counter", True, "record-file"),
    ("counter", 5, "misplaced"),
    ("writer_id", "another", "misplaced"),
    ("request_id", None, "record-file"),
    ("tokens", "32", "record-file"),
    ("spans", [[0]], "record-file"),
    ("spans", [[0, -1]], "record-file"),
    ("spans", {"0": 32}, "record-file"),
    ("checksums", {"final": 7}, "record-file"),
    ("complete", 1, "record-file"),
]


@pytest.mark.parametrize(("key", "value", "check"), WRONG, ids=[f"{k}={v}" for k, v, _ in WRONG])
def test_a_record_that_is_not_of_the_contract_is_refused_by_name(
    key: str, value: Any, check: str, factory: DumpFactory, folder: DumpFolder
) -> None:
    path = factory.write("eyas-1", IDS) / contract.RECORD_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(BadDump) as error:
        read_record(folder.dumps()[0])
    assert error.value.check == check
    assert f"[{check}]" in str(error.value)
    again = pickle.loads(pickle.dumps(error.value))  # Prefect moves errors between processes
    assert (str(again), again.check) == (str(error.value), check)


@pytest.mark.parametrize("key", contract.RECORD_KEYS)
def test_a_record_without_a_key_is_refused(key: str, factory: DumpFactory, folder: DumpFolder) -> None:
    path = factory.write("eyas-1", IDS) / contract.RECORD_FILE
    record = json.loads(path.read_text())
    del record[key]
    path.write_text(json.dumps(record))
    with pytest.raises(BadDump):
        read_record(folder.dumps()[0])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"contract": 1}', "[" * 100_000])
def test_a_damaged_record_or_writer_file_is_refused(text: str, factory: DumpFactory, folder: DumpFolder) -> None:
    path = factory.write("eyas-1", IDS)
    (path / contract.RECORD_FILE).write_text(text)
    with pytest.raises(BadDump):
        read_record(folder.dumps()[0])
    assert folder.request_ids() == set()
    (path.parent / contract.WRITER_FILE).write_text(text)
    with pytest.raises(BadDump):
        folder.writers()


def test_a_writer_that_refused_is_read_with_its_reasons(factory: DumpFactory, folder: DumpFolder) -> None:
    unknown = dict.fromkeys(("architecture", "dtype", "hidden_size", "blocks", "after_block", "final_norm", "totals"))
    factory.write_writer(state=contract.REFUSED, refused=["prefill graphs are on"], **unknown)
    (writer,) = folder.writers()
    assert (writer.state, writer.refused) == (contract.REFUSED, ("prefill graphs are on",))
    assert (writer.after_block, writer.next_counter) == ((), 0)
