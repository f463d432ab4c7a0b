"""What is predicted is what a server does: the replay, drawn, and a trained drafter's against SGLang's own count."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.acceptance import replay
from drafter.config import DrafterConfig, read_target_config
from drafter.export import export_drafter
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.schedule import Schedule
from drafter.trainer import TrainConfig, Trainer
from infra.client import SGLangClient, acceptance_length
from tests.drafter.packing import pack
from tests.servers import running_server
from tests.tiny_models import VOCAB, make_tiny

STEPS, PROMPT, REPLY, BLOCKS, SERVED = 3, 8, 40, (1, 2, 4), 8
SERVED_WITHIN = 0.05  # the bound docs/training.md states for the replayed figure


def test_a_replay_verifies_only_where_the_last_leap_ended() -> None:
    """Two replies; `1`, `2`, `3` = how many drafted tokens are right at a slot, `.` = no verification can be there."""
    drawn = ".3120..1031."
    begins = torch.tensor([c != "." for c in drawn])
    right = torch.tensor([0 if c == "." else int(c) for c in drawn])
    alive = torch.stack([right > j for j in range(3)])
    # one drafted token: slots 1, 3, (5 is over) and 7, 9: the accepted are 1, 1 and 1, 1
    assert replay(begins, alive)[0] == (4, 4)
    # three: slot 1 leaps to 5, which is over; 7 leaps to 9, which leaps away
    assert replay(begins, alive)[2] == (3, 7)


def written_by(target, prompts: torch.Tensor) -> list[dict]:
    """Greedy replies of a model and its states, as documents."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=REPLY,
            min_new_tokens=REPLY, eos_token_id=None,
        )  # fmt: skip
        states = model(ids, output_hidden_states=True).hidden_states
    aux, learn = torch.stack([states[k + 1] for k in BLOCKS], 2), torch.arange(ids.shape[1]) >= prompts.shape[1]
    return [
        {"ids": i, "aux": a, "final": f, "learn": learn.long()} for i, a, f in zip(ids, aux, states[-1], strict=True)
    ]  # fmt: skip


@pytest.mark.slow
def test_a_trained_drafter_is_served_as_well_as_predicted(tmp_path) -> None:
    target = make_tiny("llama", tmp_path / "target")
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, VOCAB, (96, PROMPT), generator=generator)
    documents = written_by(target, prompts)
    weights = TargetWeights.load(target)
    config = DrafterConfig.from_target(read_target_config(target), BLOCKS, VOCAB)
    drafter = Eagle3Drafter(config, torch.zeros(VOCAB, dtype=torch.int64))
    drafter.initialise(weights.head, seed=0)
    rows = [pack(documents[i : i + 8], torch.float32) for i in range(0, len(documents), 8)]
    course = TrainConfig(ttt_steps=STEPS, schedule=Schedule(lr=5e-3, warmup_steps=10), max_steps=120)
    trainer = Trainer(course, drafter, weights, lambda epoch: rows)
    row = pack(documents[:SERVED], torch.float32)  # not held out: such a target's next reply cannot be foreseen
    control = trainer.evaluate([row])
    trainer.run()
    predicted = trainer.evaluate([row])
    assert control.acceptance_length < 1.1
    assert predicted.acceptance_length > 1.6

    folder = export_drafter(drafter, tmp_path / "drafter")
    with running_server(target, tmp_path, draft=folder) as server, SGLangClient(server.base_url) as client:
        answers = [
            client.generate(p.tolist(), max_new_tokens=REPLY, sampling={"ignore_eos": True}) for p in prompts[:SERVED]
        ]
    histogram = [0] * (STEPS + 1)
    for answer, doc in zip(answers, documents[:SERVED], strict=True):
        assert answer.output_ids == doc["ids"][PROMPT:].tolist()
        for accepted, times in enumerate(answer.spec_histogram or []):
            histogram[accepted] += times
    served = acceptance_length(histogram)
    assert served == pytest.approx(predicted.replayed_acceptance_length[STEPS - 1], abs=SERVED_WITHIN)
