"""The blocked attention against one dense softmax, and its gradients by differences."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from drafter.attention import Context, ttt_attention
from drafter.flex import causal_tiles, flex_ttt_attention
from drafter.fused import SharedWeight, rms_norm, rotate, swiglu
from drafter.slots import plan_slots


def dense(q, keys, values, later_keys, later_values, places, doc_of_context, doc_of_query):
    """The textbook mask written out: every context key, and every later key of every slot."""
    rows, heads, _ = q.shape
    groups = heads // keys.shape[0]
    keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
    scores = [torch.einsum("rhd,hcd->hrc", q, keys)]
    allowed = [(torch.arange(keys.shape[1])[None] <= places[:, None]) & (doc_of_context[None] == doc_of_query[:, None])]
    extra = []
    for k, v in zip(later_keys, later_values, strict=True):
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores.append(torch.einsum("rhd,shd->hrs", q, k))
        allowed.append(torch.eye(rows, dtype=torch.bool))
        extra.append(v.transpose(0, 1))
    mask = torch.cat(allowed, -1)
    weights = (torch.cat(scores, -1) * 0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hrc,hcd->rhd", weights, torch.cat([values, *extra], 1)).reshape(rows, -1)


@pytest.mark.parametrize("kept_scores", [0, 1 << 22], ids=["made-again", "kept"])
@pytest.mark.parametrize("query_block", [1, 3, 128])
@pytest.mark.parametrize("later", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "value"), [(4, 4, 6), (6, 2, 4), (3, 1, 4)])
def test_blocks_of_any_size_give_the_dense_softmax_and_its_gradients(
    query_block, later, heads, kv_heads, value, kept_scores, monkeypatch
) -> None:
    monkeypatch.setattr("drafter.attention._KEPT_SCORES", kept_scores)
    g = torch.Generator().manual_seed(query_block * 100 + later * 10 + heads)
    docs = torch.tensor([0] * 7 + [1] * 2 + [2] * 8)
    used = torch.rand(1, len(docs), generator=g) < 0.6
    plan = plan_slots(used, docs, query_block)
    rows, context = len(plan.rows[0]), len(plan.context)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    q, keys, values = random(rows, heads, 4), random(kv_heads, context, 4), random(kv_heads, context, value)
    ks, vs = ([random(rows, kv_heads, size) for _ in range(later)] for size in (4, value))
    inputs = [q, keys, values, *ks, *vs]
    weight = torch.randn(rows, heads * value, generator=g, dtype=torch.float64)
    ours = ttt_attention(q, Context(keys, values), ks, vs, plan.context_of[0], plan.blocks[0], 0.5, 0)
    theirs = dense(q, keys, values, ks, vs, plan.context_of[0], docs[plan.context], docs[plan.rows[0]])
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("later", [0, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "value"), [(4, 4, 32), (6, 2, 16)])
def test_the_form_for_gpus_gives_the_same_attention(later, heads, kv_heads, value) -> None:
    """Forward only: torch has no backward pass of flex attention on a CPU."""
    g = torch.Generator().manual_seed(heads + later)
    docs = torch.tensor([0] * 40 + [1] * 3 + [2] * 30)
    plan = plan_slots(torch.rand(1, len(docs), generator=g) < 0.6, docs, 16)
    rows, context = len(plan.rows[0]), len(plan.context)
    q, keys, values = (
        torch.randn(*s, generator=g) for s in ((rows, heads, 16), (kv_heads, context, 16), (kv_heads, context, value))
    )
    ks, vs = ([torch.randn(rows, kv_heads, n, generator=g) for _ in range(later)] for n in (16, value))
    given = (ks, vs, plan.context_of[0], plan.blocks[0], 0.3)
    ours = ttt_attention(q, Context(keys, values), *given, 0)
    assert torch.allclose(flex_ttt_attention(q, keys, values, *given), ours, atol=2e-6)


@pytest.mark.parametrize("lengths", [[5], [128], [300, 7, 140], [128, 128], [1, 1, 700]])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_mask_for_gpus_is_the_one_that_torch_would_make_of_all_pairs(lengths, share) -> None:
    docs = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    used = torch.rand(1, len(docs), generator=torch.Generator().manual_seed(len(docs))) < share
    plan = plan_slots(used, docs)
    first = torch.cat([torch.full((end - begin,), key) for begin, end, key, _ in plan.blocks[0]])
    last, context = plan.context_of[0], len(plan.context)

    def sees(batch, head, query, key):
        return (key >= first[query]) & (key <= last[query])

    ours = causal_tiles(first, last, context)
    theirs = create_block_mask(sees, None, None, len(last), context, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.seq_lengths == theirs.seq_lengths


def test_a_far_larger_score_in_the_future_does_not_leak_into_the_softmax() -> None:
    q = torch.ones(3, 1, 2)
    keys = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [1e4, 1e4]]])
    values = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    out = ttt_attention(q, Context(keys, values), [], [], torch.arange(3), [(0, 3, 0, 3)], 1.0, 0)
    assert out[0].tolist() == [1.0, 0.0]
    assert float(out[1].max()) < 1.0
    assert out[2].tolist() == [9.0, 9.0]


def test_fused_pieces_equal_their_compositions() -> None:
    g = torch.Generator().manual_seed(0)
    x, w, gate_up = (
        torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in ((5, 6), (6,), (5, 12))
    )
    assert torch.allclose(rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (6,), w, 1e-5))
    assert torch.allclose(swiglu(gate_up), torch.nn.functional.silu(gate_up[:, :6]) * gate_up[:, 6:])
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, 1e-5), (x, w))
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


@pytest.mark.parametrize("neighbours", [False, True])
def test_turning_pairs_is_a_product_with_complex_numbers(neighbours) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 8, generator=g, dtype=torch.float64).requires_grad_()
    angle = torch.randn(5, 1, 4, generator=g, dtype=torch.float64)
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    ours = rotate(x, angle.cos(), angle.sin(), neighbours)
    assert torch.allclose(ours, torch.cat([turned.real, turned.imag], -1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, angle.cos(), angle.sin(), neighbours), (x,))
    narrow = rotate(x.bfloat16(), angle.cos().float(), angle.sin().float(), neighbours)
    assert narrow.dtype == torch.bfloat16 and torch.allclose(narrow.double(), ours, atol=0.05)


def test_a_context_gathers_the_gradients_of_all_steps_that_read_it() -> None:
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    keys, values, queries = random(2, 6, 4), random(2, 6, 4), [random(n, 4, 4) for n in (4, 3, 2)]
    rows = [torch.arange(len(q)) for q in queries]

    def together(contexts: list[Context]) -> torch.Tensor:
        outs = [
            ttt_attention(q, c, [], [], r, [(0, len(q), 0, len(q))], 0.5, j).sin().sum()
            for j, (q, r, c) in enumerate(zip(queries, rows, contexts, strict=True))
        ]
        return torch.stack(outs).sum()

    ours = torch.autograd.grad(together([Context(keys, values)] * 3), [keys, values, *queries])
    apart = torch.autograd.grad(together([Context(keys, values) for _ in rows]), [keys, values, *queries])
    assert all(torch.allclose(a, b) for a, b in zip(ours, apart, strict=True))


def test_a_shared_weight_gathers_the_gradient_of_all_its_uses() -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=g, dtype=torch.float64).requires_grad_()
    xs = [torch.randn(n, 3, generator=g, dtype=torch.float64).requires_grad_() for n in (2, 5, 1)]
    factor = [torch.randn(len(x), 4, generator=g, dtype=torch.float64) for x in xs]
    shared = SharedWeight(w)
    ours = torch.autograd.grad(
        sum((shared(x, i) * f).sum() for i, (x, f) in enumerate(zip(xs, factor, strict=True))), [w, *xs]
    )
    theirs = torch.autograd.grad(sum(((x @ w.T) * f).sum() for x, f in zip(xs, factor, strict=True)), [w, *xs])
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
