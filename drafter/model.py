"""The EAGLE-3 draft model: one Llama-style block over the target's captured states, unrolled for training-time test.

Weights carry the names SGLang's `LlamaForCausalLMEagle3` loads. The target's embedding and head are frozen and lent,
never part of the drafter. Legend: N tokens of a packed row, C context slots, R computed slots, T token positions, H
hidden size, A captured blocks, K steps, D draft vocabulary, V target vocabulary.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafter.attention import Context, ttt_attention
from drafter.batch import Batch
from drafter.config import DrafterConfig, read_target_config
from drafter.flex import flex_ttt_attention
from drafter.fused import RMSNorm, SharedRows, SharedWeight, rms_norm, swiglu, take_rows
from drafter.heads import GroupedAttention, LatentAttention
from drafter.rope import RopeTable
from drafter.slots import SlotPlan, seen_token
from hidden_states.errors import TrainingError
from hidden_states.target_config import language_config


@dataclass(frozen=True)
class TargetWeights:
    """What the drafter borrows from its target: the embedding [V, H] and the head [V, H] (one tensor when tied)."""

    embedding: Tensor
    head: Tensor

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> "TargetWeights":
        """Reads the two tensors, and no other, from a Hugging Face folder.

        Raises: TrainingError when a folder holds no embedding under a known name, no head and a config that says the
            embedding is none, or a file that cannot be read.
        """
        found: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            try:
                found = {**_lent(file, dtype), **found}
            except (SafetensorError, OSError) as error:
                raise TrainingError(
                    str(file), f"it cannot be read ({error})", "the target's weights", "Copy it again."
                ) from error
        if "embed_tokens.weight" not in found:
            raise TrainingError(
                str(folder), "no tensor named *embed_tokens.weight", "a target with safetensors weights",
                "Point at the folder the server loads.",
            )  # fmt: skip
        if "lm_head.weight" not in found and not _ties_head(folder):
            raise TrainingError(
                str(folder), "no tensor named *lm_head.weight, and a config with tie_word_embeddings false",
                "the target's head", "A file of weights is missing: copy the folder again.",
            )  # fmt: skip
        embedding = found["embed_tokens.weight"]
        return cls(embedding, found.get("lm_head.weight", embedding))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TargetWeights":
        """Moved and cast; tied weights stay one tensor."""
        embedding = self.embedding.to(device, dtype)
        return TargetWeights(embedding, embedding if self.head is self.embedding else self.head.to(device, dtype))


def _lent(file: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The embedding and the head, by the ends of their names, where one file holds them."""
    found: dict[str, Tensor] = {}
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is no dict)
            for wanted in ("embed_tokens.weight", "lm_head.weight"):
                if name.endswith(wanted) and "mtp" not in name:
                    found.setdefault(wanted, tensors.get_tensor(name).to(dtype))
    return found


def vocabulary_digest(d2t: Tensor) -> str:
    """sha256 of a draft vocabulary's map [D], as int64."""
    return hashlib.sha256(d2t.cpu().to(torch.int64).numpy().tobytes()).hexdigest()


def _ties_head(folder: str | Path) -> bool:
    """Whether a target without a head of its own may have its embedding for one."""
    if not (Path(folder) / "config.json").is_file():
        return True
    config = read_target_config(folder)
    said = [level.get("tie_word_embeddings") for level in (config, language_config(config))]
    return any(said) or said == [None, None]


