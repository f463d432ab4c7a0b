"""Another trainer's folder as a dataset of ours: same values, with what the folder leaves unsaid found or told."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hidden_states.convention import Convention, found_by
from hidden_states.dataset import Dataset
from hidden_states.dataset_writer import DatasetWriter
from hidden_states.errors import DataError, GateError, RecipeError
from hidden_states.fingerprint import Fingerprint, target_fields
from hidden_states.formats import ForeignSample, Format
from hidden_states.gate import NormCheck, Reference
from hidden_states.manifest import Sidecar
from hidden_states.plan import Batch, plan_batches
from hidden_states.samples import Sample
from hidden_states.shard import pack_shard
from hidden_states.states_in_hand import StatesInHand
from hidden_states.store import Store
from hidden_states.target_config import is_size, read_language_config
from hidden_states.vocab import build_vocab_map, count_tokens

_NORM_SLACK = 0.05


@dataclass(frozen=True)
class ImportOptions:
    """What is told, where the files do not say it.

    Attributes:
        after_block: captured blocks; None = to be found.
        final_norm: "post" or "pre"; None = to be found, else what the format's own writer stores.
        learn_all: files without a loss mask: learn every token.
        reference: may the whole target be loaded, to find or confirm the convention.
    """

    after_block: tuple[int, ...] | None = None
    final_norm: str | None = None
    learn_all: bool = False
    reference: bool = True
    batch_tokens: int = 65536
    held_out_share: float = 0.05
    draft_vocab_size: int = 32000

    def __post_init__(self) -> None:
        blocks = self.after_block
        for name, value, right, expected in (
            ("--after-block", blocks, blocks is None or (blocks == tuple(sorted(set(blocks))) and blocks[:1] >= (0,)),
             "ascending block numbers, from 0"),
            ("--batch-tokens", self.batch_tokens, self.batch_tokens > 0, "1 at least"),
            ("--held-out-share", self.held_out_share, 0 <= self.held_out_share < 1, "0 or more and less than 1"),
            ("--draft-vocab-size", self.draft_vocab_size, self.draft_vocab_size > 0, "1 at least"),
        ):  # fmt: skip
            if not right:
                raise RecipeError(name, f"{value}", expected, "Give another.")


@dataclass
class Imported:
    dataset: Dataset
    convention: Convention
    duplicates: list[str] = field(default_factory=list)


def import_folder(
    format: Format, folder: Path, target: Path, store: Store, name: str, options: ImportOptions,
    say: Callable[[str], None] = lambda _: None,
) -> Imported:  # fmt: skip
    """Writes the dataset; done twice it is the same one, killed half-way it goes on.

    Raises:
        DataError: a file is not of this format, or what the files leave unsaid is neither found nor told.
    """
    if not folder.is_dir():
        raise DataError(str(folder), "there is no such folder", f"a folder of {format.name}'s", "Correct the path.")
    config, files = read_language_config(target), format.files(folder)
    if not files:
        raise format.refuse(
            folder, "no file of this format in it", (type(format).__doc__ or format.name).splitlines()[0]
        )
    first = format.read(files[0], folder)
    _refuse_other_target(format, first, first, config)
    convention = _convention(format, first, target, config, options)
    say(f"{len(files)} files; {convention.in_words()}")
    samples: dict[str, Sample] = {}
    duplicates, places = [], {}
    for path in files:
        read = format.read(path, folder)
        _refuse_other_target(format, read, first, config)
        sample = _sample(format, read, options)
        if sample.id in samples:
            duplicates.append(sample.source)
            continue
        samples[sample.id], places[sample.id] = sample, path
    dtype = str(first.final.dtype).removeprefix("torch.")
    fingerprint = Fingerprint(
        {
            **target_fields(target), "after_block": list(convention.after_block), "final_norm": convention.final_norm,
            "dtype": dtype, "mask_rule": f"as in {format.name}'s files", "imported_from": format.name,
        }
    )  # fmt: skip
    writer = DatasetWriter(store, name, fingerprint)
    batches = plan_batches(samples.values(), options.batch_tokens)
    done = writer.done()
    with tempfile.TemporaryDirectory() as local:
        for batch in batches:
            states = _states(format, folder, batch, places, convention)
            sidecar = done.get(batch.id) or writer.commit_batch(pack_shard(batch, states, Path(local) / "shard"))
            _refuse_other_states(writer.uri, sidecar, states)
    vocabulary = config.get("vocab_size") or 1 + max(max(sample.input_ids) for sample in samples.values())
    counts = count_tokens(samples.values(), vocabulary)
    vocab = build_vocab_map(counts, min(options.draft_vocab_size, vocabulary))
    writer.commit_manifest(
        [batch.id for batch in batches], vocab_map=vocab.to_bytes(), coverage=vocab.coverage,
        held_out_share=options.held_out_share,
        extra={"imported": {"format": format.name, "convention": convention.in_words(), "files": len(files)}},
    )  # fmt: skip
    return Imported(Dataset.open(store, name), convention, duplicates)


def _states(
    format: Format, folder: Path, batch: Batch, places: Mapping[str, Path], convention: Convention
) -> dict[str, StatesInHand]:
    states = {}
    for sample in batch.samples:
        read = format.read(places[sample.id], folder)
        for what, values in (("aux", read.aux), ("final", read.final)):
            if not bool(torch.isfinite(values).all()):
                raise DataError(f"{format.name}, {read.name}", f"NaN or infinite values in its {what} states",
                                "finite ones", "Leave the file out, or capture it again.")  # fmt: skip
        states[sample.id] = StatesInHand(
            sample.input_ids, read.aux, read.final, convention.after_block, convention.final_norm, format.name
        )
    return states


def _refuse_other_states(dataset: str, stored: Sidecar, states: Mapping[str, StatesInHand]) -> None:
    """A batch's name says its tokens and masks alone: what lies there already may be of another capture."""
    for entry in stored.info.samples:
        found = states[entry.id].record.checksums
        differing = [name for name, checksum in entry.checksums.items() if found.get(name) != checksum]
        if differing:
            raise DataError(
                dataset, f"holds sample {entry.id} ({entry.source}) with other values in {', '.join(differing)}",
                "a new dataset, or one of these very files", "Import them under another name.",
            )  # fmt: skip


