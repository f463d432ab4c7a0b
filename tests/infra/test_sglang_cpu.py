"""What infra/sglang_cpu promises: SGLang on a CPU says what transformers says, with and without a drafter."""

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from infra.client import Generation, SGLangClient
from infra.lifeline import start_time
from infra.server import SGLangServer
from tests.servers import REPOSITORY, running_server
from tests.tiny_models import KINDS, VOCAB, make_tiny, make_tiny_draft, tiny_tokenizer

NEW_TOKENS = 24
PROMPTS = [[(7 * i * i + 13 * j * (i + 1)) % (VOCAB - 10) + 10 for j in range(5 + 9 * i)] for i in range(6)]


def greedy(server: SGLangServer) -> dict[str, Generation]:
    with SGLangClient(server.base_url, vocab_size=VOCAB) as client:
        requests = [
            client.request(prompt, rid=f"r{i}", max_new_tokens=NEW_TOKENS, sampling={"ignore_eos": True})
            for i, prompt in enumerate(PROMPTS)
        ]
        return {answer.rid: answer for answer in client.generate_many(requests)}


def transformers_greedy(model: Path) -> dict[str, list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    outputs = {}
    for i, prompt in enumerate(PROMPTS):
        ids = reference.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        outputs[f"r{i}"] = ids[0, len(prompt) :].tolist()
    return outputs


@pytest.fixture(scope="module")
def plain(llama_server: SGLangServer) -> dict[str, Generation]:
    return greedy(llama_server)


@pytest.mark.slow
def test_plain_decoding_is_that_of_transformers(plain, tiny_llama):
    assert {rid: answer.output_ids for rid, answer in plain.items()} == transformers_greedy(tiny_llama)


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def drafted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Generation], list[dict]]]:
    """Answers of a server with a drafter that proposes the target's favourite tokens, and the log of its proposals."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny(request.param, folder / "model")
    said = Counter(token for ids in transformers_greedy(model).values() for token in ids)
    draft = make_tiny_draft(model, folder / "draft", draft_tokens=[token for token, _ in said.most_common(1)])
    log = folder / "proposals.jsonl"
    with running_server(model, folder, draft=draft, env={"EYAS_CPU_PROPOSALS_LOG": str(log)}) as server:
        answers = greedy(server)
        pids = server.process.pids()
    assert all(start_time(pid) is None for pid in pids), "stop returns when nothing is left"
    yield model, answers, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_with_a_drafter_the_output_stays_that_of_transformers(drafted):
    model, answers, _ = drafted
    assert {rid: answer.output_ids for rid, answer in answers.items()} == transformers_greedy(model)
    histogram = Counter()
    for answer in answers.values():
        histogram.update(dict(enumerate(answer.spec_histogram)))
    assert histogram[0] > 0 and sum(histogram[n] for n in (1, 2, 3)) > 0, "some drafts were refused and some accepted"


@pytest.mark.slow
def test_the_histogram_and_the_proposals_tell_the_same_story(drafted):
    _, answers, proposals = drafted
    for i, prompt in enumerate(PROMPTS):
        answer = answers[f"r{i}"]
        sequence = prompt + answer.output_ids
        accepted = []
        for line in (line for line in proposals if line["rid"] == answer.rid and line["length"] < len(sequence)):
            assert sequence[line["length"] - 1] == line["last_token"]
            assert len(line["drafted"]) == 3
            right = 0
            for proposed, said in zip(line["drafted"], sequence[line["length"] :], strict=False):
                if proposed != said:
                    break
                right += 1
            accepted.append(right)
        told = Counter(dict(enumerate(answer.spec_histogram)))
        assert sum(told.values()) == answer.spec_verify_ct == len(accepted)
        # The last verification may accept more than the answer has room for.
        assert +Counter(accepted[:-1]) <= +told


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("llama", "deepseek_v3")])
def test_other_architectures_run_as_well(kind, tmp_path):
    model = make_tiny(kind, tmp_path / "model")
    with running_server(model, tmp_path, skip_server_warmup=True) as server:
        answers = greedy(server)
    assert {rid: answer.output_ids for rid, answer in answers.items()} == transformers_greedy(model)


def load(name: str) -> ModuleType:
    """A part of the package, loaded by file: on the import path the triton stand-in beside it would be found too."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"infra/sglang_cpu/eyas_sglang_cpu/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ops() -> ModuleType:
    return load("ops")


@pytest.fixture(scope="module")
def prefill() -> ModuleType:
    return load("prefill")


