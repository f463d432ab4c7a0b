"""EAGLE-3's training loss written down as slowly and plainly as possible: float64, one slot, step and head at a time.

Nothing here comes from `drafter`: not the shift, not the rule of which slots count, not rope, not the attention. Every
slot is computed at every step, whether it counts or not. Gradients are autograd's, through these loops.
"""

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * weight


def turned(x: Tensor, position: int, theta: float, neighbours: bool = False) -> Tensor:
    """Rope on one head: pairs (i, i + half), or (2i, 2i + 1), turned by position * theta^(-2i/size)."""
    half = len(x) // 2
    out = [x[0]] * len(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        angle = position * theta ** (-2 * i / len(x))
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return torch.stack(out)


def latent_heads(w: Weights, x: Tensor, position: int, theta: float, eps: float, heads: int, at: dict) -> tuple:
    """Multi-head latent attention of one slot: query [heads, nope + rope], key the same, value [heads, v]."""
    nope, rank = at["qk_nope_head_dim"], at["kv_lora_rank"]
    q = w["self_attn.q_b_proj.weight"] @ norm(
        w["self_attn.q_a_proj.weight"] @ x, w["self_attn.q_a_layernorm.weight"], eps
    )
    kv = w["self_attn.kv_a_proj_with_mqa.weight"] @ x
    spread = w["self_attn.kv_b_proj.weight"] @ norm(kv[:rank], w["self_attn.kv_a_layernorm.weight"], eps)
    shared = turned(kv[rank:], position, theta, neighbours=True)
    q_heads, kv_heads = q.view(heads, -1), spread.view(heads, -1)
    query = [torch.cat([h[:nope], turned(h[nope:], position, theta, neighbours=True)]) for h in q_heads]
    key = [torch.cat([h[:nope], shared]) for h in kv_heads]
    return torch.stack(query), torch.stack(key), torch.stack([h[nope:] for h in kv_heads])


def counts(doc: list[int], learn: list[int], slot: int, step: int) -> bool:
    """Does this slot of one document count at this step: the token it sees and the token it predicts are to learn."""
    sees, predicts = slot + 1 + step, slot + 2 + step
    return predicts < len(doc) and bool(learn[sees]) and bool(learn[predicts])


def reference_loss(
    weights: Weights,
    documents: list[dict],  # ids [S], learn [S], aux [S, A, H], final [S, H]
    embedding: Tensor,
    head: Tensor,
    *,
    heads: int,
    kv_heads: int,
    steps: int,
    theta: float,
    eps: float,
    decay: float,
    fc_norm: bool,
    norm_output: bool,
    out_of_vocab: str,
    kind: str,
    latent: dict | None = None,
) -> dict:
    """loss (differentiable); per step: positions counted, with a loss, with a teacher in the draft vocabulary, hits,
    chains alive before and after, sums of loss and of the teacher's entropy; tokens to learn, and of these in the draft
    vocabulary."""
    d2t = weights["d2t"].tolist()
    vocab = [j + d2t[j] for j in range(len(d2t))]
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    used, counted, in_vocab, hit, reached, accepted = ([0] * steps for _ in range(6))
    entropy, learned, covered = [0.0] * steps, 0, 0
    w = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    for doc in documents:
        ids, learn = doc["ids"].tolist(), doc["learn"].tolist()
        length = len(ids)
        learned += sum(learn)
        covered += sum(token in vocab for token, on in zip(ids, learn, strict=True) if on)
        state, keys, values = {}, {}, {}
        for i in range(length):
            chunks = [doc["aux"][i, a] for a in range(doc["aux"].shape[1])]
            if fc_norm:
                chunks = [norm(c, w[f"fc_norm.{a}.weight"], eps) for a, c in enumerate(chunks)]
            state[i] = w["fc.weight"] @ torch.cat(chunks)
        unbroken = dict.fromkeys(range(length), True)
        for j in range(steps):
            after = {}
            for i in range(length):
                if i + 1 + j >= length:
                    continue
                e = norm(embedding[ids[i + 1 + j]], w["input_layernorm.weight"], eps)
                x = torch.cat([e, norm(state[i], w["hidden_norm.weight"], eps)])
                if latent:
                    after[i], keys[i, j], values[i, j] = latent_heads(w, x, i + j, theta, eps, heads, latent)
                    continue
                q = (w["self_attn.q_proj.weight"] @ x).view(heads, -1)
                k = (w["self_attn.k_proj.weight"] @ x).view(kv_heads, -1)
                values[i, j] = (w["self_attn.v_proj.weight"] @ x).view(kv_heads, -1)
                keys[i, j] = torch.stack([turned(k[g], i + j, theta) for g in range(kv_heads)])
                after[i] = torch.stack([turned(q[a], i + j, theta) for a in range(heads)])
            for i, q in after.items():
                seen = [(s, 0) for s in range(i + 1)] + [(i, later) for later in range(1, j + 1)]
                mixed = []
                for a in range(heads):
                    g = a if latent else a // (heads // kv_heads)
                    scores = torch.stack([q[a] @ keys[place][g] for place in seen]) / math.sqrt(q.shape[1])
                    share = scores.softmax(0)
                    mixed.append(sum(share[n] * values[place][g] for n, place in enumerate(seen)))
                h = state[i] + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
                y = norm(h, w["post_attention_layernorm.weight"], eps)
                gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
                h = h + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
                normed = norm(h, w["norm.weight"], eps)
                state[i] = normed if norm_output else h
                if not counts(ids, learn, i, j):
                    unbroken[i] = False
                    continue
                counted[j] += 1
                reached[j] += unbroken[i]
                teacher = head @ doc["final"][i + 1 + j]
                logits = w["lm_head.weight"] @ normed
                best = int(teacher.argmax())
                in_vocab[j] += best in vocab
                right = best in vocab and vocab[int(logits.argmax())] == best
                hit[j] += right
                unbroken[i] = unbroken[i] and right
                accepted[j] += unbroken[i]
                if out_of_vocab == "drop" and best not in vocab:
                    continue
                used[j] += 1
                p = teacher[vocab].softmax(0)
                q_d = logits.softmax(0)
                entropy[j] -= float((p * p.log()).sum())
                if kind == "lk":
                    sums[j] = sums[j] - torch.log(sum(torch.minimum(a, b) for a, b in zip(p, q_d, strict=True)))
                else:
                    sums[j] = sums[j] - (p * q_d.log()).sum()
                    if kind == "kl":
                        sums[j] = sums[j] + (p * p.log()).sum()
    loss = sum(decay**j * s / max(1, used[j]) for j, s in enumerate(sums))
    return {
        "loss": loss, "used": used, "counted": counted, "hits": hit, "reached": reached, "accepted": accepted,
        "in_vocab": in_vocab, "sums": [float(s.detach()) for s in sums], "entropy": entropy, "learned": learned,
        "covered": covered,
    }  # fmt: skip
