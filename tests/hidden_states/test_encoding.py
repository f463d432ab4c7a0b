"""States kept otherwise than captured: declared, proved, decoded within bounds, and refused by who cannot."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.loss import head_loss
from drafter.model import TargetWeights
from drafter.objective import Teacher
from drafter.slots import counted_slots, seen_token
from eyas_capture import contract
from hidden_states.dataset import Dataset, DatasetWriter
from hidden_states.encoding import (
    BFLOAT16,
    CAPTURED,
    FLOAT8,
    INT8,
    TAUGHT,
    TOP_K,
    Encoding,
    dequantise,
    quantise,
    taught_rows,
)
from hidden_states.errors import DatasetError
from hidden_states.fingerprint import Fingerprint
from hidden_states.plan import plan_batches
from hidden_states.reencode import reencode
from hidden_states.shard import pack_shard
from hidden_states.shard_file import open_shard
from hidden_states.store import Store, open_store
from hidden_states.stream import SampleStream
from hidden_states.top_k import TopLogits, top_logits
from tests.hidden_states.stored import AFTER_BLOCK, FINGERPRINT, Capture, Made, make_dataset, make_samples

H, K = 16, 4
HEAD = torch.randn(300, H, generator=torch.Generator().manual_seed(7))
ENCODINGS = [
    Encoding(BFLOAT16, BFLOAT16),
    Encoding(FLOAT8, INT8),
    Encoding(INT8, FLOAT8, TAUGHT),
    Encoding(CAPTURED, CAPTURED, TAUGHT),
    Encoding(INT8, TOP_K, TAUGHT, K),
    Encoding(CAPTURED, TOP_K, top_k=K),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture(params=ENCODINGS, ids=lambda encoding: encoding.in_words())
def encoded(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[tuple[Made, Dataset]]:
    """A dataset as captured, and the same written again."""
    made = make_dataset(store, tmp_path, [3, 9, 1, 14, 5, 8], shard_tokens=20, held_out_share=0.3, hidden_size=H)
    yield made, reencode(made.dataset, store, "less", request.param, HEAD)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20), size=st.integers(1, 40), power=st.integers(-12, 12), outlier=st.sampled_from([1.0, 1e3])
)
def test_a_quantised_row_is_off_by_half_a_step_at_most(seed: int, size: int, power: int, outlier: float) -> None:
    rows = torch.randn(5, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    rows[0] = 0
    rows[1, 0] *= outlier
    for kind in (INT8, FLOAT8):
        codes, scale = quantise(rows, kind)
        assert codes.element_size() == 1 and scale.shape == (5,)
        error = (dequantise(codes, scale, torch.float32) - rows).abs()
        bound = (0.5001 * scale[:, None]).expand_as(rows)
        if kind == FLOAT8:  # 3 bits of mantissa; below the normal numbers steps of 1/512 of the scale
            bound = torch.maximum(rows.abs() / 16, 1.001 * scale[:, None] / 1024)
        assert bool((error <= bound * 1.001).all())
        assert bool((error[0] == 0).all())


@settings(max_examples=80)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=30), steps=st.integers(1, 7))
def test_taught_rows_are_those_the_trainer_asks_for(mask: list[bool], steps: int) -> None:
    """Every counted slot's teacher is kept, at every step; and no row is kept in vain but the first token's."""
    loss_mask = torch.tensor(mask)
    counted = counted_slots(loss_mask, torch.zeros(len(mask), dtype=torch.int64), steps)
    asked = {int(seen_token(slot, j)) for j in range(steps) for slot in counted[j].nonzero()[:, 0]}
    kept = set(taught_rows(loss_mask).nonzero()[:, 0].tolist())
    assert asked <= kept and kept - asked <= {0}


def test_a_head_that_is_not_the_states_is_refused() -> None:
    states = torch.randn(5, H)
    for rows, k in ((states[:, :-1], K), (states, 301)):
        with pytest.raises(DatasetError, match="the target's head"):
            top_logits(rows, HEAD, k)


def test_what_is_kept_is_read_back_within_bounds_and_proved(encoded: tuple[Made, Dataset]) -> None:
    made, less = encoded
    encoding = less.manifest.encoding
    assert less.verify(full=True).problems == [] and less.verify(full=False).problems == []
    assert less.manifest.total_bytes < made.dataset.manifest.total_bytes or encoding.top_k
    assert less.samples["split"].to_pylist() == made.dataset.samples["split"].to_pylist()
    for sample_id, sample in made.samples.items():
        rows, dump = less.read(sample_id), made.dumps[sample_id]
        assert (rows.input_ids.tolist(), rows.loss_mask.tolist()) == (sample.input_ids, sample.loss_mask)
        assert less.read_tokens(sample_id) == (sample.input_ids, sample.loss_mask)
        kept = (
            taught_rows(rows.loss_mask) if encoding.final_rows == TAUGHT else torch.ones(len(sample), dtype=torch.bool)
        )
        final = dump.tensor(contract.FINAL)
        assert bool(rows.final[~kept].isnan().all())
        aux = torch.stack([dump.tensor(contract.block_tensor(block)) for block in AFTER_BLOCK], dim=1)
        for name, found, true, kind in (
            ("aux", rows.aux, aux, encoding.aux),
            ("final", rows.final[kept], final[kept], encoding.final),
        ):
            if kind == TOP_K:
                expected = (true.float() @ HEAD.T).topk(K)
                assert rows.top is not None and rows.final.shape == (len(sample), 0)
                assert torch.equal(rows.top[kept].ids.long(), expected.indices)
                assert torch.allclose(rows.top[kept].logits.float(), expected.values, rtol=1e-3)
                assert bool((rows.top[~kept].ids == -1).all()) and bool(rows.top[~kept].logits.isnan().all())
            elif kind in (CAPTURED, BFLOAT16):
                assert torch.equal(found, true), name  # the capture was in bfloat16
            else:
                assert (found - true).abs().max() <= 0.07 * true.abs().max() if len(true) else True, name


def test_the_stream_delivers_what_reading_a_sample_does(encoded: tuple[Made, Dataset]) -> None:
    made, less = encoded
    seen = []
    for split in ("train", "held_out"):
        for batch in SampleStream(less, batch_tokens=20, split=split, top_logits=True):
            for number, sample_id in enumerate(batch.sample_ids):
                rows, own = less.read(sample_id), batch.doc_ids == number
                assert torch.equal(batch.aux[own], rows.aux)
                assert torch.equal(batch.final[own].nan_to_num(9e9), rows.final.nan_to_num(9e9))
                if rows.top is not None:
                    assert batch.top is not None and torch.equal(batch.top[own].ids, rows.top.ids)
                    assert torch.equal(batch.top[own].logits.nan_to_num(), rows.top.logits.nan_to_num())
                seen.append(sample_id)
    assert sorted(seen) == sorted(made.samples)


def test_a_flipped_bit_in_any_kept_tensor_is_noticed(store: Store, tmp_path: Path) -> None:
    samples = make_samples([7, 9])
    (batch,) = plan_batches(samples, 100)
    dumps = Capture(tmp_path / "dumps", H).dumps(samples)
    for encoding in ENCODINGS:
        info = pack_shard(batch, dumps, tmp_path / "shard", encoding=encoding, head_VH=HEAD)
        shard, again = open_shard(tmp_path / "shard", info.digest)
        assert again == info
        data = bytearray((tmp_path / "shard").read_bytes())
        for entry in info.samples:
            assert shard.rows(*entry.span).problem(entry) is None
            for name, (start, length) in info.layout.sample_spans(*entry.span).items():
                if length:
                    data[start + length - 1] ^= 1
                    (tmp_path / "rotten").write_bytes(data)
                    rotten, _ = open_shard(tmp_path / "rotten", info.digest)
                    assert rotten.rows(*entry.span).problem(entry) is not None, name
                    data[start + length - 1] ^= 1


def test_who_does_not_know_an_option_refuses_it(store: Store, tmp_path: Path) -> None:
    made = make_dataset(store, tmp_path, [5, 6], shard_tokens=20, hidden_size=H)
    less = reencode(made.dataset, store, "less", Encoding(CAPTURED, TOP_K, top_k=K), HEAD)
    with pytest.raises(DatasetError, match=r"top-4 logits; expected a trainer that knows them"):
        SampleStream(less, batch_tokens=20)
    with pytest.raises(DatasetError, match="states as captured"):
        reencode(less, store, "twice", Encoding(INT8, INT8))
    manifest = json.loads(store.get_bytes("less/manifest.json"))
    assert manifest["format"] == "eyas-dataset/2"  # a reader that knows only the first format refuses this one
    for change in ({"aux": "int4"}, {"rotated": True}):
        changed = {**manifest, "encoding": {**manifest["encoding"], **change}}
        store.put_bytes("less/manifest.json", json.dumps(changed).encode())
        with pytest.raises(DatasetError, match="update this one"):
            Dataset.open(store, "less")


def test_states_kept_otherwise_are_never_mixed(store: Store, tmp_path: Path) -> None:
    samples = make_samples([5, 6])
    (batch,) = plan_batches(samples, 100)
    dumps = Capture(tmp_path / "dumps", H).dumps(samples)
    int8 = Encoding(INT8, INT8)
    info = pack_shard(batch, dumps, tmp_path / "shard", encoding=int8)
    with pytest.raises(DatasetError, match="kept as aux int8, final int8; expected captured"):
        DatasetWriter(store, "data", FINGERPRINT).commit_batch(info)
    ours = Fingerprint({**FINGERPRINT.fields, **int8.fingerprint_fields()})
    DatasetWriter(store, "data", ours).commit_batch(info)
    with pytest.raises(DatasetError, match=r"differ in kept: \(absent\) / aux int8, final int8"):
        DatasetWriter(store, "data", FINGERPRINT).done()


def test_a_plain_dataset_has_the_bytes_of_the_first_format(store: Store, tmp_path: Path) -> None:
    made = make_dataset(store, tmp_path, [5, 6], shard_tokens=20)
    manifest = json.loads(store.get_bytes("data/manifest.json"))
    assert manifest["format"] == "eyas-dataset/1" and "encoding" not in manifest
    assert not any("taught" in shard for shard in manifest["shards"])
    sidecar = next(info.key for info in store.list("data/shards/") if info.key.endswith(".json"))
    facts = json.loads(store.get_bytes(sidecar))
    assert facts["format"] == "eyas-sidecar/1" and set(facts["layout"]) == {
        "after_block", "data_start", "dtype", "hidden_size", "samples", "tokens",
    }  # fmt: skip
    assert made.dataset.samples.column_names[-1] == "checksums"


def test_the_trainer_learns_the_same_from_all_logits_as_from_the_states() -> None:
    """With k as large as the vocabulary nothing is left out: same loss, same positions. With k = 4 the teacher's best
    token is still the same."""
    draw = torch.Generator().manual_seed(11)
    rows, draft_ids = 12, torch.arange(0, 300, 3)
    final = torch.randn(rows, H, generator=draw)
    teacher = Teacher(TargetWeights(HEAD, HEAD), draft_ids)
    needed, tokens = torch.ones(rows, dtype=torch.bool), torch.tensor([1, 4, 7])
    ids = [f"sample {n}" for n in range(3)]

    def batch(top: TopLogits | None, names: list[str]) -> Any:
        doc_ids = torch.arange(rows) // 4
        return SimpleNamespace(final=final if top is None else final[:, :0], top=top, doc_ids=doc_ids, sample_ids=names)

    states = batch(None, ids)
    whole, some = (batch(top_logits(final, HEAD, k), [f"{name} {k}" for name in ids]) for k in (300, K))
    draft_rows, head = torch.randn(3, H, generator=draw), torch.randn(len(draft_ids), H, generator=draw)

    def loss(of: Any) -> float:
        teaching = teacher.teaching(of, tokens, torch.float32)
        out = head_loss([draft_rows], head, teaching, teacher.draft_head, [1.0], [torch.arange(3)], "soft_ce", 512)
        return float(out.loss)

    assert loss(whole) == pytest.approx(loss(states), rel=2e-3)  # float16 logits
    for other in (whole, some):
        assert torch.equal(teacher.in_vocab(other, needed), teacher.in_vocab(states, needed))
