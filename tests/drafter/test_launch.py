"""The command that torchrun starts on every machine: one committed dataset, stopped, continued, exported."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.inspect import inspect_drafter
from drafter.launch import read_course, train, train_config
from drafter.trainer import STOPPED_EXIT_CODE
from hidden_states.dataset import DatasetWriter
from hidden_states.errors import RecipeError, TrainingError
from hidden_states.plan import plan_batches
from hidden_states.shard import pack_shard
from hidden_states.store import open_store
from hidden_states.vocab import build_vocab_map, count_tokens
from tests.hidden_states.stored import FINGERPRINT, Capture, make_samples
from tests.servers import REPOSITORY

HIDDEN, VOCAB = 8, 1000


def course_file(folder: Path, held_out: int = 2, **train: object) -> Path:
    """A target, a committed dataset of twelve samples, and a course over it."""
    target = folder / "target"
    target.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 8, "vocab_size": VOCAB, "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(shape))
    save_file({"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}, target / "model.safetensors")
    samples = make_samples([20] * 12)
    dumps = Capture(folder / "dumps", HIDDEN).dumps(samples)
    store = open_store(f"file://{folder}/store")
    writer = DatasetWriter(store, "data", FINGERPRINT)
    batches = plan_batches(samples, 60)
    for batch in batches:
        writer.commit_batch(pack_shard(batch, dumps, folder / "shard"))
    vocab = build_vocab_map(count_tokens(samples, VOCAB), 100)
    writer.commit_manifest(
        [b.id for b in batches], vocab_map=vocab.to_bytes(), coverage=vocab.coverage,
        held_out={s.id for s in samples[:held_out]},
    )  # fmt: skip
    course = {
        "dataset": f"file://{folder}/store/data", "target": str(target), "checkpoints": str(folder / "checkpoints"),
        "export": str(folder / "drafter"), "batch_tokens": 40,
        "train": {"ttt_steps": 2, "loss": {"out_of_vocab": "renormalise"}, "schedule": {"lr": 1e-3}, **train},
    }  # fmt: skip
    path = folder / "course.json"
    path.write_text(json.dumps(course))
    return path


@pytest.mark.slow
def test_a_course_is_stopped_and_continued_on_two_ranks(tmp_path) -> None:
    course = course_file(tmp_path, max_steps=400_000)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.Popen(
        [sys.executable, "-m", "drafter.launch", course], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True
    )
    assert alone.stdout is not None
    assert any(line.startswith("step 3:") for line in alone.stdout)
    alone.send_signal(signal.SIGTERM)
    alone.stdout.read()
    assert alone.wait(60) == STOPPED_EXIT_CODE
    (stopped,) = (int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").glob("step-*"))

    given = json.loads(course.read_text())
    given["train"]["max_steps"] = stopped + 4
    course.write_text(json.dumps(given))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "drafter.launch",
         str(course)], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ranks"] == 2 and said["steps"] == stopped + 4
    assert inspect_drafter(tmp_path / "drafter", tmp_path / "target").problems == []


def test_a_dataset_without_held_out_samples_is_refused_before_the_first_step(tmp_path, capsys) -> None:
    course = read_course(course_file(tmp_path, held_out=0, max_steps=3))
    with pytest.raises(RecipeError, match=r"split 'held_out': no samples in it"):
        train(course, torch.device("cpu"))
    assert "step" not in capsys.readouterr().out and not list(tmp_path.glob("checkpoints/*"))


def test_a_course_starts_from_a_published_drafter(tmp_path) -> None:
    path = course_file(tmp_path, max_steps=2)
    assert train(read_course(path), torch.device("cpu")) == 0
    first = json.loads(path.read_text())
    second = {"start_from": first["export"], "checkpoints": f"{tmp_path}/more", "export": f"{tmp_path}/second"}
    path.write_text(json.dumps({
        **first, **second,
        "train": {**first["train"], "max_steps": 1, "schedule": {"lr": 1e-12}},
    }))  # fmt: skip
    assert train(read_course(path), torch.device("cpu")) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "second"))
    assert all(torch.allclose(after[name].float(), value.float(), atol=1e-6) for name, value in before.items())


@pytest.mark.parametrize(
    ("key", "value"),
    [("batch_tokens", "8192"), ("batch_tokens", 0), ("batch_tokens", True), ("seed", "0"), ("train", []),
     ("drafter", "x"), ("store", None), ("start_from", 3), ("dataset", None), ("export", ["x"]), ("cache_dir", {})],
)  # fmt: skip
def test_a_course_with_a_value_of_another_kind_is_refused_by_name(tmp_path, key, value) -> None:
    path = course_file(tmp_path, max_steps=1)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(TrainingError, match=rf"course\.json: {key} is "):
        read_course(path)


def test_a_course_with_wrong_keys_is_refused(tmp_path) -> None:
    path = tmp_path / "course.json"
    path.write_text(json.dumps({"dataset": "file:///x", "exprot": "y"}))
    with pytest.raises(TrainingError, match=r"target is missing.*exprot is not known"):
        read_course(path)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "null", b"\xff"])
def test_a_course_that_is_none_is_refused_by_name(tmp_path, content) -> None:
    path = tmp_path / "course.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainingError, match=r"course\.json: "):
        read_course(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("kind", v) for v in ("KL", "", None, 3)), *(("decay", v) for v in (0, -1, 2, math.nan, "x")),
        ("out_of_vocab", "x"), ("chunk_rows", 0), *(("schedule.lr", v) for v in (0, -1, math.nan, math.inf, "x")),
        ("schedule.kind", "consine"),
        ("schedule.warmup_steps", -1), ("schedule.decay_share", 0), ("schedule.final_share", 2), ("schedule.lrr", 1),
        *((name, v) for name in ("train.ttt_steps", "train.accumulate", "train.keep", "train.max_steps", "train.epochs")
          for v in (0, -1, "x")),
        ("train.max_seconds", -1), ("train.max_seconds", math.nan), ("train.checkpoint_every", -1), ("train.clip", 0),
        ("train.clip", math.nan), ("train.jump", 1), ("train.betas", [0.9]), ("train.betas", [0.9, 1]),
        ("train.weight_decay", -1), *(("train.dtype", v) for v in ("int8", "nonsense", "float64", 3)),
        ("train.steps", 5), ("train.loss", [1]), ("train.schedule", "x"),
    ],
)  # fmt: skip
def test_a_value_no_training_could_mean_is_refused_by_name(name, value) -> None:
    section, _, key = name.rpartition(".")
    given = {key: value} if section == "train" else {section or "loss": {key: value}}
    with pytest.raises(TrainingError, match=rf"\b{key}\b|mapping"):
        train_config({"max_steps": 1, **given})
