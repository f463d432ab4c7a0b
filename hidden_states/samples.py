"""Samples: token ids with the mask of the tokens to learn, ready to be captured.

Ids are made here once and sent as ids. A sample is named by its content, so the same sample has the same id, the same
place in the plan and the same side of the held-out split in every run.
"""

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from eyas_capture import contract
from hidden_states.conversations import BadRow, Conversation
from hidden_states.errors import DataError
from hidden_states.mask import learned_spans, mask_of
from hidden_states.messages import RowError
from hidden_states.render import ChatTemplate, Messages
from hidden_states.report import Report

_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "source": pa.string(),
        "digest": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
    }
)
NOTHING_TO_LEARN = "nothing to learn"
DUPLICATE = "duplicate"
TOO_LONG = "too long"


class Sample:
    """One sample of S tokens.

    Attributes:
        id: first 16 hex digits of the digest.
        input_ids: S token ids.
        loss_mask: S zeros and ones; 1 = a token the target wrote, to be learned.
        source: `file:line` it comes from.
        digest: hex sha256 of the tokens' digest and the mask's.

    Kept packed (5 bytes a token); the lists are made when asked for, so 600,000 samples fit into memory.
    """

    __slots__ = ("_ids", "_mask", "digest", "id", "source")

    def __init__(self, id: str, input_ids: Sequence[int], loss_mask: Sequence[int], source: str, digest: str) -> None:
        if len(input_ids) != len(loss_mask):
            raise ValueError(f"{source}: {len(input_ids)} tokens with a mask of {len(loss_mask)}")
        self._ids, self._mask = array("i", input_ids), bytes(loss_mask)
        self.id, self.source, self.digest = id, source, digest

    @classmethod
    def of(cls, input_ids: Sequence[int], loss_mask: Sequence[int], source: str) -> "Sample":
        """The sample of these tokens and this mask; id and digest follow from them."""
        digest = sample_digest(input_ids, loss_mask)
        return cls(digest[:16], input_ids, loss_mask, source, digest)

    @property
    def input_ids(self) -> list[int]:
        return self._ids.tolist()

    @property
    def loss_mask(self) -> list[int]:
        return list(self._mask)

    @property
    def learned(self) -> int:
        """Number of tokens to learn."""
        return self._mask.count(1)

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and (self.id, self.digest, self.source, self._ids, self._mask) == (
            other.id, other.digest, other.source, other._ids, other._mask
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Sample({self.id}, {len(self)} tokens, {self.learned} to learn, from {self.source})"


@dataclass(frozen=True)
class SampleOptions:
    """How conversations become samples.

    Attributes:
        learn: learn from every reply, or from the last one of a conversation only.
        learn_reasoning: learn the reasoning part of a reply too.
        max_tokens: longest sample in tokens; None = no limit.
        when_too_long: cut tokens and mask together, skip the row (reported), or end the run.
        vocab_size: ids from here on are refused (the embedding's rows); None = the tokenizer's size.
        strict: the first unusable row ends the run.
        max_bad_share: more unusable rows than this end the run. Duplicates, rows too long and rows with nothing to
            learn are left out and reported, but they are not unusable.
        template_kwargs: further variables for the chat template.
    """

    learn: Literal["all", "last"] = "all"
    learn_reasoning: bool = True
    max_tokens: int | None = None
    when_too_long: Literal["cut", "skip", "refuse"] = "cut"
    vocab_size: int | None = None
    strict: bool = False
    max_bad_share: float = 0.05
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """Samples in the order of their digests, and what became of every row."""

    samples: list[Sample]
    report: Report


def prepare(
    conversations: Iterable[Conversation | BadRow],
    tokenizer: PreTrainedTokenizerBase,
    options: SampleOptions | None = None,
) -> Prepared:
    """Render, tokenise and mask conversations.

    Text of a user that spells out special tokens (`<|im_start|>`) is tokenised as the server would do it, into the real
    ones; it is never learned, and the report counts such rows.

    Raises:
        DataError: the tokenizer cannot be used, a row is too long with `when_too_long="refuse"`, any row is unusable
            with `strict`, or more rows are unusable than `max_bad_share` allows.
    """
    options = options or SampleOptions()
    chat = ChatTemplate(tokenizer, dict(options.template_kwargs))
    vocab_size = options.vocab_size or len(tokenizer)
    report = Report()
    if "strftime_now" in chat.source and "date_string" not in chat.kwargs:
        report.note("the chat template reads today's date", "template", "samples of another day differ")
    seen: dict[str, Sample] = {}
    checked = False
    for row in conversations:
        report.rows += 1
        if isinstance(row, BadRow):
            drop_row(report, row.kind, row.where, row.reason, options)
            continue
        try:
            if not checked:
                _check_tokenisation(chat, row)
                checked = True
            sample = _sample(chat, row, options, vocab_size, report)
        except RowError as error:
            drop_row(report, error.kind, row.source, error.reason, options)
            continue
        if sample is None:
            continue
        if sample.digest in seen:
            report.drop(DUPLICATE, row.source, f"same tokens and mask as {seen[sample.digest].source}")
            continue
        seen[sample.digest] = sample
        report.count(len(sample), sample.learned)
    report.check(options.max_bad_share)
    return Prepared([seen[digest] for digest in sorted(seen)], report)


def _sample(
    chat: ChatTemplate, row: Conversation, options: SampleOptions, vocab_size: int, report: Report
) -> Sample | None:
    """The sample of a row; None when it was left out (and counted)."""
    replies = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    if not replies:
        report.drop(NOTHING_TO_LEARN, row.source, "no reply in it")
        return None
    messages = row.messages[: replies[-1] + 1]  # no reply follows what comes after the last one
    rendering = learned_spans(chat, messages, row.tools, options.learn, options.learn_reasoning)
    ids, mask = mask_of(chat, rendering)
    check_ids(ids, vocab_size)
    bos = chat.tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise RowError("BOS twice", "the rendering starts with two BOS tokens")
    if options.max_tokens is not None and len(ids) > options.max_tokens:
        found = f"{len(ids)} tokens, at most {options.max_tokens} allowed"
        if options.when_too_long == "refuse":
            raise DataError(row.source, found, None, "Shorten the row, raise data.max_tokens, or choose cut or skip.")
        if options.when_too_long == "skip":
            report.drop(TOO_LONG, row.source, found)
            return None
        report.note("cut to the longest length", row.source, found)
        ids, mask = ids[: options.max_tokens], mask[: options.max_tokens]
    if not any(mask):
        cut = " after cutting" if rendering.spans else ""
        report.drop(NOTHING_TO_LEARN, row.source, f"no token to learn{cut}" if cut else "every reply is empty")
        return None
    note_markers(chat, row.messages, row.source, report)
    return Sample.of(ids, mask, row.source)


def note_markers(chat: ChatTemplate, messages: Messages, source: str, report: Report) -> None:
    """Note a conversation in which a text spells out a special token."""
    for message in messages:
        token = chat.control_token_in(message["content"])
        if token:
            report.note(
                "special token spelled out in a text",
                source,
                f"{token!r} in a text of the {message['role']} becomes the real token, as on the server",
            )
            return


def _check_tokenisation(chat: ChatTemplate, row: Conversation) -> None:
    chat.text(row.messages, row.tools)  # a row the template refuses says nothing about the tokenizer
    chat.check_tokenisation(row.messages, row.tools)


def drop_row(report: Report, kind: str, where: str, reason: str, options: SampleOptions) -> None:
    """Count an unusable row.

    Raises:
        DataError: the options are strict.
    """
    if options.strict:
        raise DataError(where, reason, None, "Correct the row, or set data.strict to false to report it and go on.")
    report.drop(kind, where, reason, unusable=True)


def sample_from_reply(prompt_ids: Sequence[int], reply_ids: Sequence[int], source: str) -> Sample:
    """On-policy sample: the prompt is not learned, every token of the target's own reply is.

    Raises:
        DataError: the reply is empty.
    """
    if not reply_ids:
        raise DataError(source, "the target answered with no token", "at least one")
    return Sample.of([*prompt_ids, *reply_ids], [0] * len(prompt_ids) + [1] * len(reply_ids), source)


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids the target has no embedding for.

    Raises:
        RowError: an id is negative or at least `vocab_size`.
    """
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RowError(
                "token id outside the vocabulary",
                f"token {position} has the id {token}; the target's vocabulary has {vocab_size} entries",
            )


def sample_digest(input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
    """Hex sha256 of `<tokens_sha256>:<sha256 of the mask's bytes>`."""
    mask = hashlib.sha256(bytes(loss_mask)).hexdigest()
    return hashlib.sha256(f"{contract.tokens_sha256(list(input_ids))}:{mask}".encode()).hexdigest()


def is_held_out(digest: str, share: float) -> bool:
    """Whether content of this digest belongs to the held-out split: a function of nothing but the two."""
    draw = hashlib.sha256(f"held-out:{digest}".encode()).digest()  # independent of the order by digest
    return int.from_bytes(draw[:8], "big") < share * 2**64


def segments(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The sample as text, in runs of learned and not learned tokens (to be coloured)."""
    runs: list[tuple[list[int], bool]] = []
    for token, learned in zip(sample.input_ids, sample.loss_mask, strict=True):
        if not runs or runs[-1][1] != bool(learned):
            runs.append(([], bool(learned)))
        runs[-1][0].append(token)
    return [(str(tokenizer.decode(ids, skip_special_tokens=False)), learned) for ids, learned in runs]


def save_samples(samples: Iterable[Sample], path: Path | str) -> None:
    """Write samples as Parquet; the file appears whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with pq.ParquetWriter(temporary, _SCHEMA, compression="zstd") as writer:
        for group in _groups(samples, 1000):
            columns = {name: [getattr(sample, name) for sample in group] for name in _SCHEMA.names}
            writer.write_table(pa.table(columns, schema=_SCHEMA))
    os.replace(temporary, path)


def load_samples(path: Path | str) -> list[Sample]:
    """Read samples back, each checked against its digest.

    Raises:
        DataError: the file is not a samples file, or a sample is not what its digest says.
    """
    samples = []
    try:
        with pq.ParquetFile(path) as file:
            if file.schema_arrow.names != _SCHEMA.names:
                raise DataError(str(path), f"columns {file.schema_arrow.names}", f"columns {_SCHEMA.names}")
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    sample = Sample.of(row["input_ids"], row["loss_mask"], row["source"])
                    if (sample.digest, sample.id) != (row["digest"], row["id"]):
                        raise DataError(
                            str(path), f"sample {row['id']} is not what its digest says", None, "Prepare it again."
                        )
                    samples.append(sample)
    except (pa.ArrowException, OSError) as error:
        raise DataError(str(path), f"not a readable samples file ({error})") from error
    return samples


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
