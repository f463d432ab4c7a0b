"""Stock SGLang with the plugin, a tiny DeepSeek-V3, and every way a prompt can be prefilled.

Three servers: chunks of 64 with mixed batches and the prefix cache; two tensor-parallel ranks in mode `opted-in`; one
that cannot be captured from. Each is asked much, because starting one takes most of a minute.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.capture_matrix import AFTER_BLOCK, ENV, LENGTHS, TOLERANCE, TWO_RANKS_ENV
from benchmarks.capture_server import FoundDump, Served, capture_server, max_abs_diff, prompt, settled_prompt
from eyas_capture import contract
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.slow

FULL_CONTEXT = 1024
LONGEST = FULL_CONTEXT - 7  # SGLang keeps room for seven tokens more


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("capture")


@pytest.fixture(scope="module")
def model(work: Path) -> Path:
    return make_tiny("deepseek_v3", work / "model")


def assert_right(dump: FoundDump, model: Path, ids: list[int]) -> None:
    assert dump.record["tokens_sha256"] == contract.tokens_sha256(ids)
    assert max_abs_diff(dump, model, ids, AFTER_BLOCK) <= TOLERANCE


def assert_complete(dump: FoundDump, model: Path, ids: list[int]) -> None:
    assert dump.record["complete"], dump.record["incomplete_reason"]
    assert_right(dump, model, ids)


@pytest.fixture(scope="module")
def served(model: Path, work: Path) -> Iterator[Served]:
    """Chunks of 64 that share passes with decoding, prefix cache on, everybody's prefills."""
    flags = {"chunked-prefill-size": 64, "enable-mixed-chunk": True}
    with capture_server(model, work / "chunks", flags=flags, env=ENV, dump_dir=work / "dump") as served:
        yield served


def test_the_writer_says_what_it_captures(served: Served) -> None:
    (writer,) = served.writers()
    assert set(writer) == set(contract.WRITER_KEYS)
    assert writer["after_block"] == list(AFTER_BLOCK)
    assert writer["capture_points"] == [k + 1 for k in AFTER_BLOCK]
    assert (writer["hidden_size"], writer["blocks"], writer["dtype"]) == (128, 6, "float32")
    assert writer["final_norm"] == "post" and writer["architecture"] == "DeepseekV3ForCausalLM"
    assert writer["flags"]["chunked_prefill_size"] == 64 and writer["flags"]["enable_mixed_chunk"]
    assert writer["state"] == contract.CAPTURING and writer["refused"] == []


def test_interleaved_chunks_and_decoding_in_the_same_pass(served: Served, model: Path) -> None:
    prompts = {f"mixed-{n}": settled_prompt(model, n, 1) for n in LENGTHS}
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(served.ask, settled_prompt(model, 12, 1), "decoding", 60)
        served.ask_at_once(prompts, new_tokens=6)
        decoding.result()
    dumps = served.wait_for([*prompts, "decoding"])
    for rid, ids in prompts.items():
        assert_complete(dumps[rid], model, ids)
    assert_complete(dumps["decoding"], model, settled_prompt(model, 12, 1))
    assert len(dumps["mixed-257"].record["spans"]) >= 5


def test_a_prefix_hit_is_known_and_marked(served: Served, model: Path) -> None:
    base, longer = settled_prompt(model, 100, 2), settled_prompt(model, 20, 3, settled_prompt(model, 100, 2))
    served.ask(base, "base")
    answer = served.ask(longer, "hit")
    dump = served.wait_for(["hit"])["hit"]
    assert not dump.record["complete"] and dump.record["incomplete_reason"] == contract.PREFIX_CACHE
    assert dump.record["prefix_cached"] == answer["meta_info"]["cached_tokens"] > 0
    assert dump.record["spans"] == [[dump.record["prefix_cached"], 120]]
    assert_right(dump, model, longer)


def test_a_key_of_its_own_makes_a_request_whole_with_the_cache_on(served: Served, model: Path) -> None:
    ids = settled_prompt(model, 100, 2)  # in the cache since the test before
    for rid in ("own-1", "own-2"):
        served.ask(ids, rid, extra_key=rid)
    for dump in served.wait_for(["own-1", "own-2"]).values():
        assert_complete(dump, model, ids)


