"""What SGLangServer promises: ready means ready, dead and hanging servers are explained, nothing is left."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hidden_states.errors import RecipeError, ServerError
from infra import lifeline
from infra.ports import free_port
from infra.server import ServerSpec, SGLangServer, attach, flag_arguments
from tests.servers import READY_DEADLINE_S, REPOSITORY, cpu_spec
from tests.tiny_models import make_tiny

DEADLINE_S = 60.0


@pytest.fixture
def fake(tmp_path: Path) -> ServerSpec:
    """A spec whose interpreter runs the stand-in, whatever module it is told to run."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {REPOSITORY}/tests/infra/fake_sglang.py "$@"\n')
    python.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return ServerSpec(python=python, model_path=model, log_path=tmp_path / "log", pid_file=tmp_path / "pid")


def test_a_missing_interpreter_is_named_before_anything_starts(fake):
    fake.python = "/no/such/python"
    with pytest.raises(RecipeError, match=r"server\.python: /no/such/python is no program"):
        SGLangServer(fake).start()


@pytest.mark.parametrize("which", ["model_path", "draft_path"])
def test_a_missing_model_is_named_before_anything_starts(fake, tmp_path, which):
    setattr(fake, which, tmp_path / "nothing")
    with pytest.raises(RecipeError, match=r"nothing holds no config\.json"):
        SGLangServer(fake).start()
    assert not fake.log_path.exists()


@pytest.mark.parametrize("key", ["port", "host", "model-path", "model_path", "--speculative-draft-model-path"])
def test_a_flag_that_eyas_sets_is_refused_in_the_recipe(fake, key):
    fake.flags = {key: "x"}
    with pytest.raises(RecipeError, match="is set by Eyas"):
        SGLangServer(fake).start()


def test_a_port_in_use_is_refused_before_anything_starts(fake):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fake.port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{fake.port}: process {os.getpid()} .* listens there"):
            SGLangServer(fake).start()
    assert not fake.log_path.exists()


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ({"tp-size": 8}, ["--tp-size", "8"]),
        ({"trust-remote-code": True}, ["--trust-remote-code"]),
        ({"disable-cuda-graph": False, "revision": None}, []),
        ({"cuda-graph-bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ({"json-model-override-args": {"a": 1}}, ["--json-model-override-args", '{"a": 1}']),
        ({"mem-fraction-static": 0.85, "dtype": "bfloat16"}, ["--mem-fraction-static", "0.85", "--dtype", "bfloat16"]),
    ],
)
def test_flags_become_arguments(flags, arguments):
    assert flag_arguments(flags) == arguments


def test_a_drafter_is_served_as_a_chain(fake, tmp_path):
    fake.draft_path, fake.num_steps, fake.flags = fake.model_path, 4, {"tp_size": 2}
    with SGLangServer(fake) as server:
        arguments = server.process.command
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--speculative-algorithm"] == "EAGLE3"
    assert pairs["--speculative-draft-model-path"] == str(fake.model_path)
    assert (pairs["--speculative-num-steps"], pairs["--speculative-num-draft-tokens"]) == ("4", "5")
    assert pairs["--speculative-eagle-topk"] == "1"
    assert pairs["--tp-size"] == "2"


def test_only_a_finished_warm_up_means_ready(fake, tmp_path):
    ready = tmp_path / "ready"
    fake.env = {"FAKE_PART": "slow", "FAKE_READY": str(ready)}
    lines: list[str] = []
    with SGLangServer(fake) as server:
        waiting = threading.Thread(target=server.wait_ready, args=(DEADLINE_S, lines.append))
        waiting.start()
        attached = attach(server.base_url)
        while True:
            try:
                assert attached.info() == {"version": "fake"}  # /server_info answers long before the server is ready
                break
            except ServerError:
                assert waiting.is_alive(), "the stand-in did not start"
        assert not attached.alive()
        assert waiting.is_alive()
        ready.touch()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
        assert attached.alive()
    assert lines[0].startswith("playing slow -m sglang.launch_server --model-path")


@pytest.mark.parametrize("ready_at", [2, 3])
def test_a_port_taken_while_the_server_loads_costs_a_new_start_with_another(fake, tmp_path, ready_at):
    starts, lines = tmp_path / "starts", []
    fake.env = {"FAKE_PART": "ousted", "FAKE_READY": str(starts), "FAKE_OUSTED": str(ready_at)}
    with SGLangServer(fake) as server:
        server.wait_ready(DEADLINE_S, lines.append)
        ports = starts.read_text().split()
        assert len(set(ports)) == ready_at
        assert server.base_url.endswith(f":{ports[-1]}")
    assert sum(line.startswith("playing ousted") for line in lines) == ready_at


