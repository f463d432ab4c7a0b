"""Whose rows a pass computes, over every kind of batch: random batches against a model that is easy to check."""

import gc
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas_capture import capture, contract
from eyas_capture.capture import Capture
from eyas_capture.hooks import BESIDES_TOKENS
from eyas_capture.layers import CaptureLayers
from tests.server_patch.bench import AFTER_BLOCK, Bench, H, Model, Request


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_give_every_request_its_own_rows(bench: Bench, seed: int) -> None:
    """Chunks of several requests interleave, decode rows ride along, some hit the cache, some are retracted."""
    rng = random.Random(seed)
    requests = [Request(f"r{k}", rng.randint(1, 60)) for k in range(12)]
    at = {r: rng.randrange(len(r.origin_input_ids)) if rng.random() < 0.2 else 0 for r in requests}
    first = dict(at)
    while at:
        parts = []
        for r in rng.sample(sorted(at, key=lambda r: r.rid), min(len(at), rng.randint(1, 5))):
            tokens = len(r.origin_input_ids)
            if at[r] > tokens + 4:
                del at[r]
                continue
            if at[r] and rng.random() < 0.15:  # retracted; its own rows may still be in the cache, or not
                at[r] = rng.randint(first[r], min(at[r], tokens - 1))
            stop = at[r] + 1 if at[r] >= tokens else min(tokens, at[r] + rng.randint(1, 25))
            parts.append((r, at[r], stop))
            at[r] = stop
        if parts:
            bench.run(parts)
    records = bench.end()
    assert records.keys() == {r.rid for r in requests}
    for r in requests:
        record = records[r.rid]
        assert record["tokens_sha256"] == contract.tokens_sha256(r.origin_input_ids)
        assert record["prefix_cached"] == first[r]
        assert record["complete"] == (first[r] == 0)
    assert sorted(record["counter"] for record in records.values()) == list(range(12))
    assert bench.writer.memory.in_use == 0


def test_numbers_are_given_in_the_order_of_first_rows(bench: Bench) -> None:
    long, short = Request("long", 40), Request("short", 3)
    bench.run([(long, 0, 20)])
    bench.run([(short, 0, 3)])
    bench.run([(long, 20, 40)])
    records = bench.end()
    assert (records["long"]["counter"], records["short"]["counter"]) == (0, 1)
    assert records["long"]["spans"] == [[0, 20], [20, 40]]


def test_decode_passes_run_the_stock_model(bench: Bench) -> None:
    r = Request("r", 5)
    bench.run([(r, 0, 5)])
    bench.run([(r, 5, 6)], prefill=False)
    bench.run([(r, 6, 7)])  # the same as part of a mixed batch
    assert bench.end().keys() == {"r"}


def test_a_request_retracted_after_its_prompt_is_not_captured_again(bench: Bench) -> None:
    r = Request("r", 5)
    bench.run([(r, 0, 5)])
    bench.run([(r, 0, 8)])  # prompt and output are prefilled together
    assert bench.end()["r"]["spans"] == [[0, 5]] and bench.totals["captured"] == 1


def test_a_client_may_use_a_request_id_again(bench: Bench) -> None:
    for tokens in (4, 6):
        bench.run([(Request("same", tokens), 0, tokens)])
    assert bench.writer.stop(10)
    lengths = [json.loads(p.read_text())["tokens"] for p in sorted(bench.folder.glob("req_*/record.json"))]
    assert lengths == [4, 6]