@pytest.mark.parametrize("length", [1, 700])
def test_the_shortest_prompt_and_one_of_many_chunks(served: Served, model: Path, length: int) -> None:
    ids = settled_prompt(model, length, 4)
    served.ask(ids, f"length-{length}")
    assert_complete(served.wait_for([f"length-{length}"])[f"length-{length}"], model, ids)


def test_no_new_tokens_at_all(served: Served, model: Path) -> None:
    ids = settled_prompt(model, 70, 5)
    assert served.ask(ids, "none", new_tokens=0)["output_ids"] == []
    assert_complete(served.wait_for(["none"])["none"], model, ids)


def test_a_streamed_answer(served: Served, model: Path) -> None:
    ids = settled_prompt(model, 70, 6)
    body = {"input_ids": ids, "rid": "stream", "stream": True, "sampling_params": {"max_new_tokens": 5}}
    with served.http.stream("POST", "/generate", json=body) as answer:
        assert sum(line.startswith("data: {") for line in answer.iter_lines()) >= 1
    assert_complete(served.wait_for(["stream"])["stream"], model, ids)


def test_a_batch_in_one_request(served: Served, model: Path) -> None:
    batch = [settled_prompt(model, n, 7) for n in (20, 90, 5)]
    rids = ["batch-0", "batch-1", "batch-2"]
    served.post({"input_ids": batch, "rid": rids, "sampling_params": {"max_new_tokens": 2}})
    for rid, dump in served.wait_for(rids).items():
        assert_complete(dump, model, batch[rids.index(rid)])


def test_token_ids_through_the_openai_api(served: Served, model: Path) -> None:
    ids = settled_prompt(model, 33, 8)
    served.post({"model": "x", "prompt": ids, "max_tokens": 2, "rid": "openai"}, "/v1/completions")
    assert_complete(served.wait_for(["openai"])["openai"], model, ids)


@pytest.mark.parametrize("new_tokens", [4, 0])
def test_parallel_sampling_gives_one_dump(served: Served, model: Path, new_tokens: int) -> None:
    ids, before = settled_prompt(model, 80, 9 + new_tokens), len(served.dumps())
    served.post({"input_ids": ids, "sampling_params": {"max_new_tokens": new_tokens, "n": 3, "temperature": 1.0}})
    served.ask(prompt(3, 9), f"after-{new_tokens}")
    served.wait_for([f"after-{new_tokens}"])
    served.wait_for_totals(captured=before + 2)
    (dump,) = [d for d in served.dumps() if d.record["tokens_sha256"] == contract.tokens_sha256(ids)]
    assert_complete(dump, model, ids)
    assert len(served.dumps()) == before + 2


@contextmanager
def being_prefilled(served: Served, ids: list[int], rid: str) -> Iterator[Future[Any]]:
    """A request of which at least one chunk was computed, and not the last."""
    log = served.server.spec.log_path
    before = log.stat().st_size
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.ask, ids, rid, extra_key=rid)
        # A pass is logged when it is planned: with the second one, the first has been computed.
        while len(re.findall(rb"Prefill batch.*#pending-token: [1-9]", log.read_bytes()[before:])) < 2:
            assert not running.done()
            time.sleep(0.01)
        yield running


def test_an_aborted_prompt_keeps_its_first_chunks(served: Served, model: Path) -> None:
    ids = settled_prompt(model, 1200, 10)
    with being_prefilled(served, ids, "aborted") as running:
        served.http.post("/abort_request", json={"rid": "aborted"})
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    dump = served.wait_for(["aborted"])["aborted"]
    assert dump.record["incomplete_reason"] == contract.ABORTED
    assert 64 <= dump.record["spans"][-1][1] < len(ids) and dump.record["prefix_cached"] == 0
    assert_right(dump, model, ids)


def test_a_prompt_retracted_half_way_is_captured_whole(served: Served, model: Path) -> None:
    """Its cache is emptied meanwhile, so rows that were captured before are computed again."""
    ids = settled_prompt(model, 1200, 12)
    with being_prefilled(served, ids, "retracted") as running:
        served.post({"mode": "retract"}, "/pause_generation")
        assert served.http.post("/flush_cache").status_code == 200
        assert not running.done()
        served.post({}, "/continue_generation")
        running.result()
    assert_complete(served.wait_for(["retracted"])["retracted"], model, ids)


