"""The local stack is really ready when it says so, shares its folder with nobody, and is really gone afterwards."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

from hidden_states.errors import ServerError
from infra.detached import DetachedProcess
from infra.lifeline import start_time
from infra.object_store import credentials, object_store
from infra.process import running
from infra.service import Service, unready_http, wait_ready
from infra.services import MLFLOW, PREFECT, STORE, LocalStack, embedded_store


def listens(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1" and parts.port is not None
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(2)
        return probe.connect_ex((parts.hostname, parts.port)) == 0


def client(url: str) -> Any:
    """With the credentials of this moment: boto3's default session remembers those of its first use."""
    return boto3.Session().client("s3", endpoint_url=url, region_name="us-east-1")


def put(url: str, bucket: str, key: str) -> None:
    client(url).put_object(Bucket=bucket, Key=key, Body=b"1")


def keys(url: str, bucket: str) -> set[str]:
    answer = client(url).list_objects_v2(Bucket=bucket)
    return {entry["Key"] for entry in answer.get("Contents", [])}


def test_an_embedded_store_keeps_what_it_was_given_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-user")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "of-the-user")
    with embedded_store(tmp_path, "first-bucket") as url:
        put(url, "first-bucket", "a")
    assert not listens(url)
    with embedded_store(tmp_path, "second-bucket") as url:
        put(url, "second-bucket", "b")
        assert keys(url, "first-bucket") == {"a"} and keys(url, "second-bucket") == {"b"}
    assert not listens(url)
    assert os.environ["AWS_ACCESS_KEY_ID"] == os.environ["AWS_PROFILE"] == "of-the-user"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ


def test_the_stores_credentials_are_random_private_and_not_on_its_command_line(tmp_path: Path) -> None:
    first, second = credentials(tmp_path / "one"), credentials(tmp_path / "two")
    assert first == credentials(tmp_path / "one") and not set(first) & set(second)
    assert stat.S_IMODE((tmp_path / "one" / "credentials.json").stat().st_mode) == 0o600
    service = object_store(tmp_path / "one", "eyas")
    assert not any(secret in " ".join(service.command) for secret in first)


def test_two_runs_do_not_start_stores_on_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from infra.services import embedded_store\n"
        "with embedded_store(Path(sys.argv[1])):\n    print('up', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "up\n"
        for start in (embedded_store(tmp_path).__enter__, LocalStack(tmp_path).up):
            with pytest.raises(ServerError, match=f"another run \\(process {other.pid}\\).*eyas up"):
                start()
        assert LocalStack(tmp_path).down() == []  # somebody else's is not ours to end
    finally:
        other.stdin.close()
        assert other.wait(60) == 0
    assert running(tmp_path / "services" / f"{STORE}.pid.json") == []


@pytest.mark.slow
def test_the_stack_comes_up_is_shared_and_goes_down(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path)
    assert stack.environment() == {} and stack.down() == []
    try:
        status = stack.up()
        urls = {name: service["url"] for name, service in status["services"].items()}
        assert set(urls) == {STORE, PREFECT, MLFLOW} and all(listens(url) for url in urls.values())
        assert unready_http(f"{urls[PREFECT]}/ready") is None and unready_http(f"{urls[MLFLOW]}/health") is None
        assert stack.up() == status  # nothing is started twice
        found = LocalStack(tmp_path).environment()
        assert found["PREFECT_API_URL"] == urls[PREFECT] and found["AWS_ENDPOINT_URL"] == urls[STORE]
        secrets = credentials(tmp_path / STORE)
        assert not any(secret in json.dumps(status) + stack.file.read_text() for secret in secrets)
        with embedded_store(tmp_path, "another") as url:  # a run takes the stack's store, and leaves it running
            assert url == urls[STORE]
            put(url, "another", "x")
        assert listens(urls[STORE])
        pids = [service["pid"] for service in status["services"].values()]
    finally:
        ended = stack.down()
    assert sorted(ended) == sorted(urls)
    assert not any(listens(url) for url in urls.values())
    assert all(start_time(pid) is None for pid in pids)
    assert stack.environment() == {} and stack.down() == []


def test_a_service_that_ends_while_starting_shows_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('the disk is on fire'); raise SystemExit(3)"]
    service = Service("toaster", command, {}, "http://127.0.0.1:1", lambda: "not yet", deadline_s=30)
    process = DetachedProcess(log_path=tmp_path / "log", pid_file=tmp_path / "pid", name="toaster")
    with pytest.raises(ServerError, match=r"(?s)toaster.*the disk is on fire"):
        process.start(service.command, service.env)
        wait_ready(service, process)


def test_a_service_that_is_never_ready_meets_its_deadline_with_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; print('thinking', flush=True); signal.pause()"]
    service = Service("sloth", command, {}, "http://127.0.0.1:1", lambda: "HTTP 503", deadline_s=0.5)
    process = DetachedProcess(log_path=tmp_path / "log", pid_file=tmp_path / "pid", name="sloth")
    process.start(service.command, service.env)
    try:
        with pytest.raises(ServerError, match=r"not ready after 0.5 s \(HTTP 503\)"):
            wait_ready(service, process)
    finally:
        assert process.stop()
    assert not process.alive() and not process.stop()


def test_a_detached_process_outlives_the_command_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from infra.detached import DetachedProcess\n"
        "DetachedProcess(log_path=Path(sys.argv[1]), pid_file=Path(sys.argv[2]), name='x')"
        ".start([sys.executable, '-c', 'import signal; signal.pause()'], {})"
    )
    log, pid_file = tmp_path / "log", tmp_path / "pid"
    subprocess.run([sys.executable, "-c", code, str(log), str(pid_file)], check=True)
    process = DetachedProcess(log_path=log, pid_file=pid_file, name="x")
    assert process.alive() and process.pid() is not None
    assert process.stop() and not process.alive() and running(pid_file) == []