def test_a_server_whose_ports_are_taken_again_and_again_is_given_up(fake, tmp_path):
    starts = tmp_path / "starts"
    fake.env = {"FAKE_PART": "ousted", "FAKE_READY": str(starts), "FAKE_OUSTED": "99"}
    with SGLangServer(fake) as server, pytest.raises(ServerError, match=r"died with status 137. Another program took"):
        server.wait_ready(DEADLINE_S)
    assert len(starts.read_text().split()) == 3


def test_a_port_that_the_recipe_names_is_not_exchanged(fake, tmp_path):
    starts = tmp_path / "starts"
    fake.port = free_port()
    fake.env = {"FAKE_PART": "ousted", "FAKE_READY": str(starts), "FAKE_OUSTED": "2"}
    with SGLangServer(fake) as server, pytest.raises(ServerError, match=r"leave server\.port out"):
        server.wait_ready(DEADLINE_S)
    assert starts.read_text().split() == [str(fake.port)]


@pytest.mark.parametrize("part", ["loads", "warms-up"])
def test_a_server_that_never_gets_ready_is_ended_and_its_stacks_are_saved(fake, part):
    fake.env = {"FAKE_PART": part}
    server = SGLangServer(fake).start()
    pids = server.process.pids()
    with pytest.raises(ServerError, match=r"not ready after 3 s, and ended.*\n *playing " + part) as refusal:
        server.wait_ready(3)
    assert all(lifeline.start_time(pid) is None for pid in pids)
    stacks = fake.log_path.with_suffix(".stacks.txt")
    assert "never_ready" in stacks.read_text()
    assert str(stacks) in str(refusal.value)


def test_somebody_else_who_answers_on_our_port_is_not_taken_for_our_server(fake):
    class Well(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    fake.env = {"FAKE_PART": "loads"}
    with SGLangServer(fake) as server, HTTPServer(("127.0.0.1", server.port), Well) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        with pytest.raises(ServerError, match=f"process {os.getpid()} .* answers there"):
            server.wait_ready(DEADLINE_S)
        stranger.shutdown()
        assert not server.alive()


def test_a_server_killed_while_serving_is_seen_to_be_dead(fake, tmp_path):
    ready = tmp_path / "ready"
    ready.touch()
    fake.env = {"FAKE_PART": "slow", "FAKE_READY": str(ready)}
    with SGLangServer(fake) as server:
        server.wait_ready(DEADLINE_S)
        os.kill(server.process.pids()[0], signal.SIGKILL)
        since = time.monotonic()
        while server.alive():
            assert time.monotonic() - since < 5
        with pytest.raises(ServerError, match="the server died with status 137"):
            server.ensure_alive()


def test_a_server_elsewhere_that_does_not_answer_is_given_up():
    with pytest.raises(ServerError, match="no healthy server within 1 s"):
        attach(f"http://127.0.0.1:{free_port()}/").wait_ready(1)


@pytest.mark.slow
def test_a_wrong_flag_is_told_within_seconds_with_the_servers_own_words(tiny_llama, tmp_path):
    with (
        SGLangServer(cpu_spec(tiny_llama, tmp_path, no_such_flag=1)) as server,
        pytest.raises(
            ServerError, match=r"died with status 2.*server.flags(.|\n)*unrecognized arguments: --no-such-flag 1"
        ),
    ):
        server.wait_ready(READY_DEADLINE_S)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_with_the_servers_own_words(tmp_path):
    model = make_tiny("llama", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"")
    with (
        SGLangServer(cpu_spec(model, tmp_path)) as server,
        pytest.raises(ServerError, match=r"the server died with status(.|\n)*Its last lines"),
    ):
        server.wait_ready(READY_DEADLINE_S)


@pytest.mark.slow
def test_a_real_server_gets_ready_and_tells_about_itself(llama_server):
    info = llama_server.info()
    assert info["version"] == "0.5.23"
    assert info["dtype"] == "float32"
    assert attach(llama_server.base_url).alive()


@pytest.mark.slow
def test_a_real_server_is_gone_when_its_owner_was_killed(tiny_llama, tmp_path):
    script = f"""
import json, os, signal
from pathlib import Path
from infra.server import SGLangServer
from tests.servers import cpu_spec
server = SGLangServer(cpu_spec(Path({str(tiny_llama)!r}), Path({str(tmp_path)!r}), skip_server_warmup=True)).start()
server.wait_ready({READY_DEADLINE_S})
print(json.dumps(server.process.pids()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    owner = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, check=False)
    pids = json.loads(owner.stdout)
    assert len(pids) >= 3, "launcher, scheduler and detokenizer"
    deadline = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if lifeline.start_time(pid) is not None]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
