"""Why does a drafter serve worse than it was predicted to? The choices training and serving must share, one by one.

A drafter's weights mean something only together with a number of choices: which blocks feed it, its norms, its rope,
its vocabulary map, the dtype. Serving takes them from the exported folder; training took them from the dataset and the
target. Wherever the two differ there is a suspect. Each suspect's own effect is found by replaying the acceptance on
held-out states with this one choice as served and all others as trained: the replay is what a server would measure
(within 0.05), so the choice whose replay falls to the served figure is the cause.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.batch import Batch
from drafter.config import DrafterConfig, read_target_config
from drafter.layer_ids import blocks_sglang_captures
from drafter.loss import LossConfig
from drafter.model import Eagle3Drafter, TargetWeights, vocabulary_digest
from drafter.naming import to_sglang_name
from drafter.objective import Teacher
from drafter.published import published_config
from drafter.trainer import evaluate

LAYERS, VOCABULARY, ROPE, DTYPE = "layer ids", "vocabulary map", "rope", "dtype"
NORMS = {"fc_norm": "norm before fc", "norm_output": "norm of the recurrence", "rms_norm_eps": "norm epsilon"}

Rows = Callable[[tuple[int, ...]], Iterable[Batch] | None]


@dataclass(frozen=True)
class Choices:
    """How a drafter's weights are to be run. `config` carries blocks, rope and norms; `d2t` [D]; `dtype` by name."""

    config: DrafterConfig
    d2t: Tensor
    dtype: str


@dataclass(frozen=True)
class Suspect:
    """A choice that serving does not share with training.

    Attributes:
        served, trained: in words.
        alone: replayed acceptance length with this choice as served and all others as trained; None where that cannot
            be computed here.
    """

    name: str
    served: str
    trained: str
    alone: float | None


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        replayed: acceptance length with every choice as trained.
        served: what the server measured.
        suspects: the likeliest first.
        alike: choices that do not differ.
        cause: the likely one's name; None when no choice explains a gap. Without one, what differs.
    """

    replayed: float
    served: float
    suspects: list[Suspect]
    alike: list[str]
    cause: str | None

    def in_words(self) -> str:
        """One sentence."""
        gap = f"served {self.served:.3f}, replayed as trained {self.replayed:.3f}"
        if self.cause is None:
            differs = "".join(f"; {s.name} differs, but does not cost so much" for s in self.suspects)
            return f"{gap}: no cause found{differs}; the same in training and serving: {', '.join(self.alike)}"
        first = self.suspects[0]
        effect = "" if first.alone is None else f"; a replay with this alone changed gives {first.alone:.3f}"
        others = "".join(f"; {s.name} differs too ({s.served}, not {s.trained})" for s in self.suspects[1:])
        return f"{gap}: likely the {first.name}, served as {first.served}, trained as {first.trained}{effect}{others}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "in_words": self.in_words()}


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """A drafter's tensors by SGLang's names, as they lie there."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {to_sglang_name(name): tensor for file in files for name, tensor in load_file(file).items()}