def test_health_probes_leave_no_dump(served: Served) -> None:
    before = served.wait_for_totals()["captured"]
    assert served.http.get("/health_generate").status_code == 200
    served.ask(prompt(4, 11), "after-health")
    served.wait_for(["after-health"])
    assert served.wait_for_totals(captured=before + 1)["captured"] == before + 1


def test_sigterm_drains_the_queue(served: Served) -> None:
    """Nothing is pending then, and every number was either published or counted."""
    served.ask_at_once({f"last-{n}": prompt(64, 200 + n) for n in range(8)})
    served.server.stop()
    (writer,) = served.writers()
    totals = writer["totals"]
    assert writer["state"] == contract.STOPPED and totals["pending"] == 0 == totals["queue_bytes"]
    assert not totals["lost"] and not totals["unseen_passes"]
    assert [dump.record["counter"] for dump in served.dumps()] == list(range(totals["captured"]))
    assert sum(dump.record["complete"] for dump in served.dumps()) == totals["complete"]


def test_opted_in_on_two_ranks_and_the_end_of_a_scheduler(model: Path, work: Path) -> None:
    """A second server into the same folder, so also: an old dump is never mistaken for a new one."""
    old = {path: path.stat().st_mtime_ns for path in (work / "dump").glob("*/*")}
    env = ENV | TWO_RANKS_ENV | {contract.ENV_MODE: "opted-in"}
    with capture_server(
        model, work / "tp2", flags={"tp-size": 2, "context-length": FULL_CONTEXT}, env=env, dump_dir=work / "dump"
    ) as served:
        served.seen = {}
        ours = {f"{contract.OPT_IN_PREFIX}run-{n}": settled_prompt(model, n, 20) for n in (*LENGTHS, LONGEST)}
        served.ask_at_once(ours | {f"theirs-{n}": prompt(n, 21) for n in LENGTHS}, new_tokens=3)
        dumps = served.wait_for(ours)
        for rid, ids in ours.items():
            assert_complete(dumps[rid], model, ids)
        new = [writer for writer in served.writers() if writer["mode"] == "opted-in"]
        assert len(new) == 1 and new[0]["tp_size"] == 2
        folder = served.dump_dir / new[0]["writer_id"]

        # SIGTERM at the scheduler itself, right behind a burst: what was answered is on the disk in the end.
        burst = {f"{contract.OPT_IN_PREFIX}burst-{n}": prompt(64, 100 + n) for n in range(8)}
        served.ask_at_once(burst)
        os.kill(new[0]["pid"], signal.SIGTERM)
        ends = time.monotonic() + 30
        while Path(f"/proc/{new[0]['pid']}").exists() and time.monotonic() < ends:
            time.sleep(0.05)
    records = [json.loads(file.read_text()) for file in folder.glob("req_*/record.json")]
    assert {record["request_id"] for record in records} == ours.keys() | burst.keys()
    assert sorted(record["counter"] for record in records) == list(range(17))
    writer = json.loads((folder / contract.WRITER_FILE).read_text())
    assert writer["state"] == contract.STOPPED and writer["totals"]["complete"] == 17
    assert {path: path.stat().st_mtime_ns for path in old} == old


def test_a_server_that_cannot_be_captured_from_serves_and_says_why(model: Path, work: Path) -> None:
    flags = {
        "enable-return-aux-hidden-states": True,
        "speculative-algorithm": "EAGLE3",
        "return-aux-hidden-state-layer-ids": [2, 3, 5],
    }
    with capture_server(model, work / "refused", flags=flags) as served:
        assert len(served.ask(prompt(9, 1), "r", new_tokens=3)["output_ids"]) == 3
        (writer,) = served.writers()
    assert writer["state"] == contract.REFUSED and served.dumps() == []
    assert any("--enable-return-aux-hidden-states" in reason for reason in writer["refused"])
    assert "EYAS CAPTURE IS OFF" in (work / "refused" / "server.log").read_text()
