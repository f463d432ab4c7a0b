"""The semantic gate: are the states those of the right block, norm and position? Every shape can be right, this wrong.

Two judges, by what fits the machine:

- `Reference`: a transformers forward of the same tokens. Every captured state is compared with the embedding, with
  every block's output, with the final state (normed, not normed, normed twice), and with all of these shifted by a
  token; the answer names what the data really looks like.
- `NormCheck`: the final norm's weights alone (a few kilobytes, whatever the target's size). A state after RMSNorm,
  divided by the norm's weights, has a root mean square of 1 in every row; before the norm it hardly ever does. And what
  it was before the norm (up to a factor) resembles the blocks' outputs the more, the deeper the block: on SmolLM2 the
  cosine is 0.01, 0.05 and 0.49 after blocks 1, 14 and 26.

Distances are per row, |x - y| / |y|, and a state is judged by their median: the first row of most models holds values a
hundred times larger than all others, hardly changed from block to block, and would drown the rest. Tolerances, with the
median measured on SmolLM2-135M (30 blocks) against float32, and the distance of neighbouring blocks, 0.2 to 0.8:

    float32   median 1e-3, any row 0.02
    float16   median 0.01 (measured 0.002), any row 0.1
    bfloat16  median 0.05 (measured 0.014), any row 0.25

With routed experts, 16-bit rounding sends a token to another expert now and then, and that row moves by up to 0.7
(measured on tiny random models); rows of other requests are 0.85 away at least. There any row may be 0.8 away.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eyas_capture import contract
from hidden_states.dump import Dump
from hidden_states.errors import GateError
from hidden_states.target_config import loading, read_language_config
from hidden_states.weights import TargetWeights

_TOLERANCE = {torch.float32: (1e-3, 0.02), torch.float16: (0.01, 0.1), torch.bfloat16: (0.05, 0.25)}
_ROUTED_ROW = 0.8
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_FINAL = "the final state after its norm"
_SHIFTS = {1: ", one token late", -1: ", one token early"}


@dataclass(frozen=True)
class Finding:
    """What one captured tensor looks like.

    Attributes:
        tensor: its name in the dump.
        expected: what it should be, in words.
        looks_like: the nearest state of the reference, in words.
        distance: median over rows to the expected state.
        nearest_distance: the same to the state it looks like.
        worst_row: the row furthest from the expected state, and `worst_distance` how far.
        ok: it is the expected state within its dtype's tolerance, in every row.
    """

    tensor: str
    expected: str
    looks_like: str
    distance: float
    nearest_distance: float
    worst_row: int
    worst_distance: float
    ok: bool

    def in_words(self) -> str:
        if self.ok:
            return f"{self.tensor} is {self.expected} (distance {self.distance:.1g})"
        if self.looks_like == self.expected or self.distance <= 2 * self.nearest_distance:
            return (
                f"{self.tensor} is near {self.expected}, but not it (distance {self.distance:.2g}; row "
                f"{self.worst_row} is {self.worst_distance:.2g} away)"
            )
        return (
            f"{self.tensor} looks like {self.looks_like} (distance {self.nearest_distance:.2g}), not like "
            f"{self.expected} ({self.distance:.2g})"
        )


class Reference:
    """The target under transformers, in float32."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.folder = folder
        self.model = model.eval()
        decoder = model.get_decoder()
        self.decoder = decoder
        self.blocks: Any = getattr(decoder, "layers", None)
        self.norm: Any = getattr(decoder, "norm", None)
        self.routed = has_experts(folder)
        if self.blocks is None or self.norm is None:
            raise GateError(
                str(folder), f"transformers' {type(decoder).__name__} has no `layers` and `norm`", None,
                "A reference forward of this architecture is not supported; leave it out.",
            )  # fmt: skip

    @classmethod
    def load(cls, target_folder: Path | str, *, trust_remote_code: bool = False) -> "Reference":
        """Load the target's weights, as float32.

        Raises:
            RecipeError, DataError: transformers cannot load them, or may not run the folder's own code.
        """
        with loading("model", target_folder):
            model = AutoModelForCausalLM.from_pretrained(
                str(target_folder), dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        return cls(model, Path(target_folder))

    @staticmethod
    def bytes_needed(target_folder: Path | str) -> int:
        """Memory the weights take in float32: whether a reference forward fits can be asked before loading it."""
        return 4 * TargetWeights(target_folder).parameters()

    @torch.no_grad()
    def states(self, input_ids: list[int]) -> dict[str, torch.Tensor]:
        """Every state a capture could mistake for another, by its name in words; [S, H] float32 each."""
        blocks: dict[int, torch.Tensor] = {}

        def keep(block: int) -> Any:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                blocks[block] = (output if isinstance(output, torch.Tensor) else output[0])[0].float().clone()

            return hook

        hooks = [module.register_forward_hook(keep(block)) for block, module in enumerate(self.blocks)]
        try:
            tokens = torch.tensor([input_ids])
            final = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state[0].float()
            embedding = self.model.get_input_embeddings()(tokens)[0].float()
        finally:
            for hook in hooks:
                hook.remove()
        named = {block_in_words(block): blocks[block] for block in sorted(blocks)}
        last = block_in_words(len(blocks) - 1)
        return {
            "the embedding": embedding,
            **{name: state for name, state in named.items() if name != last},
            f"the final state without its norm ({last})": named[last],
            _FINAL: final,
            "the final state with its norm applied twice": self.norm(final),
        }

    def identify(self, dump: Dump) -> list[Finding]:
        """What each tensor of a dump looks like, in the dump's order."""
        candidates = self.states(dump.tensor(contract.INPUT_IDS).tolist())
        expected = {contract.block_tensor(block): block_in_words(block) for block in dump.writer.after_block}
        expected[contract.FINAL] = _FINAL
        return [_identify(name, dump.tensor(name), words, candidates, self.routed) for name, words in expected.items()]

    def check(self, dump: Dump) -> list[Finding]:
        """As `identify`.

        Raises:
            GateError: a tensor is not what its name says; the message names what it looks like.
        """
        findings = self.identify(dump)
        wrong = [finding.in_words() for finding in findings if not finding.ok]
        if wrong:
            raise GateError(
                str(dump.ref),
                "; ".join(wrong),
                None,
                "Nothing of this run can be trained on. Are the server's weights those of "
                f"{self.folder}, and the captured blocks the recipe's? The dump is kept as evidence.",
            )
        return findings


class NormCheck:
    """The target's final norm, to tell normed final states from others without running the model."""

    _SLACK = 0.05  # bfloat16 states deviate by 0.001 at most; the norm's eps and near-zero weights by less than this
    _ORDER_SLACK = 0.1  # early blocks may change places by chance: both have hardly anything of the final state

    def __init__(self, weight_H: torch.Tensor) -> None:
        self.weight_H = weight_H.float()

    @classmethod
    def load(cls, target_folder: Path | str) -> "NormCheck | None":
        """None when the folder's final norm is not an RMSNorm with weights (a LayerNorm has a bias too)."""
        weights = TargetWeights(target_folder)
        name = weights.find("model.norm.weight", "norm.weight")
        if name is None or weights.find(name.removesuffix("weight") + "bias") is not None:
            return None
        return cls(weights.whole(name))

    def root_mean_square(self, final_RH: torch.Tensor) -> torch.Tensor:
        """Of each row divided by the norm's weights, [R]."""
        return self._before_norm(final_RH)[0].square().mean(dim=-1).sqrt()

    def check(self, dump: Dump) -> None:
        """Check a dump's final state, and the order of its blocks.

        Raises:
            GateError: rows of the final state are not normed, or a deeper block resembles the final state less than a
                shallower one.
        """
        before_RH, keep_H = self._before_norm(dump.tensor(contract.FINAL))
        found = before_RH.square().mean(dim=-1).sqrt()
        off = int(((found - 1).abs() > self._SLACK).sum())
        if off:
            raise GateError(
                str(dump.ref),
                f"{off} of {len(found)} rows of the final state are not normed: divided by the final norm's weights "
                f"their root mean square is {float(found.median()):.3g} in the middle row",
                "1 in every row, as a state after RMSNorm has",
                "The final state was taken before the norm, or belongs to another model; the dump is kept as evidence.",
            )
        likeness = {
            block: float(_cosine(dump.tensor(contract.block_tensor(block)).float()[:, keep_H], before_RH).median())
            for block in dump.writer.after_block
        }
        for (low, one), (high, other) in itertools.pairwise(likeness.items()):
            if other < one - self._ORDER_SLACK:
                raise GateError(
                    str(dump.ref),
                    f"after_block_{low} resembles the final state more (cosine {one:.2f}) than after_block_{high} does "
                    f"({other:.2f})",
                    "the deeper block to resemble it more",
                    "The captured blocks are in another order than their names say; the dump is kept as evidence.",
                )

    def _before_norm(self, final_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The final state before its norm, up to a factor per row (divided by the norm's weights), and its columns.

        Some norms (Gemma's, Qwen3-Next's) multiply by 1 + weight: whichever gives the more normed rows is taken.

        Raises:
            GateError: the rows are not as wide as the norm.
        """
        if final_RH.shape[-1] != len(self.weight_H):
            raise GateError(
                "final state", f"{final_RH.shape[-1]} values a row", f"{len(self.weight_H)}, as the target's norm",
                "Give the target these states were captured from.",
            )  # fmt: skip
        made = []
        for scale_H in (self.weight_H, 1 + self.weight_H):
            keep_H = scale_H.abs() > 1e-3 * scale_H.abs().max()  # the rest cannot be divided by
            made.append((final_RH.float()[:, keep_H] / scale_H[keep_H], keep_H))
        return min(made, key=lambda one: float((one[0].square().mean(dim=-1).sqrt() - 1).abs().median()))


def has_experts(target_folder: Path | str) -> bool:
    """Whether the target routes tokens to experts: then 16-bit rounding moves single rows far."""
    config = read_language_config(target_folder)
    return any(config.get(key) for key in _EXPERT_KEYS)


def compare(one: Dump, other: Dump, *, routed: bool = False) -> dict[str, float]:
    """Largest row distance of two captures of the same tokens, by tensor: alone and in a batch, chunked and whole.

    Args:
        other: may lack a prefix that was served from the cache; the rows after it are compared.
        routed: the target has experts.

    Raises:
        GateError: they are of other tokens, or further apart than the dtype explains.
    """
    if one.record.tokens_sha256 != other.record.tokens_sha256:
        raise GateError(f"{one.ref} and {other.ref}", "captures of different tokens")
    distances = {}
    for name in list(one.states.tensors)[1:]:
        rows = row_distance(one.tensor(name)[other.record.prefix_cached :], other.tensor(name))
        median, worst = _TOLERANCE[one.tensor(name).dtype]
        if routed and one.tensor(name).dtype != torch.float32:
            worst = _ROUTED_ROW
        distances[name] = float(rows.max())
        if float(rows.median()) > median or float(rows.max()) > worst:
            raise GateError(
                f"{one.ref} and {other.ref}",
                f"{name} differs by {float(rows.max()):.2g} in row {int(rows.argmax())} between two captures of the "
                "same tokens",
                f"at most {worst:g}",
                "States must not depend on what else the server does: chunking, batching and prefix hits.",
            )
    return distances


def block_in_words(block: int) -> str:
    return f"the output of block {block}"


def row_distance(x_RH: torch.Tensor, y_RH: torch.Tensor) -> torch.Tensor:
    """|x - y| / |y| per row, [R]."""
    x, y = x_RH.float(), y_RH.float()
    return (x - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-12)


def _cosine(x_RH: torch.Tensor, y_RH: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(x_RH, y_RH, dim=-1)


def _identify(
    name: str, captured: torch.Tensor, expected: str, candidates: dict[str, torch.Tensor], routed: bool
) -> Finding:
    distances: dict[str, float] = {}
    for words, state in candidates.items():
        distances[words] = float(row_distance(captured, state).median())
        for shift, suffix in _SHIFTS.items():
            if len(state) > 1:
                x, y = (captured[1:], state[:-1]) if shift == 1 else (captured[:-1], state[1:])
                distances[words + suffix] = float(row_distance(x, y).median())
    rows = row_distance(captured, candidates[expected])
    nearest = min(distances, key=lambda words: distances[words])
    median, worst = _TOLERANCE[captured.dtype]
    if routed and captured.dtype != torch.float32:
        worst = _ROUTED_ROW
    # Two states of the reference may hardly differ themselves: a second norm with weights near 1 changes nothing.
    indistinct = distances[expected] <= max(2 * distances[nearest], 0.01 * median)
    return Finding(
        tensor=name,
        expected=expected,
        looks_like=nearest,
        distance=distances[expected],
        nearest_distance=distances[nearest],
        worst_row=int(rows.argmax()),
        worst_distance=float(rows.max()),
        ok=indistinct and distances[expected] <= median and float(rows.max()) <= worst,
    )
