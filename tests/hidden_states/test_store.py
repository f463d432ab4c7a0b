"""The store's promises, kept by a folder and by a real S3 server alike, and what it says when it cannot keep them."""

import functools
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import hidden_states.store_s3 as store_s3
from hidden_states.errors import StoreError
from hidden_states.store import (
    BLOCK_BYTES,
    ObjectExists,
    ObjectMissing,
    Store,
    StoreUnreachable,
    digest_file,
    open_store,
)
from hidden_states.store_s3 import S3Store
from tests.fault_proxy import Fault, FaultProxy, fault_proxy, poor_store
from tests.object_store import RunningStore

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def random_file(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


def test_what_is_put_is_what_is_read(store: Store, tmp_path: Path) -> None:
    assert store.head("a/b") is None
    store.put_bytes("a/b", b"hello")
    assert store.get_bytes("a/b") == b"hello"
    assert store.get_range("a/b", 1, 3) == b"ell"
    info = store.head("a/b")
    assert info is not None and info.bytes == 5 and abs(info.modified - time.time()) < 60
    store.put_bytes("a/b", b"")
    assert store.get_bytes("a/b") == b""
    store.delete("a/b")
    store.delete("a/b")
    assert store.head("a/b") is None
    with pytest.raises(ObjectMissing, match="a/b"):
        store.get_bytes("a/b")


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 12_345])
def test_a_file_arrives_whole_and_proved(store: Store, tmp_path: Path, size: int) -> None:
    path = random_file(tmp_path / "file", size)
    proof = store.put_file("big/file", path, digest_file(path), if_none_match=True)
    assert proof == ("checksum by the store" if isinstance(store, S3Store) else "read back")
    copy = tmp_path / "copy"
    assert store.download("big/file", size, copy) == digest_file(path)
    assert copy.read_bytes() == path.read_bytes()
    assert store.fetch("big/file", size, tmp_path / "fetched") == digest_file(path).crc32
    assert (tmp_path / "fetched").read_bytes() == path.read_bytes()
    with pytest.raises(ObjectExists):
        store.put_file("big/file", path, if_none_match=True)


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES + 1000])
def test_a_file_that_changed_since_its_digest_is_refused(store: Store, tmp_path: Path, size: int) -> None:
    path = random_file(tmp_path / "file", size)
    digest = digest_file(path)
    with open(path, "r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StoreError):
        store.put_file("file", path, digest)
    assert store.head("file") is None
    assert list(store.list()) == []


def test_of_many_writers_with_a_condition_one_wins(store: Store) -> None:
    store.probe()

    def attempt(number: int) -> bool:
        try:
            store.put_bytes("manifest", b"%d" % number, if_none_match=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert sum(won) == 1
    assert store.get_bytes("manifest") == b"%d" % won.index(True)


def test_a_list_is_complete_in_order_and_of_its_prefix_only(store: Store) -> None:
    keys = sorted(f"x/{number:04}" for number in range(1100 if isinstance(store, S3Store) else 30))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put_bytes(key, key.encode()), [*keys, "w", "xy/1"]))
    assert [info.key for info in store.list("x/")] == keys
    assert [info.key for info in store.list("x/00")] == [key for key in keys if key.startswith("x/00")]
    assert len(list(store.list())) == len(keys) + 2


def test_a_range_past_the_end_is_an_error_and_no_short_answer(store: Store) -> None:
    store.put_bytes("short", b"12345")
    for start, length in ((3, 4), (9, 1)):
        with pytest.raises(StoreError, match="truncated"):
            store.get_range("short", start, length)


@pytest.mark.parametrize("key", ["../up", "a/../../b", "/abs", "a//b", "a/", "", "a\\b"])
def test_a_key_never_leaves_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        open_store((tmp_path / "store").as_uri()).put_bytes(key, b"")


def _child(store: Store) -> None:
    os._exit(0 if store.get_bytes("shared") == b"from the parent" else 1)