def _sample(format: Format, read: ForeignSample, options: ImportOptions) -> Sample:
    mask = read.loss_mask
    if mask is None:
        if not options.learn_all:
            raise DataError(
                f"{format.name}, {read.name}", "it has no loss mask", "which tokens are to learn",
                "Say so with --learn-all if every token is; else capture again with a mask.",
            )  # fmt: skip
        mask = torch.ones_like(read.input_ids)
    mask = mask.double()
    if bool((mask != mask.bool()).any()):
        raise DataError(f"{format.name}, {read.name}", "its loss mask has weights in it", "zeros and ones")
    return Sample.of(read.input_ids.tolist(), mask.to(torch.uint8).tolist(), f"{format.name}:{read.name}")


def _convention(
    format: Format, first: ForeignSample, target: Path, config: Mapping[str, Any], options: ImportOptions
) -> Convention:
    told, blocks = options.after_block, config.get("num_hidden_layers")
    if told is not None and isinstance(blocks, int) and told[-1] >= blocks:
        raise RecipeError("--after-block", f"{told[-1]}", f"0 to {blocks - 1}: the target has {blocks} blocks",
                          "Tell the numbers of blocks, from 0, whatever the trainer's own numbering is.")  # fmt: skip
    if told is not None and len(told) != first.aux.shape[1]:
        raise DataError(first.name, f"{first.aux.shape[1]} aux states a token", f"{len(told)}, one a block told")
    if options.reference:
        found = found_by(_reference(target), first)
        for what, said, true in (
            ("blocks", told, found.after_block), ("norm", options.final_norm, found.final_norm),
        ):  # fmt: skip
            if said is not None and said != true:
                raise DataError(first.name, f"{what} {true}, by a forward pass of the target", f"{said}, as told",
                                "Leave it to be found, or give the right target.")  # fmt: skip
        return found
    if told is None:
        raise DataError(
            f"{format.name}, {first.name}", "its files do not say which blocks were captured", "--after-block",
            "Tell it (block outputs, from 0; beware of each trainer's own numbering), or let the target be asked.",
        )  # fmt: skip
    norm = options.final_norm or first.final_norm or format.final_norm
    how = "blocks as told, not checked; norm " + (
        "as told" if options.final_norm else "as the file says" if first.final_norm else f"as {format.name} writes it"
    )
    return Convention(told, norm, f"{how}{_norm_checked(first.final, norm, target)}")


def _norm_checked(final: Tensor, norm: str, target: Path) -> str:
    """Confirms the norm by the target's norm weights alone, where they tell.

    Raises:
        DataError: the state is of the other kind.
    """
    check = NormCheck.load(target)
    if check is None:
        return ", not checked"
    normed = _is_one(check.root_mean_square(final))
    if normed and norm == "pre" and _is_one(final.float().square().mean(-1).sqrt()):
        return ", not checked (rows of length 1 look alike on both sides of the norm)"
    if normed != (norm == "post"):
        raise DataError("final state", f"{'post' if normed else 'pre'}-norm, by the weights of the target's norm",
                        f"{norm}-norm", "Tell the right norm, or give the right target.")  # fmt: skip
    return ", confirmed by the norm's weights"


def _is_one(values_R: Tensor) -> bool:
    return bool(((values_R - 1).abs() <= _NORM_SLACK).float().mean() > 0.9)


def _refuse_other_target(format: Format, read: ForeignSample, first: ForeignSample, config: dict[str, Any]) -> None:
    """What shows at a glance that a file's states are not this target's, or not like those of the first file."""
    ids, where = read.input_ids, f"{format.name}, {read.name}"
    if not len(ids):
        raise DataError(where, "no tokens", "one at least", "Leave the file out.")
    do = "Give the target these states were captured from."
    width, vocabulary = config.get("hidden_size"), config.get("vocab_size")
    for name, value in (("hidden_size", width), ("vocab_size", vocabulary)):
        if value is not None and not is_size(value):
            raise DataError("the target's config.json", f"`{name}` is {value!r}", "a whole number above 0", do)
    if width is not None and read.final.shape[1] != width:
        raise DataError(where, f"{read.final.shape[1]} values a state", f"{width}, the target's hidden size", do)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        expected = "ids from 0" + (f" to {vocabulary - 1}, the target's vocabulary" if vocabulary else "")
        raise DataError(where, f"tokens {low} to {high}", expected, do)
    if read.final.dtype != first.final.dtype:
        raise DataError(where, f"states of {read.final.dtype}", f"{first.final.dtype}, as in {first.name}",
                        "Import the files of one capture.")  # fmt: skip
    if read.aux.shape[1:] != first.aux.shape[1:]:
        raise DataError(where, f"{list(read.aux.shape[1:])} aux values a token", f"{list(first.aux.shape[1:])}, as in "
                        f"{first.name}", "Import the files of one capture.")  # fmt: skip


def _reference(target: Path) -> Reference:
    try:
        return Reference.load(target)
    except (RecipeError, DataError, GateError) as error:
        raise DataError(
            error.where, error.found, error.expected,
            "Give the whole target, or tell what it would be asked: --no-reference --after-block K ...",
        ) from error  # fmt: skip
