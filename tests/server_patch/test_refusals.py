"""What cannot be captured is refused by the name of the flag to change, and an SGLang that differs by its functions."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyas_capture import contract, hooks
from eyas_capture.refusals import DISABLED, ServerFacts, refusals
from infra.server import CPU_ENV
from tests.servers import REPOSITORY, SGLANG_PYTHON

HARMLESS: dict[str, Any] = {
    "pp_size": 1, "enable_two_batch_overlap": False, "speculative_algorithm": None,
    "enable_return_aux_hidden_states": False, "enable_pdmux": False, "dllm_algorithm": None,
    "enable_dp_attention": False, "attn_cp_size": 1, "dcp_size": 1, "enable_prefill_cp": False,
    "enable_layernorm_sp": False, "enable_attn_tp_input_scattered": False, "disaggregation_mode": "null",
}  # fmt: skip
TROUBLE: dict[str, Any] = {
    "pp_size": 2, "speculative_algorithm": "EAGLE3", "dllm_algorithm": "LowConfidence", "attn_cp_size": 2,
    "dcp_size": 2, "disaggregation_mode": "decode",
}  # fmt: skip


def facts(prefill_graph: str = DISABLED, attn_tp_rank: int = 0, **flags: Any) -> ServerFacts:
    return ServerFacts(1, 1, 1, None, attn_tp_rank, prefill_graph, HARMLESS | flags)


def test_a_plain_server_is_captured_from() -> None:
    assert refusals(facts(), is_generation=True) == []


@pytest.mark.parametrize("name", [name for name in HARMLESS if name != "disaggregation_mode"])
def test_each_road_past_the_capture_is_refused_by_the_flag_to_change(name: str) -> None:
    (reason,) = refusals(facts(**{name: TROUBLE.get(name, True)}), is_generation=True)
    assert reason.startswith(f"{name}=") and f"--{name.replace('_', '-')}" in reason


@pytest.mark.parametrize("backend", ["full", "piecewise", "breakable"])
def test_prefill_graphs_are_refused_and_the_flag_that_turns_them_off_is_named(backend: str) -> None:
    (reason,) = refusals(facts(prefill_graph=backend), is_generation=True)
    assert backend in reason and "--cuda-graph-backend-prefill disabled" in reason


def test_servers_that_never_prefill_or_never_generate_are_refused() -> None:
    assert len(refusals(facts(disaggregation_mode="decode"), is_generation=True)) == 1
    assert len(refusals(facts(), is_generation=False)) == 1


def test_everything_that_is_wrong_is_said_at_once() -> None:
    reasons = refusals(facts(prefill_graph="full", pp_size=4, enable_two_batch_overlap=True), is_generation=True)
    assert len(reasons) == 3


def test_one_rank_of_a_replica_writes() -> None:
    assert [facts(attn_tp_rank=rank).writes for rank in range(4)] == [True, False, False, False]


@pytest.mark.slow
def test_an_sglang_whose_functions_have_changed_is_refused_by_their_names(tmp_path: Path) -> None:
    """The real SGLang: known as it is, and with two functions changed, refused; and the flags to change exist in it."""
    reasons = refusals(facts(prefill_graph="full", **{k: TROUBLE.get(k, True) for k in HARMLESS}), is_generation=False)
    flags = sorted(set(re.findall(r"--[a-z-]*[a-z]", " ".join(reasons))) - {"--speculative"})
    environment = os.environ | CPU_ENV | {contract.ENV_DUMP_DIR: str(tmp_path)}
    probe = REPOSITORY / "tests/server_patch/sglang_drift.py"
    ran = subprocess.run([SGLANG_PYTHON, probe, *flags], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(flags) > 12 and found["unknown_flags"] == []
    assert found["stock"] is None
    assert found["registered"] == sorted((hooks.LOAD_MODEL, hooks.INIT_BATCH, hooks.EVENT_LOOP, *hooks.NEW_WEIGHTS))
    for changed in (found["changed"], found["writers"][0]["refused"][0]):
        assert "ForwardBatch.init_new takes ('scheduler_batch', 'runner')" in changed
        assert "Req.finished is gone" in changed
    assert [writer["state"] for writer in found["writers"]] == [contract.REFUSED] and found["hooked"] == []
    assert "EYAS CAPTURE IS OFF, serving goes on" in ran.stderr
