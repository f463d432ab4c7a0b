"""Every way a dump can be wrong that shows without running the model, each with a check of its own name.

    of the writer   writer-state, target, layers, final-norm, dtype
    of the record   sample, complete, prefix-cache, spans, token-count, token-digest
    of the file     file-intact, tensor-set, shape, tensor-dtype, checksum
    of the values   token-ids, finite, padding, precision, distinct

(`record-file`, `writer-file`, `contract` and `misplaced` come from reading the two JSON files.) Whether the values
are those of the right block, norm and position is asked by `teacher` and `gate`: every shape can be right and the data
wrong.
"""

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas_capture import contract
from hidden_states.dump import Dump
from hidden_states.errors import RecipeError
from hidden_states.plan import ITEM_BYTES
from hidden_states.record import BadDump, Writer
from hidden_states.samples import Sample, sample_digest

_AGAIN = "The sample is captured again."
_RESTART = "Restart the server as the recipe says."
# Bits at the end of a number that are zero by chance once in 2^bits, and always after a cast from a narrower type.
_CASTS = {torch.float32: (torch.int32, 13, "float16"), torch.bfloat16: (torch.int16, 4, "float8_e4m3"),
          torch.float16: (torch.int16, 3, "bfloat16")}  # fmt: skip
_PRECISION_VALUES = 4096


