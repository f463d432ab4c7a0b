"""The shard: the samples of one batch in one safetensors file, concatenated along tokens; see shard_layout.py.

The header's metadata carries what the capture said of every sample: a shard explains and proves itself without its
sidecar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.captured_rows import Captured, proved_rows, raw_bytes, token_ids
from hidden_states.encoding import PLAIN, Encoding
from hidden_states.errors import DumpError
from hidden_states.pieces import pieces
from hidden_states.plan import Batch
from hidden_states.samples import Sample
from hidden_states.shard_encoded import write_encoded
from hidden_states.shard_layout import DTYPES, SampleEntry, ShardInfo, ShardLayout
from hidden_states.store import Digester, FileDigest


def pack_shard(
    batch: Batch,
    dumps: Mapping[str, Captured],
    path: Path,
    *,
    left_out: Mapping[str, str] | None = None,
    encoding: Encoding = PLAIN,
    head_VH: Tensor | None = None,
) -> ShardInfo:
    """Writes the shard of `batch` to `path`, row by row out of the dumps' mapped files.

    Every captured tensor's checksum is computed over the rows as they pass and compared with the capture's.

    Args:
        dumps: sample id -> its dump.
        left_out: sample id -> reason, for samples given up on; every other sample must have a dump.
        encoding: how the states are kept.
        head_VH: the target's head, where top-k logits are kept.

    Raises:
        DumpError: a sample has neither dump nor reason, or a dump's rows are not what the capture said.
    """
    left_out = dict(left_out or {})
    samples = [sample for sample in batch.samples if sample.id not in left_out]
    missing = [sample.id for sample in samples if sample.id not in dumps]
    if missing or not samples:
        found = f"{len(missing)} samples without a dump, {', '.join(missing[:3])}" if missing else "no usable sample"
        raise DumpError(f"batch {batch.id}", found, None, "Capture them again, or leave them out with a reason.")
    entries, row = [], 0
    for sample in samples:
        checksums = {k: v for k, v in dumps[sample.id].record.checksums.items() if k != contract.INPUT_IDS}
        tokens, learned = len(sample.input_ids), sum(sample.loss_mask)
        entries.append(SampleEntry(sample.id, sample.digest, sample.source, row, tokens, learned, checksums))
        row += tokens
    probe = dumps[samples[0].id].tensor(contract.FINAL)
    dtype = str(probe.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise DumpError(
            f"batch {batch.id}", f"states of dtype {dtype}", " or ".join(DTYPES), "Serve the target in one."
        )
    if len({(dumps[sample.id].writer.after_block, dumps[sample.id].writer.final_norm) for sample in samples}) > 1:
        raise DumpError(f"batch {batch.id}", "dumps of writers that capture different states", None,
                        "Capture the batch again from one server setting.")  # fmt: skip
    writer = dumps[samples[0].id].writer
    if not writer.after_block or writer.final_norm is None:
        raise DumpError(f"writer {writer.writer_id}", "does not say what it captures", None, "It refused; see its log.")
    layout = ShardLayout(0, row, len(samples), tuple(writer.after_block), probe.shape[1], dtype)
    draft = ShardInfo(batch.id, FileDigest(0, "", 0), layout, writer.final_norm, tuple(entries), left_out, path)
    if not encoding.plain:
        return write_encoded(draft, samples, dumps, replace(layout, encoding=encoding), path, head_VH)
    header = layout.header(draft.metadata())
    layout = replace(layout, data_start=len(header))
    with open(path, "wb") as file:
        out = _HashedFile(file)
        out.write(header)
        _write_rows(out, samples, dumps, layout, batch.id)
    return replace(draft, digest=out.digester.digest(), layout=layout)


def _write_rows(
    out: "_HashedFile",
    samples: Sequence[Sample],
    dumps: Mapping[str, Captured],
    layout: ShardLayout,
    batch_id: str,
) -> None:
    for sample in samples:
        out.write(raw_bytes(token_ids(sample, dumps[sample.id], batch_id)))
    lengths = torch.tensor([0] + [len(sample.input_ids) for sample in samples], dtype=torch.int64)
    out.write(raw_bytes(lengths.cumsum(0)))
    blocks = [contract.block_tensor(block) for block in layout.after_block]
    for names in (blocks, [contract.FINAL]):
        for sample in samples:
            for rows in proved_rows(sample, dumps[sample.id], names, layout, batch_id):
                out.write(raw_bytes(rows[0] if len(rows) == 1 else torch.stack(rows, dim=1)))
    for sample in samples:
        out.write(bytes(sample.loss_mask))


class _HashedFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digester = file, Digester()

    def write(self, data: bytes | memoryview) -> None:
        for piece in pieces(data):
            self._file.write(piece)
            self.digester.update(piece)
