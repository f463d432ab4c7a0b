"""A committed dataset written again with its states kept otherwise: same samples, same split, same vocabulary map."""

import tempfile
from pathlib import Path

from torch import Tensor

from hidden_states.dataset import Dataset
from hidden_states.dataset_writer import DatasetWriter
from hidden_states.encoding import Encoding
from hidden_states.errors import DatasetError
from hidden_states.fingerprint import Fingerprint
from hidden_states.manifest import HELD_OUT
from hidden_states.plan import Batch
from hidden_states.samples import Sample
from hidden_states.shard import pack_shard
from hidden_states.states_in_hand import StatesInHand
from hidden_states.store import Store


def reencode(dataset: Dataset, store: Store, name: str, encoding: Encoding, head_VH: Tensor | None = None) -> Dataset:
    """Writes it, a shard at a time; what is there already is left as it is.

    Args:
        head_VH: the target's head, where top-k logits are kept.

    Raises:
        DatasetError: the dataset's states are not all there as captured, or its bytes are damaged.
    """
    manifest = dataset.manifest
    if not manifest.encoding.plain:
        raise DatasetError(dataset.uri, f"keeps {manifest.encoding.in_words()}", "states as captured",
                           "Write it again from the dataset it was made of.")  # fmt: skip
    writer = DatasetWriter(store, name, Fingerprint({**manifest.fingerprint.fields, **encoding.fingerprint_fields()}))
    done = writer.done()
    columns = ("id", "source", "shard")
    rows = list(zip(*(dataset.samples[column].to_pylist() for column in columns), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        for index, record in enumerate(manifest.shards):
            if record.batch in done:
                continue
            samples, states = [], {}
            for sample_id, source, shard in rows:
                if shard == index:
                    stored = dataset.read(sample_id)
                    ids = stored.input_ids.tolist()
                    samples.append(Sample.of(ids, stored.loss_mask.tolist(), source))
                    states[sample_id] = StatesInHand(
                        ids, stored.aux, stored.final, manifest.after_block, manifest.final_norm, dataset.name
                    )
            info = pack_shard(
                Batch(record.batch, tuple(samples)),
                states,
                Path(folder) / "shard",
                left_out={} if index else manifest.left_out,
                encoding=encoding,
                head_VH=head_VH,
            )
            writer.commit_batch(info)
    splits = zip(dataset.sample_ids, dataset.samples["split"].to_pylist(), strict=True)
    writer.commit_manifest(
        [record.batch for record in manifest.shards],
        vocab_map=dataset.vocab_map().to_bytes() if manifest.vocab_map else None,
        coverage=manifest.coverage,
        held_out_share=manifest.held_out_share,
        held_out={sample_id for sample_id, split in splits if split == HELD_OUT},
        extra={**manifest.extra, "written_again_from": dataset.digest},
    )
    return Dataset.open(store, name)
