"""`eyas inspect`: what a thing is, in words, and whether it is intact."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from eyas_capture import contract
from flows.workshop import open_section, split_uri
from hidden_states.errors import RecipeError, Refusal
from infra.recipe import Recipe
from infra.recipe import Store as StoreSection
from infra.recipe_file import load_recipe, shortened
from tasks.words import bytes_in_words, number

SHOWN_SAMPLES = 3
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CONVERSATIONS = (".jsonl", ".json", ".parquet", ".gz", ".zst")


def inspect_thing(thing: str, *, recipe: str | None, full: bool) -> dict[str, Any]:
    """Find out what a path or URI is, describe it and verify it.

    Args:
        recipe: names the target (conversations, drafters) and the store's endpoint (datasets).
        full: verify every byte of a dataset, not a sample of it.

    Returns:
        `kind`, `ok`, `facts` (name -> value), `problems` (one line each); for conversations also `samples`.

    Raises:
        Refusal: it is nothing Eyas knows, or cannot be read at all.
    """
    loaded = load_recipe(recipe) if recipe else None
    if "://" in thing:
        return _dataset(thing, loaded, full)
    path, name = Path(thing), shortened(thing) or "''"
    try:
        os.stat(thing)
    except (OSError, ValueError) as error:  # not there, no right to look, a name no file can have
        found = "there is no such file or folder"
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            found = f"it cannot be looked up ({getattr(error, 'strerror', None) or error})"
        raise RecipeError(name, found, None, "Give a path, or an s3:// or file:// URI.") from error
    if path.is_file() and path.suffix == ".safetensors":
        return _shard(path)
    if path.is_file() and path.suffix in CONVERSATIONS:
        return _conversations(path, loaded)
    if (path / contract.RECORD_FILE).is_file():
        return _dumps(path.parent.parent, only=path)
    if any(path.glob(f"*/{contract.WRITER_FILE}")):
        return _dumps(path)
    if (path / "config.json").is_file():
        return _drafter(path, loaded)
    raise RecipeError(
        thing, "neither a dump, a shard, a drafter nor conversations", None,
        "Datasets are given as s3:// or file:// URIs; conversations as .jsonl (.gz, .zst) or .parquet.",
    )  # fmt: skip


def _report(kind: str, facts: dict[str, Any], problems: list[str], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "ok": not problems, "facts": facts, "problems": problems, **more}


def _dataset(uri: str, recipe: Recipe | None, full: bool) -> dict[str, Any]:
    from hidden_states.dataset import Dataset

    prefix, name = split_uri(uri)
    given = recipe.store.model_dump() if recipe else {}
    with open_section(StoreSection(**{**given, "uri": prefix})) as store:
        dataset = Dataset.open(store, name)
        found = dataset.verify(full)
        manifest = dataset.manifest
        facts = {
            "manifest sha256": dataset.digest,
            "samples": f"{number(manifest.samples)} ({number(manifest.held_out_samples)} held out)",
            "left out": len(manifest.left_out),
            "tokens": f"{number(manifest.tokens)} ({number(manifest.loss_tokens)} to learn)",
            "stored": f"{bytes_in_words(manifest.total_bytes)} in {len(manifest.shards)} shards",
            "blocks": f"outputs of {list(manifest.after_block)}, and the final state ({manifest.final_norm}-norm)",
            "hidden size": f"{manifest.hidden_size}, {manifest.dtype}",
            "kept": manifest.encoding.in_words(),
            "draft vocabulary coverage": manifest.coverage,
            **{f"fingerprint: {k}": v for k, v in sorted(manifest.fingerprint.fields.items())},
            "verified": f"{found.shards} shards, {bytes_in_words(found.bytes_read)} read"
            + ("" if full else f", {found.samples_read} samples"),
        }
    return _report("dataset", facts, found.problems)


def _shard(path: Path) -> dict[str, Any]:
    from hidden_states.shard_file import open_shard
    from hidden_states.store import digest_file

    shard, info = open_shard(path, digest_file(path))
    problems = []
    for entry in info.samples:
        problem = shard.rows(*entry.span).problem(entry)
        if problem:
            problems.append(f"sample {entry.id}: {problem}")
    facts = {
        "batch": info.batch_id,
        "samples": len(info.samples),
        "tokens": info.layout.tokens,
        "bytes": info.bytes,
        "sha256": info.sha256,
        "states": f"outputs of blocks {list(info.layout.after_block)} and the final state, {info.layout.dtype}",
    }
    return _report("shard", facts, problems)


def _dumps(folder: Path, only: Path | None = None) -> dict[str, Any]:
    from hidden_states.dump import DumpFolder

    dumps = DumpFolder(folder)
    writers = dumps.writers()
    problems: list[str] = []
    tokens = incomplete = checked = 0
    for ref in dumps.dumps():
        if only is not None and ref.path.resolve() != only.resolve():
            continue
        try:
            dump = dumps.open(ref)
            dump.verify()
            checked, tokens = checked + 1, tokens + dump.record.tokens
            incomplete += not dump.record.complete
            if not dump.record.complete:
                problems.append(f"{ref}: incomplete ({dump.record.incomplete_reason})")
        except Refusal as error:
            problems.append(str(error))
    facts: dict[str, Any] = {"dumps": checked, "tokens": tokens, "incomplete": incomplete}
    for writer in writers:
        facts[f"writer {writer.writer_id}"] = (
            f"{writer.state}; {writer.model_path} in SGLang {writer.sglang_version}, outputs of blocks "
            f"{list(writer.after_block)}, {writer.dtype}"
        )
    return _report("dumps", facts, problems)


def _drafter(folder: Path, recipe: Recipe | None) -> dict[str, Any]:
    from drafter.inspect import inspect_drafter
    from tasks.lineage import read_lineage

    found = inspect_drafter(folder, recipe.target.model_path if recipe else None)
    facts, problems = dict(found.facts), list(found.problems)
    try:
        told = read_lineage(folder)
    except Refusal as error:
        told = {}
        problems.append(str(error))
    if told:
        facts |= {k: told.get(k) for k in ("dataset_uri", "served_acceptance_length", "predicted_acceptance_length")}
    if recipe is None:
        facts["fits a target?"] = "not asked; give --recipe"
    return _report("drafter", facts, problems)


def _conversations(path: Path, recipe: Recipe | None) -> dict[str, Any]:
    from hidden_states.conversations import read_conversations
    from hidden_states.samples import prepare, segments
    from hidden_states.target_config import load_tokenizer
    from tasks.planning import sample_options

    if recipe is None:
        raise RecipeError(str(path), "a target's template renders conversations", "--recipe", "Add --recipe NAME.")
    tokenizer = load_tokenizer(recipe.target.model_path, trust_remote_code=recipe.target.trust_remote_code)
    options = replace(sample_options(recipe.data), strict=False, max_bad_share=1.0)
    prepared = prepare(read_conversations(path, max_bad_share=1.0), tokenizer, options)
    told = prepared.report.as_dict()
    facts = {name: told[name] for name in ("rows", "usable", "unusable", "tokens", "learned_tokens", "learned_share")}
    facts |= {f"length, {name}": value for name, value in told["length"].items()}
    left_out = [f"{r['count']} left out: {name} ({'; '.join(r['examples'])})" for name, r in told["dropped"].items()]
    facts |= {f"left out: {name}": entry["count"] for name, entry in told["dropped"].items()}
    shown = [
        {"source": sample.source, "segments": [[text, learned] for text, learned in segments(sample, tokenizer)]}
        for sample in prepared.samples[:SHOWN_SAMPLES]
    ]
    problems = left_out if prepared.report.unusable else []
    return _report("conversations", facts, problems, samples=shown, left_out=left_out, notes=told["notes"])


def print_report(report: dict[str, Any]) -> None:
    """A report in the terminal; learned tokens are green and underlined."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{report['kind']}: {'intact' if report['ok'] else 'PROBLEMS'}")
    width = max(map(len, report["facts"]), default=0)
    for name, value in report["facts"].items():
        console.print(f"  {name:<{width}}  {value}", markup=False)
    for problem in report["problems"] or report.get("left_out", []):
        console.print(f"  - {_visible(problem)}", markup=False)
    for sample in report.get("samples", []):
        console.print(f"\n{sample['source']} (learned tokens underlined)", markup=False)
        text = Text()
        for part, learned in sample["segments"]:
            text.append(_visible(part), style="green underline" if learned else "dim")
        console.print(text)


def _visible(text: str) -> str:
    """Spelled out what would command the terminal: the text may be a stranger's."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
