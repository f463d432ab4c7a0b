"""The dataset around the batches: what is done already, and the commit."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from prefect.logging import get_run_logger
from torch import Tensor

from hidden_states.dataset_writer import DatasetWriter
from hidden_states.encoding import Encoding
from hidden_states.errors import DatasetError, StoreError
from hidden_states.fingerprint import Fingerprint, capture_fingerprint, target_fields, writer_fields
from hidden_states.plan import plan_batches
from hidden_states.record import Writer
from hidden_states.target_config import language_config
from hidden_states.teacher import TeacherHead
from hidden_states.validate import Expectation, check_writer
from hidden_states.vocab import build_vocab_map, count_tokens
from infra.recipe import Recipe
from tasks.job import Job, need
from tasks.quarantine import quarantined, refuse_many_quarantined, try_again, unusable_batches
from tasks.step import step
from tasks.tracking import Tracker


@step("open dataset", retries=2)
def open_dataset(job: Job) -> list[str]:
    """Split the samples into batches and ask the bucket which are done. Returns the ids of those that are not."""
    recipe, ledger, capture = job.recipe, need(job.ledger, "ledger"), need(job.capture, "capture servers")
    folder = Path(recipe.target.model_path)
    job.expectation = Expectation.of_target(folder, tuple(recipe.capture.blocks), recipe.target.dtype)
    writers = capture.writers()
    for writer in writers:
        check_writer(writer, job.expectation)
    fingerprint = shared_fingerprint(folder, mask_rule(job), writers)
    fingerprint = Fingerprint({**fingerprint.fields, **kept(recipe).fingerprint_fields()})
    job.writer = DatasetWriter(job.store, ledger.name, fingerprint)
    job.writer.claim()
    _sweep(job.writer)
    job.batches = {b.id: b for b in plan_batches(need(job.samples, "samples").samples, recipe.extract.batch_tokens)}
    done = {batch: sidecar for batch, sidecar in job.writer.done().items() if batch in job.batches}
    unusable = unusable_batches(job)
    for batch in try_again(job, done, unusable):
        done.pop(batch, None)
        unusable.pop(batch, None)
    missing = [batch_id for batch_id in job.batches if batch_id not in done and batch_id not in unusable]
    job.quarantined = sum(len(sidecar.info.left_out) for sidecar in done.values())
    job.quarantined += sum(map(len, unusable.values()))
    get_run_logger().info(
        "%d batches, %d of them in the bucket already", len(job.batches), len(job.batches) - len(missing)
    )
    return missing


def shared_fingerprint(target: Path, mask_rule: str, writers: Sequence[Writer]) -> Fingerprint:
    """The one fingerprint of what all these writers capture: their batches go into one dataset.

    Raises:
        DatasetError: two of them capture states that may not be mixed, such as those of two versions of SGLang.
    """
    first, *others = writers
    ours = Fingerprint(writer_fields(first))
    for other in others:
        if differing := ours.differences(Fingerprint(writer_fields(other))):
            raise DatasetError(
                f"writers {first.writer_id} and {other.writer_id}", f"their states differ: {'; '.join(differing)}",
                "servers whose states may be mixed in one dataset",
                "Install the same SGLang and the same eyas-capture beside all of `capture.servers`, or leave one out.",
            )  # fmt: skip
    return capture_fingerprint(target, mask_rule=mask_rule, writer=first)


def kept(recipe: Recipe) -> Encoding:
    """How the recipe's dataset keeps its states."""
    section = recipe.dataset
    return Encoding(section.aux, section.final, section.final_rows, section.top_k or 0)


@functools.lru_cache(maxsize=1)
def teacher_head(model_path: str) -> Tensor:
    """The target's head [V, H], whole: needed where top-k logits are kept."""
    head = TeacherHead.load(model_path)
    return head.weights.whole(head.name).float()


def _sweep(writer: DatasetWriter) -> None:
    """Abort what uploads of dead runs have left; a store that does not let us look is no reason to stop."""
    log = get_run_logger()
    try:
        for key in writer.sweep():
            log.info("aborted the unfinished upload of %s, left by a run that died", key)
    except StoreError as error:
        log.warning("unfinished uploads of dead runs were not looked for: %s", error)