def test_a_forked_and_a_pickled_store_work(store: Store) -> None:
    store.put_bytes("shared", b"from the parent")
    assert pickle.loads(pickle.dumps(store)).get_bytes("shared") == b"from the parent"
    child = multiprocessing.get_context("fork").Process(target=_child, args=(store,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_killed_upload_leaves_no_object_and_is_swept(s3_server: RunningStore, tmp_path: Path) -> None:
    random_file(tmp_path / "file", 3 * BLOCK_BYTES)
    hold = Fault("hold", lambda method, path: method == "PUT" and "partNumber=3" in path)
    with fault_proxy(s3_server.url) as proxy:
        proxy.faults.append(hold)
        code = (
            "import sys; from pathlib import Path; from hidden_states.store_s3 import S3Store;"
            "S3Store(*sys.argv[1:3], endpoint_url=sys.argv[3]).put_file('file', Path(sys.argv[4]))"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, s3_server.bucket, "killed", proxy.url, str(tmp_path / "file")]
        )
        assert hold.reached.wait(60)
        child.send_signal(signal.SIGKILL)
        child.wait()
    store = s3_server.store("killed")
    assert store.head("file") is None
    assert store.abort_stale_uploads("", older_than_s=3600) == ()
    assert store.abort_stale_uploads("", older_than_s=-60) == ("file",)
    assert store.abort_stale_uploads("", older_than_s=-60) == ()


def test_a_killed_copy_is_no_object_and_is_swept(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    store.put_bytes("a/done", b"1")
    (tmp_path / "store/a/.eyas-tmp-1234").write_bytes(b"half")
    assert [info.key for info in store.list()] == ["a/done"]
    assert store.abort_stale_uploads("a/", older_than_s=-60) == ("a/.eyas-tmp-1234",)
    assert not (tmp_path / "store/a/.eyas-tmp-1234").exists()


# -- faults on the way, against the real server

Faulty = tuple[FaultProxy, S3Store]


@pytest.fixture(scope="module")
def faulty(s3_server: RunningStore) -> Iterator[Faulty]:
    """A store whose requests pass a proxy, connected before the faults begin."""
    with fault_proxy(s3_server.url) as proxy:
        store = s3_server.store("faulty", endpoint_url=proxy.url)
        store.capabilities()
        yield proxy, store


def is_put(method: str, path: str) -> bool:
    return method == "PUT" and ".eyas-probe" not in path


def is_data(method: str, path: str) -> bool:
    return method == "GET" and path.endswith("/file")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("error", is_put, times=2, status=503, code="SlowDown"),
        Fault("error", is_put, times=2, status=500),
        Fault("cut", is_put, times=2),
        Fault("lost", is_put),
        Fault("lost", lambda method, path: method == "POST" and "uploadId" in path),
        Fault("error", is_data, times=2, status=503, code="SlowDown"),
        Fault("half", is_data, times=3),
        Fault("cut", is_data, times=2),
        Fault("slow", is_data, times=2),
        Fault("torn", lambda method, path: method == "PUT" and "partNumber=1" in path, times=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
@pytest.mark.parametrize("how", ["download", "fetch"])
def test_a_passing_fault_loses_nothing(faulty: Faulty, tmp_path: Path, fault: Fault, how: str) -> None:
    proxy, store = faulty
    path = random_file(tmp_path / "file", BLOCK_BYTES + 1)
    proxy.faults = [replace(fault, reached=threading.Event())]
    store.put_file("file", path, if_none_match=True)
    found = getattr(store, how)("file", path.stat().st_size, tmp_path / "copy")
    assert found == (digest_file(path) if how == "download" else digest_file(path).crc32)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert proxy.faults[0].reached.is_set()
    assert store.abort_stale_uploads("", -60) == ()
    store.delete("file")


def test_a_conditional_put_whose_answer_was_lost_is_seen_as_taken(faulty: Faulty) -> None:
    proxy, store = faulty
    proxy.faults = [Fault("lost", is_put)]
    with pytest.raises(ObjectExists):
        store.put_bytes("manifest", b"mine", if_none_match=True)
    assert store.get_bytes("manifest") == b"mine"  # so a committer compares before it gives up


def test_a_store_that_stays_down_is_reported_as_such(s3_server: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_s3, "REQUEST_ATTEMPTS", 2)
    with fault_proxy(s3_server.url) as proxy:
        store = s3_server.store("down", endpoint_url=proxy.url)
        store.probe()
        proxy.faults.append(Fault("error", times=99, status=503, code="SlowDown"))
        with pytest.raises(StoreUnreachable, match=r"down/x.*SlowDown \(HTTP 503\)"):
            store.put_bytes("x", b"1")


# -- refusals


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def timed(call: Callable[[], object]) -> tuple[StoreError, float]:
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value, time.monotonic() - began


@pytest.mark.usefixtures("s3_server")
def test_an_endpoint_that_is_not_there_is_named_within_seconds() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error, seconds = timed(lambda: S3Store("eyas", endpoint_url=url).put_bytes("x", b""))
    assert isinstance(error, StoreUnreachable) and f"cannot reach {url}" in str(error)
    assert seconds < 15


@pytest.mark.usefixtures("s3_server")
def test_an_endpoint_that_accepts_and_never_answers_is_reported_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error, seconds = timed(lambda: S3Store("eyas", endpoint_url=url).put_bytes("x", b""))
    assert isinstance(error, StoreUnreachable) and url in str(error)
    assert seconds < 15


def test_each_kind_of_refusal_says_what_to_do(
    s3_server: RunningStore, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, store = faulty
    missing, _ = timed(lambda: S3Store("no-such-bucket", endpoint_url=s3_server.url).put_bytes("x", b""))
    assert "the bucket does not exist" in str(missing) and "Create it" in str(missing)
    answers = {
        ("PUT", 403, "AccessDenied"): ("no write permission", "s3:PutObject"),
        ("GET", 403, "AccessDenied"): ("access denied, cannot read", "s3:GetObject"),
        ("PUT", 403, "RequestTimeTooSkewed"): ("clock", "NTP"),
        ("PUT", 403, "ExpiredToken"): ("access denied", "expired"),
        ("PUT", 301, "PermanentRedirect"): ("another region", "region"),
        ("PUT", 400, "BadDigest"): ("not those sent", "Retry"),
        ("PUT", 501, "NotImplemented"): ("NotImplemented", "AWS_REQUEST_CHECKSUM_CALCULATION"),
        ("PUT", 418, "Teapot"): ("Teapot (HTTP 418)", "log"),
    }
    for (method, status, code), words in answers.items():
        proxy.faults = [Fault("error", lambda asked, _, method=method: asked == method, 1, status, code)]
        call = (
            functools.partial(store.put_bytes, "x", b"") if method == "PUT" else functools.partial(store.get_bytes, "x")
        )
        error, _ = timed(call)
        assert all(word in str(error) for word in words), str(error)
        assert "faulty/x" in str(error)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    wrong, _ = timed(lambda: s3_server.store("refusals").put_bytes("x", b""))
    assert "access denied" in str(wrong) and "key" in str(wrong)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    none, _ = timed(lambda: s3_server.store("refusals").put_bytes("x", b""))
    assert "no credentials found" in str(none)
    profile, _ = timed(lambda: S3Store("b", endpoint_url=s3_server.url, profile="nobody").put_bytes("x", b""))
    assert "profile" in str(profile)


def test_a_bucket_that_may_not_be_listed_can_be_written_and_read(s3_server: RunningStore) -> None:
    with fault_proxy(s3_server.url) as proxy:
        of_bucket = Fault(
            "error", lambda _, path: path.partition("?")[0] == f"/{s3_server.bucket}", 99, 403, "AccessDenied"
        )
        proxy.faults.append(of_bucket)
        store = s3_server.store("no-list", endpoint_url=proxy.url)
        store.put_bytes("x", b"1")
        assert store.get_bytes("x") == b"1"
        error, _ = timed(lambda: list(store.list()))
        assert "cannot list" in str(error) and "s3:ListBucket" in str(error)


@pytest.mark.usefixtures("s3_server")
def test_a_store_without_conditions_and_checksums_is_seen_through(tmp_path: Path) -> None:
    with poor_store() as url:
        store = S3Store("bucket", endpoint_url=url)
        found = store.probe()
        assert not found.conditional_put and not found.checksums
        path = random_file(tmp_path / "file", 1000)
        assert store.put_file("file", path) == "read back"
        with pytest.raises(StoreError, match="If-None-Match overwrote"):
            store.put_file("other", path, if_none_match=True)


def test_no_message_holds_a_credential(s3_server: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAPLANTED0000000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "planted-session-token")
    password = "hunter" + "2"  # in parts: tracebacks show the lines of this file too
    planted = ("AKIAPLANTED" + "0000000", SECRET, "planted-" + "session-token", password)
    store = s3_server.store("secrets")
    calls: list[Callable[[], object]] = [
        lambda: store.put_bytes("x", b""),
        lambda: store.get_bytes("x"),
        lambda: list(store.list()),
        lambda: open_store(f"s3://user:{password}@bucket/x"),
        lambda: open_store("s3://bucket/x", endpoint_url=f"http://user:{password}@host:1"),
        lambda: S3Store("b", endpoint_url=f"http://127.0.0.1:{free_port()}").head("x"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert not any(secret in shown for secret in planted)
    assert not any(secret in repr(store) or secret.encode() in pickle.dumps(store) for secret in planted)