@pytest.mark.parametrize(
    ("first", "second"), [((0, 8), (0, 8)), ((4, 8), (0, 8)), ((4, 8), (4, 8)), ((8, 9), (0, 8))], ids=str
)
def test_two_requests_of_one_id_in_a_pass_are_two(
    bench: Bench, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """A client that tries again while its first request is still under way, or decodes."""
    bench.run([(Request("same", 8), *first), (Request("same", 8), *second)])
    assert bench.writer.stop(10)
    records = [json.loads(p.read_text()) for p in sorted(bench.folder.glob("req_*/record.json"))]
    assert [record["spans"] for record in records] == [[list(span)] for span in (first, second) if span[1] <= 8]
    assert all(record["complete"] == (record["spans"] == [[0, 8]]) for record in records)


def test_a_request_id_may_be_any_text(bench: Bench) -> None:
    class Name(str):
        pass

    names = ["", "a" * 3000, "\ud800", "zwölf\n", Name("own type")]
    for name in names:
        bench.run([(Request(name, 3), 0, 3)])
    assert bench.end().keys() == set(names)


@pytest.mark.parametrize("how", ["finished", "to_finish", "object gone"])
def test_an_aborted_prefill_is_published_as_far_as_it_came(bench: Bench, how: str) -> None:
    aborted, other = Request("aborted", 40), Request("other", 3)
    bench.run([(aborted, 0, 16)])
    if how == "finished":
        aborted.over = True
    elif how == "to_finish":
        aborted.to_finish = "abort"
    else:
        gone = weakref.ref(aborted)
        bench.capture._requests.clear()
        del aborted
        gc.collect()
        assert gone() is None
    bench.run([(other, 0, 3)])
    record = bench.end()["aborted"]
    assert record["spans"] == [[0, 16]] and record["incomplete_reason"] == contract.ABORTED
    assert bench.totals["pending"] == 0


def test_an_abort_on_an_idle_server_is_found_by_the_clock(bench: Bench) -> None:
    aborted = Request("aborted", 40)
    bench.run([(aborted, 0, 16)])
    aborted.over = True
    bench.capture.close_ended()  # what the writer's tick calls
    assert bench.end()["aborted"]["incomplete_reason"] == contract.ABORTED


def test_the_stump_of_a_request_that_was_refused_is_not_captured(bench: Bench) -> None:
    """SGLang cuts the prompt of an aborted request to one token and runs it all the same."""
    r = Request("refused", 1)
    r.to_finish = "abort"
    bench.run([(r, 0, 1)])
    assert bench.end() == {} and bench.totals["captured"] == 0


def test_a_stopping_server_publishes_what_it_has(bench: Bench) -> None:
    bench.run([(Request("cut", 40), 0, 16)])
    bench.capture.close_all(contract.SERVER_STOPPED)
    assert bench.end()["cut"]["incomplete_reason"] == contract.SERVER_STOPPED


@pytest.mark.parametrize("copies_decode", [True, False])
def test_parallel_sampling_gives_one_dump(bench: Bench, copies_decode: bool) -> None:
    """SGLang prefills once with max_new_tokens 0 and then n times, under made-up ids."""
    for round_ in range(2):
        warm = Request("tokens", 9, n=3, max_new_tokens=0)
        warm.rid = f"warm-{round_}"
        bench.run([(warm, 0, 9)])
        for k in range(3):
            copy = Request("tokens", 9, n=3, max_new_tokens=8 if copies_decode else 0)
            copy.rid = f"copy-{round_}-{k}"
            bench.run([(copy, 8, 9)])
    assert bench.end().keys() == {"warm-0", "warm-1"}


def test_copies_that_never_come_hide_no_later_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes away between the prefill and its copies."""
    monkeypatch.setattr(capture, "_COPIES_COME_WITHIN", 0.0)
    for round_ in range(3):
        warm = Request("tokens", 9, n=3, max_new_tokens=0)
        warm.rid = f"warm-{round_}"
        bench.run([(warm, 0, 9)])
    assert bench.end().keys() == {"warm-0", "warm-1", "warm-2"}
    assert len(bench.capture._samples_left) <= 1


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "aborted"])
@pytest.mark.parametrize("fields", [("multimodal_inputs",), ("multimodal_inputs", "lora_id"), ()], ids=str)
def test_where_images_stand_the_ids_of_a_pass_are_others(bench: Bench, fields: tuple[str, ...], cut: bool) -> None:
    """A multimodal wrapper clamps them in place. Without an image, other ids are a defect."""
    r = Request("r", 9 if cut else 5)
    for field in fields:
        setattr(r, field, "an image")
    batch = bench.announce([(r, 0, 5)])
    batch.input_ids[2] = 999_999
    bench.capture.forward(bench.model.forward, (batch.input_ids, None, batch), {})
    r.over = cut
    bench.capture.close_ended()
    assert bench.writer.stop(10)
    (record,) = (json.loads(p.read_text()) for p in bench.folder.glob("req_*/record.json"))
    expected = contract.ABORTED if cut else contract.NOT_ONLY_TOKENS
    assert record["incomplete_reason"] == (expected if fields else contract.TOKENS_DIFFER)


def test_opted_in_captures_only_those_who_ask(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="opted-in")
    theirs, ours = Request("theirs", 6), Request(f"{contract.OPT_IN_PREFIX}1-a", 7)
    bench.run([(theirs, 0, 6), (ours, 0, 7), (Request("more", 3), 0, 3)])
    bench.run([(Request("alone", 5), 0, 5)])
    assert bench.end().keys() == {ours.rid}


def test_health_probes_are_never_captured(bench: Bench) -> None:
    bench.run([(Request(f"{contract.HEALTH_PREFIX}_1", 1), 0, 1)])
    assert bench.end() == {} and bench.totals["captured"] == 0


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("lora_id", contract.ADAPTER),
        *((name, contract.NOT_ONLY_TOKENS) for name in BESIDES_TOKENS),
    ],
)
def test_states_that_tokens_alone_do_not_give_are_never_complete(bench: Bench, field: str, reason: str) -> None:
    r = Request("r", 5)
    setattr(r, field, "something")
    bench.run([(r, 0, 5)])
    assert bench.end()["r"]["incomplete_reason"] == reason


def test_a_multimodal_wrapper_passes_no_ids(bench: Bench) -> None:
    """Kimi-K2.5 hands embeddings to its text model; the batch still has the ids."""
    r = Request("r", 5)
    batch = bench.announce([(r, 0, 5)])
    forward: Callable[..., Any] = lambda ids, positions, fb, input_embeds: bench.model.forward(fb.input_ids, None, fb)  # noqa: E731
    bench.capture.forward(forward, (None, None, batch), {"input_embeds": torch.zeros(5, H)})
    assert bench.end()["r"]["complete"]


def test_a_prefill_that_goes_past_the_hooks_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A replayed graph, say: silence would look like a server nobody used."""
    bench.announce([(Request("r", 5), 0, 5)])
    bench.announce([(Request("s", 5), 0, 5)])
    assert bench.totals["unseen_passes"] == 1 and "past the capture hooks" in caplog.text


def test_other_ranks_run_the_same_passes_and_write_nothing(tmp_path: Path) -> None:
    """Capture may complete a collective inside the model: a rank that ran the stock path would hang the others."""
    model = Model(packed=True)
    seen = []
    capture = Capture(CaptureLayers(model.llama, AFTER_BLOCK), "all", None, ranks=2)
    r = Request("r", 5)
    batch = Bench(tmp_path / "unused").batch([(r, 0, 5)])
    capture.announce([r], batch)

    def forward(*args: Any) -> Any:
        seen.append(list(model.llama.model.layers_to_capture))
        return model.forward(*args)

    result = capture.forward(forward, (batch.input_ids, None, batch), {})
    assert seen == [[2, 4]] and isinstance(result, torch.Tensor)