def mask_rule(job: Job) -> str:
    """How this run's loss masks are made, in one line of the fingerprint."""
    data = job.recipe.data
    if job.recipe.regenerate.enabled:
        return "reply by the target"
    return f"assistant turns: {data.learn}, reasoning {'learned' if data.learn_reasoning else 'not learned'}"


@step("commit dataset", retries=2)
def commit_dataset(job: Job) -> None:
    """Write the samples table, the vocabulary map and, last, the manifest."""
    recipe, writer = job.recipe, need(job.writer, "dataset writer")
    samples = need(job.samples, "samples")
    unusable = unusable_batches(job)
    refuse_many_quarantined(job)
    shape = need(job.plan, "plan").shape
    training = [s for s in samples.samples if s.id not in samples.held_out]
    counts = count_tokens(training, int(shape.vocab_size or 0))
    vocab = build_vocab_map(counts, recipe.train.draft_vocab_size, _special_ids(recipe.target.model_path))
    manifest = writer.commit_manifest(
        need(job.batches, "batches").keys() - unusable.keys(),
        vocab_map=vocab.to_bytes(),
        coverage=vocab.coverage,
        held_out_share=recipe.data.held_out_share,
        held_out=samples.held_out,
    )
    job.figures["vocabulary_coverage"] = round(vocab.coverage, 4)
    get_run_logger().info("committed %s, %d samples, manifest %s", need(job.ledger, "ledger").uri, manifest.samples,
                          manifest.digest[:16])  # fmt: skip


@step("use dataset", retries=2)
def use_dataset(job: Job) -> None:
    """Open the committed dataset for training, and check that it is of this target.

    Raises:
        DatasetError: target, layers or dtype are not the dataset's; names what differs.
    """
    recipe = job.recipe
    job.dataset = need(job.ledger, "ledger").dataset()
    manifest = job.dataset.manifest
    expected = Expectation.of_target(recipe.target.model_path, tuple(recipe.capture.blocks), recipe.target.dtype)
    ours = {
        **target_fields(Path(recipe.target.model_path)),
        "after_block": list(expected.after_block),
        "dtype": expected.dtype,
    }
    theirs = {name: manifest.fingerprint.fields.get(name) for name in ours}
    theirs["after_block"] = list(manifest.after_block)
    if differing := Fingerprint(ours).differences(Fingerprint(theirs)):  # type: ignore[arg-type]
        raise DatasetError(
            job.dataset.uri, f"another target's; ours / theirs: {'; '.join(differing)}", "this recipe's target",
            "Set dataset.name to a new name, or put the target back.",
        )  # fmt: skip
    job.figures |= {
        "samples_valid": manifest.samples,
        "samples_quarantined": len(quarantined(job, manifest)),
        "samples_held_out": manifest.held_out_samples,
        "tokens": manifest.tokens,
        "dataset_uri": job.dataset.uri,
        "manifest_digest": job.dataset.digest,
        "fingerprint": manifest.fingerprint.digest,
        "sglang_version": str(manifest.fingerprint.fields.get("sglang_version")),
        **need(job.ledger, "ledger").reports(),
    }
    log_dataset(job, need(job.tracker, "MLflow run"), "training")
    if job.stage is not None:
        log_dataset(job, job.stage, "extraction")


def log_dataset(job: Job, tracker: Tracker, context: str) -> None:
    """Make the dataset an input of a run in MLflow; `context` says what for."""
    dataset = need(job.dataset, "dataset")
    manifest = dataset.manifest
    size = {"samples": manifest.samples, "tokens": manifest.tokens, "bytes": manifest.total_bytes}
    tracker.dataset(need(job.ledger, "ledger").name, dataset.digest, dataset.uri, json.dumps(size), context)


def _special_ids(model_path: str) -> list[int]:
    """Special and stop tokens: a drafter that cannot propose them never ends a reply."""
    folder = Path(model_path)
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            config = language_config(json.loads(path.read_text(encoding="utf-8")))
            for key in ("bos_token_id", "eos_token_id"):
                value = config.get(key)
                ids |= set(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return sorted(ids)
