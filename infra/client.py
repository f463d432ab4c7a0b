"""Talks to an SGLang server: token ids in, token ids out.

client = SGLangClient(server.base_url)
for answer in client.generate_many([client.request(ids) for ids in prompts]): ...
"""

import random
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from hidden_states.errors import DataError, Refusal, ServerError

ATTEMPTS = 5  # 0.5 + 1 + 2 + 4 s of waiting: a hiccup; a dead server is for its owner to start again
BACKOFF_S = 0.5


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt.

    Attributes:
        input_ids: token ids of the prompt.
        rid: request id; the server keeps it, the capture plugin records it.
        extra_key: separates the prefix cache: requests with different keys share nothing.
        max_new_tokens: 0 = prefill only.
        temperature: 0 = greedy.
        top_tokens: N > 0 asks for the N likeliest tokens at every output position, and with `prompt_from` at prompt
            positions too.
        prompt_from: first prompt position whose logits are wanted; None = none. (0 also switches the prefix cache off
            for this request.)
        sampling: further sampling parameters of SGLang.
    """

    input_ids: Sequence[int]
    rid: str
    extra_key: str | None = None
    max_new_tokens: int = 1
    temperature: float = 0.0
    top_tokens: int = 0
    prompt_from: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens this request may occupy in the server."""
        return len(self.input_ids) + self.max_new_tokens

    def body(self) -> dict[str, Any]:
        """The JSON of `POST /generate`."""
        body: dict[str, Any] = {
            "input_ids": list(self.input_ids),
            "rid": self.rid,
            "sampling_params": {
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.temperature,
                **self.sampling,
            },
        }
        if self.extra_key is not None:
            body["extra_key"] = self.extra_key
        if self.top_tokens or self.prompt_from is not None:
            body |= {
                "return_logprob": True,
                "top_logprobs_num": self.top_tokens,
                "logprob_start_len": -1 if self.prompt_from is None else self.prompt_from,
            }
        return body