@given(st.integers(1, 4), st.integers(2, 5), st.randoms(use_true_random=False))
def test_verification_accepts_up_to_the_first_wrong_token(ops, requests, width, random):
    candidates = torch.tensor([[random.randrange(3) for _ in range(width)] for _ in range(requests)])
    target = torch.tensor([[random.randrange(3) for _ in range(width)] for _ in range(requests)])
    predicts = torch.zeros(requests * width, dtype=torch.int32)
    index = torch.full((requests, width), -1, dtype=torch.int32)
    count = torch.empty(requests, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=index, accept_token_num=count, candidates=candidates, target_predict=target,
        retrive_index=None, retrive_next_token=None, retrive_next_sibling=None,
    )  # fmt: skip
    for row in range(requests):
        right = 0
        while right + 1 < width and candidates[row, right + 1] == target[row, right]:
            right += 1
        assert count[row] == right
        assert index[row].tolist() == [row * width + i for i in range(right + 1)] + [-1] * (width - right - 1)
        said = [int(predicts[i]) for i in index[row].tolist() if i >= 0]
        assert said == target[row, : right + 1].tolist()
    bonus = torch.zeros(requests, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(predicts[index.long()], count + 1, bonus, width)
    assert bonus.tolist() == [int(target[row, count[row]]) for row in range(requests)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4), st.data())
def test_cache_slots_come_back_as_they_were_assigned(ops, spans, data):
    rows = data.draw(st.permutations(range(4)))[: len(spans)]
    start = torch.tensor([first for first, _ in spans])
    end = start + torch.tensor([count for _, count in spans])
    slots = torch.randperm(100)[: int((end - start).sum())]
    table = torch.zeros(4, 20, dtype=torch.int32)
    ops.assign_req_to_token_pool_cpu(torch.tensor(rows), table, start, end, slots, 20)
    back = torch.empty_like(slots)
    ops.assign_extend_cache_locs_cpu(torch.tensor(rows), table, start, end, back, 20)
    assert back.tolist() == slots.tolist()


def test_trees_of_drafts_are_refused(ops):
    with pytest.raises(NotImplementedError, match="topk 1, not 4"):
        ops.build_tree_kernel_efficient_cpu(*[None] * 8, 4, 3, 4, 0)


def attention(query, key, value):
    """Causal attention of one prompt, its queries the last of its keys. Written out: [T, heads, D] each."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    late = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), value)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8), st.integers(0, 99))
def test_prompts_attended_together_get_what_each_gets_alone(prefill, prompts, seed):
    generator = torch.Generator().manual_seed(seed)
    cached, new = [list(numbers) for numbers in zip(*prompts, strict=True)]
    key, value = (torch.randn(1 + sum(cached) + sum(new), 2, 16, generator=generator) for _ in range(2))
    key[0] = value[0] = torch.nan  # nobody's slot
    slots = (torch.randperm(len(key) - 1, generator=generator) + 1).split([c + n for c, n in prompts])
    table = torch.zeros(20, 80, dtype=torch.int32)
    rows = torch.randperm(20, generator=generator)[: len(prompts)]
    for row, held in zip(rows, slots, strict=True):
        table[row, : len(held)] = held.int()
    query = torch.randn(sum(new), 4, 16, generator=generator)
    batch = SimpleNamespace(req_pool_indices=rows, extend_prefix_lens_cpu=cached, extend_seq_lens_cpu=new)
    backend = SimpleNamespace(eyas_calls=prefill._sorted_by_length(batch, table))
    lengths = [torch.tensor(numbers) for numbers in (cached, new)]
    found = prefill._attend(
        None, backend, query, torch.full_like(query, torch.nan), key, value, table, rows, sum(lengths), *lengths,
        None, scaling=None, enable_gqa=True, causal=True,
    )  # fmt: skip
    alone = [attention(q, key[s], value[s]) for q, s in zip(query.split(new), slots, strict=True)]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3])
def test_rotated_as_written_out(prefill, heads):
    tokens = torch.randn(7, heads * 16 + 8)[:, : heads * 16]  # a part of a wider row, as of SGLang's joint projection
    angle = torch.rand(7, 1, 8)
    halves = torch.complex(*tokens.unflatten(1, (heads, 16)).chunk(2, dim=-1))
    turned = halves * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag), dim=-1).flatten(1)
    torch.testing.assert_close(prefill._rotate(tokens, angle.cos(), angle.sin()), expected)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_tiny_models_are_the_same_each_time(kind, tmp_path):
    for name in ("a", "b"):
        make_tiny_draft(make_tiny(kind, tmp_path / name / "target"), tmp_path / name / "draft")
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) >= 7
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_the_tiny_tokenizer_has_a_chat_template_and_gives_text_back():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "Größe? \U0001f985"}, {"role": "assistant", "content": "return None"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>Größe? \U0001f985</s><|assistant|>return None</s>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < VOCAB == len(tokenizer)
