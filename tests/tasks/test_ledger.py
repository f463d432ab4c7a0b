"""What several runs at one dataset version promise each other: one version, one reply to a prompt, nothing left out."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidden_states.errors import DatasetError
from hidden_states.prompts import Prompt
from hidden_states.store import open_store
from tasks.job import Job
from tasks.ledger import Ledger

ROUNDS = 10


@pytest.mark.parametrize("alike", [True, False])
def test_runs_that_begin_at_once_join_one_version_or_take_one_each(tmp_path: Path, alike: bool) -> None:
    runs = 4
    for number in range(ROUNDS):
        store, barrier = open_store(f"file://{tmp_path}/{number}"), Barrier(runs)

        def begin(run: int, store: Any = store, barrier: Barrier = barrier) -> Ledger:
            barrier.wait()
            return Ledger.choose(store, "data", {"inputs": "same" if alike else str(run)}, "reuse")

        with ThreadPoolExecutor(runs) as pool:
            chosen = list(pool.map(begin, range(runs)))
        names = sorted(ledger.name for ledger in chosen)
        assert names == (["data-v1"] * runs if alike else [f"data-v{k + 1}" for k in range(runs)])
        assert sum(ledger.state == "new" for ledger in chosen) == (1 if alike else runs)


def test_of_two_runs_that_ask_the_same_prompts_the_first_ones_replies_count(tmp_path: Path) -> None:
    ledger = Ledger.choose(open_store(f"file://{tmp_path}"), "data", {"inputs": "x"}, "reuse")
    prompts = cast(list[Prompt], [SimpleNamespace(digest=digest) for digest in ("aa", "bb")])
    first, second = ([{"prompt": p.digest, "ids": [k]} for p in prompts] for k in (1, 2))
    assert ledger.replies_to(prompts) is None
    assert ledger.keep_replies({}, first) == first
    assert ledger.keep_replies({}, second) == first
    assert ledger.replies_to(prompts) == first
    assert ledger.replies() == {reply["prompt"]: reply for reply in first}
    assert ledger.replies_to(prompts[:1]) is None, "a chunk is these prompts and no others"


def test_a_version_is_one_targets(tmp_path: Path) -> None:
    ledger = Ledger.choose(open_store(f"file://{tmp_path}"), "data", {"inputs": "x"}, "reuse")
    ledger.claim_target({"weights": "full:1", "template": "sha256:2"})
    ledger.claim_target({"weights": "full:1", "template": "sha256:2"})
    with pytest.raises(DatasetError, match="template: sha256:3 / sha256:2"):
        ledger.claim_target({"weights": "full:1", "template": "sha256:3"})


def test_a_plan_finds_its_own_version_whatever_others_have_begun_since(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")

    def choose(tokens: int, on_complete: Literal["reuse", "new"] = "new") -> tuple[str, str]:
        ledger = Ledger.choose(store, "data", {"batch_tokens": tokens}, on_complete)
        return ledger.name, ledger.state

    assert choose(1) == ("data-v1", "new")
    assert choose(2) == ("data-v2", "new")
    assert choose(1) == ("data-v1", "resumed")
    Ledger(store, "data-v1", "resumed").close("run", {})
    assert choose(1) == ("data-v3", "new"), "closed: the next one"
    assert choose(2) == ("data-v2", "resumed")
    Ledger(store, "data-v3", "resumed").close("run", {})
    assert choose(1, "reuse") == ("data-v3", "resumed")


@given(st.lists(st.integers()), st.text(), st.sampled_from(["new", "resumed", "complete"]))
def test_every_run_comes_to_everything_that_is_missing(items: list[int], run_id: str, state: str) -> None:
    job = cast(Job, SimpleNamespace(run_id=run_id, ledger=SimpleNamespace(state=state)))
    order = Job.own_order(job, items)
    assert sorted(order) == sorted(items)
    assert state != "new" or order == items
    assert order == Job.own_order(job, items), "tried again, a run goes the same way"


def test_runs_that_joined_go_ways_of_their_own() -> None:
    ways = {
        tuple(Job.own_order(cast(Job, SimpleNamespace(run_id=run, ledger=SimpleNamespace(state="resumed"))), range(20)))
        for run in "abcdef"
    }
    assert len(ways) == 6