@dataclass(frozen=True)
class Generation:
    """The server's answer.

    Attributes:
        output_ids: new tokens.
        prompt_tokens: prompt tokens as the server counts them.
        cached_tokens: how many of them came from the prefix cache.
        finish_reason: "stop" (end token), "length", ...
        spec_histogram: number of verifications that accepted 0, 1, 2, ... drafted tokens; None without a drafter.
        spec_verify_ct: number of verifications; 0 without a drafter.
        e2e_latency: seconds in the server.
        output_top: per output position the likeliest tokens, likeliest first; None unless asked for.
        prompt_top: the same from prompt position `prompt_from` on: entry i is what the model expects *at* position
            prompt_from + i, having read those before it. The first entry is empty.
    """

    rid: str
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    spec_histogram: list[int] | None
    spec_verify_ct: int
    e2e_latency: float
    output_top: list[list[int]] | None = None
    prompt_top: list[list[int]] | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Accepted drafted tokens per verification + 1 of this answer; None without a drafter."""
        return acceptance_length(self.spec_histogram) if self.spec_histogram else None


def acceptance_length(histogram: Sequence[int]) -> float:
    """Accepted drafted tokens per verification + 1, from a histogram of verifications by accepted tokens.

    SGLang's own `spec_accept_length` is another figure: output tokens / verifications, which counts the token that the
    prefill made as well.
    """
    verifications = sum(histogram)
    return 1.0 + sum(count * times for count, times in enumerate(histogram)) / verifications if verifications else 1.0


class SGLangClient:
    """A connection to one server. Safe to use from several threads.

    Args:
        base_url: address of the HTTP API.
        timeout_s: seconds one request may take, waiting in the server's queue included.
        vocab_size: the target's, to refuse other token ids before they are sent: SGLang checks lengths but not ids, and
            one id beyond the embedding ends the whole server (IndexError in the scheduler, a CUDA assert on a GPU).
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0, vocab_size: int | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.vocab_size = vocab_size
        # trust_env: a proxy set for the outside world must not get requests to our own server.
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    def request(self, input_ids: Sequence[int], *, rid: str | None = None, **options: Any) -> GenerateRequest:
        """A request for `generate_many`; see GenerateRequest for the options. A missing `rid` is made up."""
        return GenerateRequest(input_ids, rid or uuid.uuid4().hex, **options)

    def generate(self, input_ids: Sequence[int], *, rid: str | None = None, **options: Any) -> Generation:
        """Send one prompt and wait for the answer.

        Raises:
            DataError: the server refused the prompt (too long, ids beyond the vocabulary, ...); never retried.
            ServerError: no connection after several tries, no answer in time, or an answer that makes no sense.
        """
        return self.send(self.request(input_ids, rid=rid, **options))

    def generate_many(
        self, requests: Iterable[GenerateRequest], *, max_in_flight_tokens: int = 16384, max_in_flight: int = 16
    ) -> Iterator[Generation]:
        """Send prompts, a bounded number at once; answers come as they are ready, in any order.

        The first error ends it: no further request is sent, and it is raised once those under way are answered.

        Args:
            max_in_flight_tokens: bound of prompt + new tokens unanswered; a longer request goes alone.
            max_in_flight: bound of unanswered requests.
        """
        for _, answer in self.generate_each(
            requests, max_in_flight_tokens=max_in_flight_tokens, max_in_flight=max_in_flight
        ):
            if isinstance(answer, Refusal):
                raise answer
            yield answer

    def generate_each(
        self, requests: Iterable[GenerateRequest], *, max_in_flight_tokens: int = 16384, max_in_flight: int = 16
    ) -> Iterator[tuple[GenerateRequest, Generation | Refusal]]:
        """Like `generate_many`, but a request that failed is a pair with its error, and the others go on."""
        waiting = iter(requests)
        under_way: dict[Future[Generation], GenerateRequest] = {}
        with ThreadPoolExecutor(max_in_flight, thread_name_prefix="sglang-client") as pool:
            following = next(waiting, None)
            while following is not None or under_way:
                while following is not None and (
                    not under_way
                    or (
                        len(under_way) < max_in_flight
                        and sum(r.tokens for r in under_way.values()) + following.tokens <= max_in_flight_tokens
                    )
                ):
                    under_way[pool.submit(self.send, following)] = following
                    following = next(waiting, None)
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    request = under_way.pop(future)
                    try:
                        answer: Generation | Refusal = future.result()
                    except (DataError, ServerError) as error:
                        answer = error
                    yield request, answer

    def send(self, request: GenerateRequest) -> Generation:
        """Send one request; see `generate` for what it raises."""
        self._refuse_foreign_ids(request)
        answer = self._post("/generate", request.body(), f"request {request.rid}")
        return _read_answer(request, answer)

    def _refuse_foreign_ids(self, request: GenerateRequest) -> None:
        limit = self.vocab_size
        for position, token in enumerate(request.input_ids):
            if token < 0 or (limit is not None and token >= limit):
                raise DataError(
                    f"request {request.rid}, position {position}",
                    f"token id {token}",
                    "ids from 0" + (f" to {limit - 1}" if limit else ""),
                    "Was this prompt made with another model's tokenizer?",
                )

    def flush_cache(self) -> None:
        """Empty the prefix cache. The server refuses while requests run, so wait for their answers first."""
        self._post("/flush_cache", {}, "flush_cache")

    def server_info(self) -> dict[str, Any]:
        """The server's own description: `version`, flags in effect, memory."""
        answer = self._exchange("GET", "/server_info", None, "server_info")
        return dict(_json(answer, "server_info"))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, path: str, body: dict[str, Any], where: str) -> Any:
        answer = self._exchange("POST", path, body, where)
        return _json(answer, where) if path == "/generate" else None

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None, where: str) -> httpx.Response:
        found = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.8, 1.2))
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.TimeoutException as error:
                raise ServerError(
                    f"{where} at {self.base_url}",
                    f"no answer within {self.timeout_s:g} s",
                    None,
                    "The server hangs or its queue is too long: lower max_in_flight_tokens or raise request_timeout_s.",
                ) from error
            except httpx.TransportError as error:  # refused, reset, closed half-way
                found = f"no connection ({error})"
                continue
            if answer.status_code == 200:
                return answer
            found = f"status {answer.status_code}: {_message(answer)}"
            if answer.status_code == 503:
                continue
            if answer.status_code == 400:
                raise DataError(
                    where, f"the server refused it: {_message(answer)}", None, "Shorten or drop this prompt."
                )
            break
        raise ServerError(f"{where} at {self.base_url}", found, None, "See the server's log; was it stopped?")


def _read_answer(request: GenerateRequest, answer: Any) -> Generation:
    """Check an answer of `/generate` and take what we need from it."""
    where = f"request {request.rid}"
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            kind = DataError if reason.get("status_code") == 400 else ServerError
            raise kind(where, f"the server aborted it: {reason.get('message')}", None, "See the server's log.")
        generation = Generation(
            rid=meta["id"],
            output_ids=[int(token) for token in answer["output_ids"]],
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            finish_reason=reason["type"],
            spec_histogram=meta.get("spec_correct_drafts_histogram"),
            spec_verify_ct=meta.get("spec_verify_ct", 0),
            e2e_latency=meta["e2e_latency"],
            output_top=_top_ids(meta.get("output_top_logprobs")) if request.top_tokens else None,
            prompt_top=_top_ids(meta.get("input_top_logprobs")) if request.prompt_from is not None else None,
        )
    except (KeyError, TypeError) as error:
        raise ServerError(
            where, f"the answer lacks {error}", "an answer of SGLang's /generate", "Is this an SGLang server?"
        ) from error
    if generation.rid != request.rid or generation.prompt_tokens != len(request.input_ids):
        raise ServerError(
            where,
            f"the answer is for {generation.rid} with {generation.prompt_tokens} prompt tokens",
            f"{len(request.input_ids)} prompt tokens",
            "Something between client and server changes requests; talk to the server directly.",
        )
    return generation


def _top_ids(positions: list[Any] | None) -> list[list[int]] | None:
    """Token ids of SGLang's [(logprob, id, text), ...] per position."""
    return None if positions is None else [[int(entry[1]) for entry in position or []] for position in positions]


def _json(answer: httpx.Response, where: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise ServerError(where, f"the answer is no JSON: {answer.text[:200]!r}", None, "Is this SGLang?") from error


def _message(answer: httpx.Response) -> str:
    """The server's own words about an error."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500].strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