@dataclass(frozen=True)
class Expectation:
    """What every dump of a run must be.

    Attributes:
        after_block: captured blocks (0-based outputs), ascending.
        dtype: of the states: "float32", "bfloat16" or "float16".
        final_norm: "post" = the final state is taken after the final norm.
        blocks: number of decoder blocks; None = not checked.
        config_sha256: of the target's config.json; None = not checked.
    """

    after_block: tuple[int, ...]
    hidden_size: int
    dtype: str
    final_norm: str = "post"
    blocks: int | None = None
    config_sha256: str | None = None

    @classmethod
    def of_target(cls, target_folder: Path | str, after_block: tuple[int, ...], dtype: str = "auto") -> "Expectation":
        """What a server of this model must write; `auto` = the dtype in its config.

        Raises:
            RecipeError: the folder's config.json cannot be read, a block is not one of the model's, or the dtype is not
                one that states are captured in.
        """
        path = Path(target_folder) / "config.json"
        try:
            raw = path.read_bytes()
            outer: dict[str, Any] = json.loads(raw)
            config = outer.get("text_config") or outer  # multimodal models keep the language model's inside
            blocks, hidden_size = int(config["num_hidden_layers"]), int(config["hidden_size"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecipeError(str(path), f"cannot be used ({error!r})", "the target's configuration") from error
        if dtype == "auto":
            keys = [c.get(key) for c in (config, outer) for key in ("dtype", "torch_dtype")]
            dtype = str(next((value for value in keys if value), None))
        if dtype not in ITEM_BYTES:
            raise RecipeError("target.dtype", dtype, f"one of {', '.join(ITEM_BYTES)}", "Set it in the recipe.")
        if not after_block or any(not 0 <= block < blocks for block in after_block):
            found = f"blocks {list(after_block)} of a model with {blocks}"
            raise RecipeError("capture.after_block", found, f"numbers from 0 to {blocks - 1}")
        digest = hashlib.sha256(raw).hexdigest()
        return cls(tuple(after_block), hidden_size, dtype, "post", blocks, digest)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of a dump's tensors, in order."""
        return (contract.INPUT_IDS, *map(contract.block_tensor, self.after_block), contract.FINAL)


def check_writer(writer: Writer, expectation: Expectation) -> None:
    """Check what a writer says of itself; once at the start saves capturing a batch of the wrong model.

    Raises:
        BadDump: `writer-state`, `target`, `layers`, `final-norm` or `dtype`.
    """
    where = f"writer {writer.writer_id}"
    if writer.state == contract.REFUSED:
        raise BadDump("writer-state", where, "; ".join(writer.refused) or "it captures nothing", None, _RESTART)

    def same(check: str, what: str, found: object, expected: object) -> None:
        if expected is not None and found != expected:
            raise BadDump(check, where, f"{what} {found}", f"{expected}", _RESTART)

    same("target", f"serves {writer.model_path}, whose config.json has the sha256", writer.config_sha256,
         expectation.config_sha256)  # fmt: skip
    same("target", f"serves {writer.model_path} with a hidden size of", writer.hidden_size, expectation.hidden_size)
    same("target", f"serves {writer.model_path}, whose number of blocks is", writer.blocks, expectation.blocks)
    same("layers", "captures the outputs of blocks", list(writer.after_block), list(expectation.after_block))
    points = [block + 1 for block in writer.after_block]
    same("layers", "captures at SGLang's points", list(writer.capture_points), points)
    same("final-norm", "takes the final state relative to the final norm:", writer.final_norm, expectation.final_norm)
    same("dtype", "computes in", writer.dtype, expectation.dtype)


def check_dump(dump: Dump, sample: Sample, expectation: Expectation) -> None:
    """Check a dump against its sample, from what it says to every value in it.

    Raises:
        BadDump: naming the first check that failed.
    """
    where = str(dump.ref)
    check_writer(dump.writer, expectation)
    _check_record(dump, sample, where)
    _check_file(dump, len(sample), expectation, where)
    dump.verify()
    _check_values(dump, sample, expectation, where)


def _check_record(dump: Dump, sample: Sample, where: str) -> None:
    record, size = dump.record, len(sample)
    if sample_digest(sample.input_ids, sample.loss_mask) != sample.digest:
        raise BadDump(
            "sample", where, f"sample {sample.id} is no longer what its digest says", None, "Prepare it again."
        )
    if record.prefix_cached:
        raise BadDump(
            "prefix-cache",
            where,
            f"{record.rows} tokens captured, {size} sent; {record.prefix_cached} were served from the prefix cache",
            None,
            "Restart the server with the radix cache off or let extraction send a unique extra_key.",
        )
    if not record.complete:
        raise BadDump("complete", where, f"it is incomplete: {record.incomplete_reason}", None, _AGAIN)
    if record.tokens != size:
        raise BadDump("token-count", where, f"{record.tokens} tokens captured", f"{size}, as sent", _AGAIN)
    end = 0
    for start, stop in record.spans:
        if start != end or stop <= start:
            raise BadDump("spans", where, f"spans {list(record.spans)}", f"rows 0 to {size} without a gap or overlap")
        end = stop
    if end != size:
        raise BadDump(
            "spans", where, f"spans {list(record.spans)}", f"rows 0 to {size} without a gap or overlap", _AGAIN
        )
    digest = contract.tokens_sha256(sample.input_ids)
    if record.tokens_sha256 != digest:
        raise BadDump("token-digest", where, f"tokens {record.tokens_sha256[:12]}", f"{digest[:12]}, as sent", _AGAIN)


def _check_file(dump: Dump, size: int, expectation: Expectation, where: str) -> None:
    states = dump.states
    if tuple(states.tensors) != expectation.tensors:
        found = ", ".join(states.tensors)
        raise BadDump("tensor-set", where, f"tensors {found}", f"{', '.join(expectation.tensors)}, in this order")
    for name in expectation.tensors:
        of_states = name != contract.INPUT_IDS
        shape = (size, expectation.hidden_size) if of_states else (size,)
        if states.shape(name) != shape:
            raise BadDump("shape", where, f"{name} is {list(states.shape(name))}", f"{list(shape)}", _AGAIN)
        dtype = getattr(torch, expectation.dtype) if of_states else torch.int64
        if states.dtype(name) != dtype:
            raise BadDump("tensor-dtype", where, f"{name} is {states.dtype(name)}", str(dtype), _RESTART)


def _check_values(dump: Dump, sample: Sample, expectation: Expectation, where: str) -> None:
    ids = dump.tensor(contract.INPUT_IDS)
    sent = torch.tensor(sample.input_ids)
    if not torch.equal(ids, sent):
        at = int((ids != sent).nonzero()[0])
        raise BadDump("token-ids", where, f"token {at} is {int(ids[at])}", f"{int(sent[at])}, as sent", _AGAIN)
    names = expectation.tensors[1:]
    for name in names:
        rows = dump.tensor(name)
        finite = torch.isfinite(rows).all(dim=-1)
        if not finite.all():
            at = int((~finite).nonzero()[0])
            count = int((~finite).sum())
            raise BadDump("finite", where, f"{name} has NaN or infinite values in {count} rows, first in row {at}")
        padded = _first_padded_row(rows, ids)
        if padded is not None:
            raise BadDump(
                "padding", where, f"row {padded} of {name} holds no state of its own (zeros or a copy)", None, _AGAIN
            )
        _check_precision(rows, name, where)
    for one, other in itertools.combinations(names, 2):
        if dump.raw(one) == dump.raw(other):
            raise BadDump("distinct", where, f"{one} and {other} are the same to the bit", "two different states")


def _first_padded_row(rows: torch.Tensor, ids: torch.Tensor) -> int | None:
    """The first row that is all zeros, or a copy of the row before though the token is another one. (Runs of one token
    may well have equal states.)"""
    zero = (rows == 0).all(dim=-1)
    copied = torch.zeros_like(zero)
    copied[1:] = (rows[1:] == rows[:-1]).all(dim=-1) & (ids[1:] != ids[:-1])
    bad = (zero | copied).nonzero()
    return int(bad[0]) if len(bad) else None


def _check_precision(rows: torch.Tensor, name: str, where: str) -> None:
    """Refuse values that went through a narrower dtype: their last bits are all zero, which no computation leaves."""
    integer, bits, narrower = _CASTS[rows.dtype]
    values = rows.reshape(-1)[:_PRECISION_VALUES].view(integer)
    if len(values) >= 64 and not (values & ((1 << bits) - 1)).any():
        raise BadDump(
            "precision",
            where,
            f"{name} is {str(rows.dtype).removeprefix('torch.')}, but its values are those of {narrower} or less",
            "values as the model computed them",
            "Something cast the states on the way; the server's dtype must be the recipe's.",
        )