class _MLP(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class _Block(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = LatentAttention(c) if c.latent else GroupedAttention(c)
        self.mlp = _MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Eagle3Drafter(nn.Module):
    """The trainable drafter. `d2t` [D] maps draft ids to target ids as offsets: target = draft + d2t[draft]."""

    d2t: Tensor

    def __init__(self, config: DrafterConfig, d2t: Tensor) -> None:
        super().__init__()
        if tuple(d2t.shape) != (config.draft_vocab_size,):
            raise TrainingError(
                "d2t", f"shape {tuple(d2t.shape)}", f"({config.draft_vocab_size},)", "Rebuild the vocabulary map."
            )
        self.config = config
        self.fc = nn.Linear(config.states_width, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.after_block)
        self.midlayer = _Block(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t.to(torch.int64))
        self._rope = RopeTable(config.rope, config.rope_dim)

    @property
    def draft_ids(self) -> Tensor:
        """[D], the target ids the draft vocabulary holds, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def initialise(self, target_head: Tensor, seed: int) -> None:
        """Fresh weights: the head from the target's rows of the draft vocabulary, norms 1, matrices normal with a
        standard deviation of 0.7 / sqrt(inputs)."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            elif name == "lm_head.weight":
                weight.copy_(target_head[self.draft_ids.to(target_head.device)])
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * (0.7 * weight.shape[1] ** -0.5))

    def forward(
        self, batch: Batch, plan: SlotPlan, embedding: Tensor, dtype: torch.dtype, recompute: bool = False
    ) -> list[Tensor]:
        """All that `unroll` gives. Sharded weights are whole in here and until the backward pass is over."""
        return list(self.unroll(batch, plan, embedding, dtype, recompute))

    def zero(self) -> Tensor:
        """0, with a gradient of 0 for every weight: the share in a step of a rank without rows."""
        return torch.stack([weight.reshape(-1)[0] for weight in self.parameters()]).sum() * 0

    def unroll(
        self, batch: Batch, plan: SlotPlan, embedding: Tensor, dtype: torch.dtype, recompute: bool = False
    ) -> Iterator[Tensor]:
        """Per step, the normed draft states [scored slots, H] the head reads.

        Args:
            batch: the packed row; `aux` may be of any floating dtype.
            plan: which slots each step computes.
            embedding: the target's, [V, H].
            dtype: of the matrix products; norms, softmax and the residual stream are at least float32.
            recompute: keep only each step's input for the backward pass and compute the step again there.
        """
        if not plan.steps:
            return
        c, mid = self.config, self.midlayer
        wide = torch.promote_types(dtype, torch.float32)
        ones = torch.ones((), dtype=wide, device=embedding.device)
        # The attention's input is [norm(embedding), norm(state)]. The embedding's half of its first product belongs to
        # a token's id, not to a slot or a step: it is made once per id and looked up at every step.
        heads = mid.self_attn.heads(dtype)
        into_embed, into_state = heads.into.split(c.hidden_size, dim=1)
        # Of its own: see `drafter.product` about parts of wider matrices.
        shared_into, q_width = SharedWeight(into_state.contiguous()), heads.query_width
        out_proj = SharedWeight(mid.self_attn.o_proj.weight.to(dtype))
        gate_up = SharedWeight(torch.cat([mid.mlp.gate_proj.weight, mid.mlp.up_proj.weight]).to(dtype))
        down = SharedWeight(mid.mlp.down_proj.weight.to(dtype))

        tokens, token_of = _tokens_seen(plan, batch.input_ids)
        # The norm's weight goes into the matrix: frozen inputs then need no gradient, which saves a product.
        unit = rms_norm(embedding[tokens], ones, c.rms_norm_eps, dtype)
        embed = SharedRows(unit @ (into_embed * mid.input_layernorm.weight.to(dtype)).T)  # [T, width]

        aux = batch.aux if len(plan.context) == len(batch.aux) else batch.aux[plan.context]
        fc = self.fc.weight
        if c.fc_norm:
            fc = fc * torch.cat([self.get_parameter(f"fc_norm.{a}.weight") for a in range(len(c.after_block))])
            aux = rms_norm(aux, ones, c.rms_norm_eps, dtype)
        states = (aux.reshape(len(aux), -1).to(dtype) @ fc.to(dtype).T).to(wide)  # [C, H]
        normed = mid.hidden_norm(states, dtype)
        turn = self._rope.at(batch.positions[plan.context], wide)
        at_context = token_of[seen_token(plan.context, 0)]
        k0, v0 = heads.keys_values(normed @ into_state[q_width:].T + embed(at_context, -1, q_width), turn, 0)
        keys, values = k0.transpose(0, 1).contiguous(), v0.transpose(0, 1).contiguous()

        context = None if keys.is_cuda else Context(keys, values)

        def step(j: int, state: Tensor, *later: Tensor) -> tuple[Tensor, ...]:
            """One step: the slots' states [R, H] and own later keys and values -> new states, new key, new value."""
            rows = plan.rows[j]
            turn = self._rope.at(batch.positions[rows] + j, wide)
            given = embed(token_of[seen_token(rows, j)], j)
            normed = mid.hidden_norm(state, dtype)
            made: tuple[Tensor, ...] = ()
            if j == 0:
                q = normed @ into_state[:q_width].T + given[:, :q_width]
            else:
                q, kv = (shared_into(normed, j) + given).split([q_width, given.shape[1] - q_width], dim=-1)
                made = heads.keys_values(kv, turn, j)
            q = heads.queries(q, turn, j)
            own_keys, own_values = [*later[::2], *made[:1]], [*later[1::2], *made[1:]]
            places, blocks = plan.context_of[j], plan.blocks[j]
            if context is None:
                mixed = flex_ttt_attention(q, keys, values, own_keys, own_values, places, blocks, heads.scale)
            else:
                mixed = ttt_attention(q, context, own_keys, own_values, places, blocks, heads.scale, j)
            state = state + out_proj(mixed, j)
            normed = mid.post_attention_layernorm(state, dtype)
            return state + down(swiglu(gate_up(normed, j)), j), *made

        state = take_rows(states, None if len(plan.rows[0]) == len(states) else plan.context_of[0])
        later: list[Tensor] = []
        for j in range(plan.steps):
            if (keep := plan.keep[j]) is not None:
                state, later = take_rows(state, keep), [take_rows(x, keep) for x in later]
            if recompute and torch.is_grad_enabled():
                state, *made = checkpoint(step, j, state, *later, use_reentrant=False)
            else:
                state, *made = step(j, state, *later)
            later += made
            scored = plan.scored[j]
            if c.norm_output:
                normed = self.norm(state, dtype)
                state = normed.to(wide)
                yield take_rows(normed, scored)
            else:
                yield self.norm(take_rows(state, scored), dtype)


def _tokens_seen(plan: SlotPlan, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target ids that some computed slot sees [T], each once, and each token's place among them [N + 1]; the places
    of tokens no slot sees mean nothing."""
    n = len(input_ids)
    seen = torch.zeros(n + 1, dtype=torch.bool, device=plan.context.device)
    seen[seen_token(plan.context, 0)] = True
    for j, rows in enumerate(plan.rows):
        seen[seen_token(rows, j)] = True
    tokens = seen.nonzero()[:, 0]
    place = torch.zeros(n + 1, dtype=torch.int64, device=seen.device)
    ids, place[tokens] = input_ids[tokens].unique(return_inverse=True)
    return ids, place
