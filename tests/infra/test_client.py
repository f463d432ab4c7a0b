"""What the client promises: errors by kind, bounded work in flight, answers checked before they are used."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hidden_states.errors import DataError, ServerError
from infra import client as client_module
from infra.client import SGLangClient, acceptance_length
from infra.ports import free_port
from tests.tiny_models import VOCAB

Answer = tuple[int, Any] | None  # None: the connection is cut


class ScriptedServer:
    """Answers POST /generate by a function of the request and the number of requests before it."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                with lock:
                    self.requests.append(body)
                    number = len(self.requests) - 1
                reply = answer(body, number)
                if reply is None:
                    handler.close_connection = True
                    handler.connection.close()
                    return
                data = reply[1] if isinstance(reply[1], bytes) else json.dumps(reply[1]).encode()
                handler.send_response(reply[0])
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def well(body: dict[str, Any], **changes: Any) -> Answer:
    meta = {
        "id": body["rid"], "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "e2e_latency": 0.1,
        "finish_reason": {"type": "length", "length": 1},
    }  # fmt: skip
    return 200, {"output_ids": [7], "meta_info": meta | changes}


@pytest.fixture
def scripted() -> Iterator[Callable[..., tuple[SGLangClient, ScriptedServer]]]:
    servers: list[ScriptedServer] = []

    def start(answer: Callable[[dict[str, Any], int], Answer], **options: Any) -> tuple[SGLangClient, ScriptedServer]:
        servers.append(ScriptedServer(answer))
        return SGLangClient(servers[-1].url, **options), servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_S", 0.001)


def test_a_refused_prompt_is_a_data_error_in_the_servers_words_and_not_sent_again(scripted):
    client, server = scripted(lambda body, n: (400, {"error": {"message": "The input is longer than the context"}}))
    with pytest.raises(DataError, match="request a: the server refused it: The input is longer than the context"):
        client.generate([1], rid="a")
    assert len(server.requests) == 1


@pytest.mark.parametrize("trouble", [(503, {"error": "starting"}), None], ids=["503", "cut connection"])
def test_a_passing_trouble_is_tried_again(scripted, trouble):
    client, server = scripted(lambda body, n: trouble if n < 2 else well(body))
    assert client.generate([1, 2], rid="a").output_ids == [7]
    assert [r["rid"] for r in server.requests] == ["a", "a", "a"]


@pytest.mark.parametrize("trouble", [(503, {"error": "starting"}), None], ids=["503", "cut connection"])
def test_a_lasting_trouble_is_a_server_error(scripted, trouble):
    client, server = scripted(lambda body, n: trouble)
    with pytest.raises(ServerError, match="status 503: starting" if trouble else "no connection"):
        client.generate([1])
    assert len(server.requests) == client_module.ATTEMPTS


def test_nobody_listening_is_a_server_error():
    with pytest.raises(ServerError, match=r"no connection .*refused"):
        SGLangClient(f"http://127.0.0.1:{free_port()}").generate([1])


def test_an_internal_error_is_a_server_error_and_not_sent_again(scripted):
    client, server = scripted(lambda body, n: (500, b"Internal Server Error"))
    with pytest.raises(ServerError, match="status 500: Internal Server Error"):
        client.generate([1])
    assert len(server.requests) == 1