def as_served(folder: str | Path, target: str | Path, dtype: str) -> Choices:
    """The choices a server takes from the folder: `config.json` as the engine reads it, and the weights' own map.

    Args:
        dtype: the server's: SGLang runs the drafter in its own dtype, whatever the drafter's config says.
    """
    config, target_config = read_target_config(folder), read_target_config(target)
    shape = published_config(folder, target_config)
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids:
        # in the order of the forward pass, however they are listed; past the config's checks, as the engine has none
        fed = tuple(sorted(set(blocks_sglang_captures(ids, shape.target_architecture))))
        object.__setattr__(shape, "after_block", fed)
    weights = read_weights(folder)
    d2t = weights.get("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
    return Choices(shape, d2t.to(torch.int64), dtype)


def as_trained(
    served: Choices, folder: str | Path, target: str | Path, after_block: Iterable[int], d2t: Tensor, dtype: str
) -> Choices:
    """The choices of training.

    Args:
        after_block, d2t, dtype: the dataset's.

    Rope and norms: as the export wrote them down (`eyas.trained` in config.json); without that the target's rope and
    eps, and norms by the tensors that are there. The vocabulary map is the folder's where the export wrote down its
    digest: a training that started from a published drafter keeps that one's.
    """
    config = read_target_config(folder)
    target_config = read_target_config(target)
    said = (config.get("eyas") or {}).get("trained") or {}
    like_target = DrafterConfig.from_target(target_config, tuple(after_block), len(d2t))
    weights = read_weights(folder)
    has_fc_norm = any(name.startswith("fc_norm.") for name in weights)
    if "d2t" in weights and vocabulary_digest(weights["d2t"]) == said.get("d2t_sha256"):
        d2t = weights["d2t"]
    shape = replace(
        served.config,
        after_block=tuple(after_block),
        rope=said.get("rope", like_target.rope),
        rms_norm_eps=said.get("rms_norm_eps", like_target.rms_norm_eps),
        fc_norm=said.get("fc_norm", has_fc_norm),
        norm_output=said.get("norm_output", served.config.norm_output),
    )
    return Choices(shape, d2t.to(torch.int64), dtype)


def replayed(
    choices: Choices, weights: dict[str, Tensor], target: TargetWeights, rows: Iterable[Batch], steps: int
) -> float:
    """Replayed acceptance length of a drafter that is run by these choices.

    Args:
        rows: held-out packed rows with the states of `choices.config.after_block`.
        steps: tokens drafted per verification.
    """
    ids = choices.d2t + torch.arange(len(choices.d2t))
    if bool((ids < 0).any()) or int(ids.max()) >= choices.config.vocab_size:
        return 1.0  # proposes tokens that do not exist
    drafter = Eagle3Drafter(choices.config, choices.d2t)
    own = drafter.state_dict()
    # a norm the engine is told of but has no weights for stays as it was made: all ones
    own |= {name: value for name, value in weights.items() if name in own and name != "d2t"}
    drafter.load_state_dict(own)
    dtype: torch.dtype = getattr(torch, choices.dtype)
    drafter.float()
    teacher = Teacher(target.to("cpu", dtype), drafter.draft_ids)
    figures = evaluate(drafter, rows, teacher, steps, LossConfig(), dtype)
    return figures.replayed_acceptance_length[steps - 1]


def differing(served: Choices, trained: Choices) -> list[str]:
    """Names of the choices that serving does not share with training."""
    return [name for name, _, words in _choices(served) if words(served) != words(trained)]


def diagnose(
    served: Choices, trained: Choices, weights: dict[str, Tensor], target: TargetWeights, rows: Rows, steps: int,
    measured: float, bound: float,
) -> Diagnosis:  # fmt: skip
    """Names the likely cause of a gap.

    Args:
        rows: captured blocks -> held-out packed rows with their states, None where these states cannot be had.
        measured: the served acceptance length.
        bound: gaps up to this are none.
    """
    base_rows = rows(trained.config.after_block)
    if base_rows is None:
        raise ValueError("there are no rows of the blocks that the drafter was trained on")
    base = replayed(trained, weights, target, base_rows, steps)
    suspects, alike = [], []
    for name, change, words in _choices(served):
        ours, theirs = words(served), words(trained)
        if ours == theirs:
            alike.append(name)
            continue
        spoiled = change(trained)
        blocks = spoiled.config.after_block
        states = rows(blocks) if len(blocks) == len(trained.config.after_block) else None  # another width: nothing runs
        alone = None if states is None else round(replayed(spoiled, weights, target, states, steps), 4)
        suspects.append(Suspect(name, ours, theirs, alone))

    def rank(suspect: Suspect) -> tuple[bool, float]:
        """What explains the figure best first; an effect that cannot be computed goes before one that is none."""
        if suspect.alone is None:
            return False, bound
        return base - suspect.alone <= bound / 2, abs(suspect.alone - measured)

    suspects.sort(key=rank)
    cause = suspects[0].name if suspects and (base - measured <= bound or not rank(suspects[0])[0]) else None
    return Diagnosis(round(base, 4), round(measured, 4), suspects, alike, cause)


def _choices(
    served: Choices,
) -> list[tuple[str, Callable[[Choices], Choices], Callable[[Choices], str]]]:
    """Name, what makes this one choice as served, and the choice in words."""

    def of_config(field: str) -> Callable[[Choices], Choices]:
        def change(trained: Choices) -> Choices:
            config = replace(trained.config)
            object.__setattr__(config, field, getattr(served.config, field))
            return replace(trained, config=config)

        return change

    found: list[tuple[str, Callable[[Choices], Choices], Callable[[Choices], str]]] = [
        (LAYERS, of_config("after_block"), lambda c: f"blocks {', '.join(map(str, c.config.after_block))}"),
        (ROPE, of_config("rope"), lambda c: json.dumps(c.config.rope, sort_keys=True)),
        (VOCABULARY, lambda trained: replace(trained, d2t=served.d2t), _map_in_words),
        (DTYPE, lambda trained: replace(trained, dtype=served.dtype), lambda c: c.dtype),
    ]
    found += [(name, of_config(field), _value_of(field)) for field, name in NORMS.items()]
    return found


def _value_of(field: str) -> Callable[[Choices], str]:
    return lambda choices: str(getattr(choices.config, field)).lower()


def _map_in_words(choices: Choices) -> str:
    ids = choices.d2t + torch.arange(len(choices.d2t))
    order = "" if bool((ids[1:] > ids[:-1]).all()) else ", not in order"
    digest = hashlib.sha256(choices.d2t.numpy().tobytes()).hexdigest()[:12]
    return f"the map {digest} of {len(ids)} tokens{order}"
