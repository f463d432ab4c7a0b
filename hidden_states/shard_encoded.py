"""Packing a shard whose states are kept otherwise than captured: rows are encoded as they pass, one sample's part at a
time, and written to their places. Checksums of what is written are known only then; so the header, which carries them,
is written last, and the file is read once more for its digest.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.captured_rows import Captured, proved_rows, raw_bytes, token_ids
from hidden_states.encoding import BFLOAT16, CAPTURED, FLOAT8, INT8, TAUGHT, TOP_K, quantise, taught_rows
from hidden_states.errors import DatasetError
from hidden_states.pieces import write_at
from hidden_states.samples import Sample
from hidden_states.shard_layout import SampleEntry, ShardInfo, ShardLayout
from hidden_states.store import digest_file
from hidden_states.top_k import top_logits

_NO_CHECKSUM = "sha256:" + "0" * 64  # keeps the header's length


def write_encoded(
    draft: ShardInfo,
    samples: Sequence[Sample],
    dumps: Mapping[str, Captured],
    layout: ShardLayout,
    path: Path,
    head_VH: Tensor | None,
) -> ShardInfo:
    """Writes the shard; `draft` says everything of it but its checksums, its layout and its digest.

    Raises:
        DumpError: a dump's rows are not what the capture said.
        DatasetError: top-k logits without a head.
    """
    if layout.encoding.final == TOP_K and head_VH is None:
        raise DatasetError(f"shard of batch {draft.batch_id}", "no head to make top-k logits with", "the target's head")
    taught = [taught_rows(torch.tensor(sample.loss_mask)) for sample in samples]
    if layout.encoding.final_rows == TAUGHT:
        layout = replace(layout, taught=int(sum(int(rows.sum()) for rows in taught)))
    sums = dict.fromkeys(layout.proved(), _NO_CHECKSUM)
    entries, final_row = [], 0
    for entry, rows in zip(draft.samples, taught, strict=True):
        if layout.taught is not None:
            entry = replace(entry, final_row=final_row, final_rows=int(rows.sum()))
            final_row += int(rows.sum())
        entries.append(replace(entry, checksums=dict(sums)))
    draft = replace(draft, layout=layout, samples=tuple(entries))
    layout = replace(layout, data_start=len(layout.header(draft.metadata())))
    with open(path, "wb") as file:
        file.truncate(layout.file_bytes)
        lengths = torch.tensor([0, *(len(sample.input_ids) for sample in samples)], dtype=torch.int64)
        write_at(file.fileno(), raw_bytes(lengths.cumsum(0)), layout.spans()["offsets"][0])
        for number, (sample, entry) in enumerate(zip(samples, draft.samples, strict=True)):
            writer = _SampleWriter(file, layout, entry, head_VH)
            entries[number] = replace(entry, checksums=writer.write(sample, dumps[sample.id], draft.batch_id))
        draft = replace(draft, layout=layout, samples=tuple(entries))
        file.seek(0)
        file.write(layout.header(draft.metadata()))
    return replace(draft, digest=digest_file(path))


class _SampleWriter:
    """Writes one sample's rows to their places and sums up what it writes."""

    def __init__(self, file: BinaryIO, layout: ShardLayout, entry: SampleEntry, head_VH: Tensor | None) -> None:
        self._file, self._layout, self._head_VH = file, layout, head_VH
        self._at = {name: start for name, (start, _) in layout.sample_spans(*entry.span).items()}
        self._sums = {name: hashlib.sha256() for name in layout.tensors()}

    def write(self, sample: Sample, dump: Captured, batch_id: str) -> dict[str, str]:
        """Returns the checksums of `ShardLayout.proved`."""
        layout = self._layout
        self._put(contract.INPUT_IDS, token_ids(sample, dump, batch_id))
        mask = torch.tensor(sample.loss_mask, dtype=torch.uint8)
        self._put("loss_mask", mask)
        blocks = [contract.block_tensor(block) for block in layout.after_block]
        for rows in proved_rows(sample, dump, blocks, layout, batch_id):
            self._states("aux", torch.stack(rows, dim=1), layout.encoding.aux)
        keep, at = taught_rows(mask), 0
        for (final,) in proved_rows(sample, dump, [contract.FINAL], layout, batch_id):
            kept = final if layout.taught is None else final[keep[at : at + len(final)]]
            at += len(final)
            self._states("final", kept, layout.encoding.final)
        said = {} if layout.encoding.aux != CAPTURED else {name: dump.record.checksums[name] for name in blocks}
        written = {name: f"sha256:{sha.hexdigest()}" for name, sha in self._sums.items()}
        return {name: said.get(name) or written[name] for name in layout.proved()}

    def _states(self, name: str, rows: Tensor, kind: str) -> None:
        if kind in (FLOAT8, INT8):
            codes, scale = quantise(rows, kind)
            self._put(name, codes)
            self._put(f"{name}_scale", scale)
        elif kind == TOP_K:
            assert self._head_VH is not None
            top = top_logits(rows, self._head_VH, self._layout.encoding.top_k)
            self._put("final_ids", top.ids)
            self._put("final_logits", top.logits)
        else:
            self._put(name, rows.to(torch.bfloat16) if kind == BFLOAT16 else rows)

    def _put(self, name: str, rows: Tensor) -> None:
        data = raw_bytes(rows)
        self._sums[name].update(data)
        write_at(self._file.fileno(), data, self._at[name])
        self._at[name] += data.nbytes