def test_a_server_that_hangs_is_given_up(scripted):
    client, _ = scripted(lambda body, n: time.sleep(2), timeout_s=0.2)
    with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
        client.generate([1])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda body: (200, b"<html>"), "no JSON"),
        (lambda body: (200, {"text": "hi"}), "lacks 'meta_info'"),
        (lambda body: well(body, id="other"), "the answer is for other"),
        (lambda body: well(body, prompt_tokens=9), "9 prompt tokens"),
        (lambda body: well(body, finish_reason={"type": "abort", "message": "out of KV cache"}), "out of KV cache"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_server_error(scripted, answer, words):
    client, _ = scripted(lambda body, n: answer(body))
    with pytest.raises(ServerError, match=words):
        client.generate([1, 2, 3])


def test_one_bad_prompt_does_not_stop_the_others(scripted):
    client, _ = scripted(lambda body, n: (400, {"message": "no"}) if body["input_ids"] == [3] else well(body))
    requests = [client.request([i], rid=str(i)) for i in range(6)]
    answers = {request.rid: answer for request, answer in client.generate_each(requests, max_in_flight=2)}
    assert isinstance(answers.pop("3"), DataError)
    assert [answers[str(i)].rid for i in (0, 1, 2, 4, 5)] == ["0", "1", "2", "4", "5"]


def test_the_first_error_ends_the_sending(scripted):
    client, server = scripted(lambda body, n: (400, {"message": "no"}))
    with pytest.raises(DataError):
        list(client.generate_many([client.request([i]) for i in range(50)], max_in_flight=2))
    assert len(server.requests) <= 4


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(5, 40), st.integers(1, 5))
def test_work_in_flight_is_bounded(scripted, lengths, max_tokens, max_requests):
    lock, now, seen = threading.Lock(), [], []

    def answer(body: dict[str, Any], n: int) -> Answer:
        with lock:
            now.append(len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"])
            seen.append(list(now))
        time.sleep(0.002)
        with lock:
            now.remove(len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"])
        return well(body)

    client, _ = scripted(answer)
    requests = [client.request([1] * length, rid=str(i)) for i, length in enumerate(lengths)]
    answers = list(client.generate_many(requests, max_in_flight_tokens=max_tokens, max_in_flight=max_requests))

    assert sorted(a.rid for a in answers) == sorted(r.rid for r in requests)
    for together in seen:
        assert len(together) <= max_requests
        assert sum(together) <= max_tokens or len(together) == 1  # a request above the bound goes alone


@pytest.mark.parametrize(
    ("histogram", "length"), [([10], 1.0), ([0, 0, 0, 5], 4.0), ([393, 162, 64, 74], 1.0 + 512 / 693), ([], 1.0)]
)
def test_acceptance_is_accepted_per_verification_plus_one(histogram, length):
    assert acceptance_length(histogram) == pytest.approx(length)


@pytest.mark.parametrize("ids", [[5, VOCAB, 5], [-1]])
def test_foreign_token_ids_are_never_sent(scripted, ids):
    client, server = scripted(lambda body, n: well(body), vocab_size=VOCAB)
    with pytest.raises(DataError, match=f"token id {ids[ids[0] > 0]}; expected ids from 0 to {VOCAB - 1}"):
        client.generate(ids)
    assert server.requests == []


@pytest.mark.slow
class TestOnARealServer:
    @pytest.fixture
    def client(self, llama_server) -> Iterator[SGLangClient]:
        with SGLangClient(llama_server.base_url, vocab_size=VOCAB) as client:
            client.flush_cache()
            yield client

    def test_a_prompt_beyond_the_context_is_refused_in_the_servers_words(self, client):
        with pytest.raises(DataError, match=r"5000 tokens\) is longer than the model's context length \(4096"):
            client.generate([7] * 5000)
        with pytest.raises(DataError, match="empty"):
            client.generate([])

    def test_a_prefill_alone_is_possible(self, client):
        answer = client.generate(list(range(10, 50)), rid="prefill", max_new_tokens=0)
        assert (answer.rid, answer.prompt_tokens, answer.spec_histogram) == ("prefill", 40, None)

    def test_a_key_of_its_own_keeps_a_request_out_of_the_prefix_cache(self, client):
        ids = list(range(100, 180))
        assert client.generate(ids).cached_tokens == 0
        assert client.generate(ids).cached_tokens == 79
        assert client.generate(ids, rid="own", extra_key="own").cached_tokens == 0
        client.flush_cache()
        assert client.generate(ids).cached_tokens == 0

    def test_top_tokens_are_the_servers_own_choices(self, client):
        prompt = list(range(200, 230))
        answer = client.generate(prompt, max_new_tokens=5, top_tokens=2, sampling={"ignore_eos": True})
        assert [top[0] for top in answer.output_top] == answer.output_ids
        again = client.generate(prompt + answer.output_ids, max_new_tokens=1, top_tokens=1, prompt_from=0)
        assert again.prompt_top[0] == []
        assert [top[0] for top in again.prompt_top[len(prompt) :]] == answer.output_ids
        assert again.cached_tokens == 0

    def test_many_requests_are_answered_each_by_its_own_prompt(self, client):
        prompts = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(5 + 3 * i)] for i in range(12)]
        alone = [client.generate(p, rid=f"alone-{i}", max_new_tokens=4).output_ids for i, p in enumerate(prompts)]
        requests = [client.request(p, rid=str(i), max_new_tokens=4) for i, p in enumerate(prompts)]
        together = {a.rid: a.output_ids for a in client.generate_many(requests, max_in_flight_tokens=200)}
        assert [together[str(i)] for i in range(12)] == alone
