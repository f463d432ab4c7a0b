"""Matching: by request id and tokens; the counter only tells gaps and strangers."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas_capture import contract
from hidden_states.dump import DumpFolder
from hidden_states.match import Gap, Reconciliation, reconcile
from hidden_states.samples import Sample
from tests.dump_factory import DumpFactory

SAMPLES = [Sample.of([n, n + 1, n + 2, n + 3], [0, 1, 1, 1], f"x:{n}") for n in range(6)]
REQUESTS = {f"eyas-run-{sample.id}": sample for sample in SAMPLES}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> DumpFactory:
    return DumpFactory(tmp_path_factory.mktemp("template"), tiny_llama)


class Server:
    """Writers in a dump folder; their states do not matter here."""

    def __init__(self, folder: Path, template: DumpFactory) -> None:
        self.folder, self.template = folder, template
        self.states = template.states(SAMPLES[0].input_ids)
        self.restart()

    def restart(self, writer_id: str = "20261129T150000-1") -> None:
        """A new writer whose counter begins at 0."""
        self.writer = self.template.elsewhere(self.folder, writer_id)

    def answer(self, request_id: str, tokens: list[int], **record: object) -> None:
        self.writer.write(request_id, tokens, self.states, **record)

    def reconcile(self, base_line: dict[str, int] | None = None) -> Reconciliation:
        return reconcile(REQUESTS, DumpFolder(self.folder).dumps(), base_line or {})


@pytest.fixture
def server(tmp_path: Path, template: DumpFactory) -> Server:
    return Server(tmp_path / "dumps", template)


def names(result: Reconciliation) -> dict[str, int]:
    return {name: count for name, count in result.counts().items() if count}


FATES = ("right", "never", "twice", "short", "cached", "wrong tokens", "tokens differ", "damaged")
STATE = {"right": "matched", "never": "missing", "twice": "duplicate", "short": "short", "cached": "short",
         "wrong tokens": "wrong_tokens", "tokens differ": "wrong_tokens", "damaged": "unreadable"}  # fmt: skip


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fates=st.lists(st.sampled_from(FATES), min_size=len(SAMPLES), max_size=len(SAMPLES)),
    strangers=st.integers(0, 3),
    seed=st.integers(),
)
def test_every_request_is_in_exactly_one_state_whatever_happens_to_the_others(
    fates: list[str], strangers: int, seed: int, tmp_path_factory: pytest.TempPathFactory, template: DumpFactory
) -> None:
    server = Server(tmp_path_factory.mktemp("dumps"), template)
    order = [*zip(REQUESTS, fates, strict=True), *((f"HEALTH_CHECK_{n}", "right") for n in range(strangers))]
    random.Random(seed).shuffle(order)
    for request_id, fate in order:
        tokens = REQUESTS[request_id].input_ids if request_id in REQUESTS else [7, 7]
        if fate == "never":
            continue
        for _ in range(2 if fate == "twice" else 1):
            match fate:
                case "short":
                    server.answer(request_id, tokens, spans=[[0, 2]], complete=False, incomplete_reason="aborted")
                case "cached":
                    server.answer(request_id, tokens, spans=[[2, 4]], prefix_cached=2, complete=False,
                                  incomplete_reason=contract.PREFIX_CACHE)  # fmt: skip
                case "wrong tokens":
                    server.answer(request_id, [*tokens[:-1], 99])
                case "tokens differ":
                    server.answer(request_id, tokens, complete=False, incomplete_reason=contract.TOKENS_DIFFER)
                case "damaged":
                    server.answer(request_id, tokens, prefix_cached="four")
                case _:
                    server.answer(request_id, tokens)
    result = server.reconcile()
    for request_id, fate in zip(REQUESTS, fates, strict=True):
        states = [state for state in ("matched", "missing", "duplicate", "short", "wrong_tokens")
                  if request_id in getattr(result, state)]  # fmt: skip
        assert states == ["missing" if fate == "damaged" else STATE[fate]]
        assert (result.reason(request_id) is None) == (fate == "right")
    assert len(result.unreadable) == fates.count("damaged")
    assert len(result.foreign) == strangers
    assert not result.gaps and not result.stale


def test_a_warm_up_dump_is_never_matched(server: Server) -> None:
    """Not even under the request id that is waited for, with the right tokens."""
    request_id, sample = next(iter(REQUESTS.items()))
    server.answer(request_id, sample.input_ids)
    base_line = DumpFolder(server.folder).base_line() | {server.writer.writer_id: 0}
    result = server.reconcile(base_line)
    assert len(result.stale) == 1 and request_id in result.missing
    server.answer(request_id, sample.input_ids)
    assert list(server.reconcile(base_line).matched) == [request_id]


def test_a_server_that_restarts_in_mid_batch_is_matched_by_what_it_captured_not_by_its_counter(server: Server) -> None:
    requests = list(REQUESTS.items())
    for n in range(5):
        server.answer(f"warm-up-{n}", [1, 2])
    base_line = {server.writer.writer_id: 4}
    server.answer(requests[0][0], requests[0][1].input_ids)
    server.restart("20261129T151500-2")  # counter 0 again, below the old writer's base line
    for request_id, sample in requests[1:]:
        server.answer(request_id, sample.input_ids)
    result = server.reconcile(base_line)
    assert set(result.matched) == set(REQUESTS)
    assert (len(result.stale), result.gaps) == (5, [])


def test_gaps_are_counted_from_the_base_line_and_not_for_dumps_that_were_removed(server: Server) -> None:
    request_id, sample = next(iter(REQUESTS.items()))
    folder = DumpFolder(server.folder)
    writer_id = server.writer.writer_id
    for counter in (2, 3, 6):
        server.writer.counter = counter
        server.answer("another", [1, 2])
    removed = [ref for ref in folder.dumps() if ref.counter == 3]
    folder.remove(removed)
    server.writer.counter = 8
    server.answer(request_id, sample.input_ids)
    dumps = folder.dumps()
    result = reconcile(REQUESTS, dumps, {writer_id: 1}, folder.seen())
    assert result.gaps == [Gap(writer_id, 4, 5), Gap(writer_id, 7, 7)]
    assert reconcile(REQUESTS, dumps, {writer_id: 6}, folder.seen()).gaps == [Gap(writer_id, 7, 7)]


def test_a_prefix_hit_says_what_to_do(server: Server) -> None:
    request_id, sample = next(iter(REQUESTS.items()))
    server.answer(request_id, sample.input_ids, spans=[[3, 4]], prefix_cached=3, complete=False,
                  incomplete_reason=contract.PREFIX_CACHE)  # fmt: skip
    assert server.reconcile().reason(request_id) == (
        f"short: req_0 of writer {server.writer.writer_id}: 1 tokens captured, 4 sent; 3 were served from the prefix "
        "cache. Restart the server with the radix cache off or let extraction send a unique extra_key."
    )
    assert names(server.reconcile()) == {"missing": 5, "short": 1}
