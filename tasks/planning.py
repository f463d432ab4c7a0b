"""The plan: what a run will take, and everything that can be refused before it starts."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hidden_states.conversations import BadRow, Conversation, read_conversations
from hidden_states.errors import DataError, RecipeError
from hidden_states.mask_rule import MaskRule
from hidden_states.plan import bytes_per_token
from hidden_states.prompts import Prompt, prepare_prompts
from hidden_states.render import ChatTemplate
from hidden_states.report import Report
from hidden_states.samples import Sample, SampleOptions, is_held_out, prepare
from hidden_states.target_config import is_size, load_tokenizer, read_language_config, refuse_other_logits
from infra.folders import nearest
from infra.recipe import Data, PromptSet, Recipe


@dataclass(frozen=True)
class TargetShape:
    """What a plan needs of a target's config.json. `context` is its longest sequence in tokens."""

    hidden_size: int
    num_blocks: int
    vocab_size: int | None
    context: int | None
    dtype: str

    @classmethod
    def read(cls, folder: Path, dtype: str) -> "TargetShape":
        """From a Hugging Face folder. A wrapper's language model (Kimi-K2.5: `text_config`) is looked through.

        Raises:
            RecipeError: no such folder, or a config without the sizes.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise RecipeError(
                "target.model_path", f"{folder} is not a model folder", "a Hugging Face folder with config.json",
                "Correct the path; `python -m infra.demo` makes the demo's model.",
            )  # fmt: skip
        try:
            config = read_language_config(folder)
        except DataError as error:
            raise RecipeError(error.where, error.found, error.expected, error.do) from error
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
            value = config.get(name)
            if name == "max_position_embeddings" and value is None:
                continue
            if not is_size(value):
                raise RecipeError(
                    str(path), f"`{name}` is {value!r}", "a whole number above 0", "Is this the target's own config?"
                )
        stated = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return cls(
            config["hidden_size"], config["num_hidden_layers"], config["vocab_size"],
            config.get("max_position_embeddings"), str(stated) if dtype == "auto" else dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Sizes of a run, and its prompts (to be answered by the target) or samples (with their own replies)."""

    shape: TargetShape
    bytes_per_token: int
    prompts: list[Prompt]
    samples: list[Sample]
    held_out: frozenset[str]
    report: Report | None
    not_checked: tuple[str, ...]
    recipe: Recipe
    tokens: int
    mask_rule: MaskRule | None = None

    @property
    def count(self) -> int:
        """Samples planned."""
        return len(self.prompts) or len(self.samples)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for `eyas plan --json`, the summary and the terminal."""
        recipe = self.recipe
        known = self.report is not None
        return {
            "recipe": recipe.name,
            "target": recipe.target.model_path,
            **{k: v for k, v in asdict(self.shape).items()},
            "after_block": recipe.capture.blocks,
            "capture_points": [b + 1 for b in recipe.capture.blocks],
            "bytes_per_token": self.bytes_per_token,
            "max_tokens": recipe.data.max_tokens,
            "rows": self.report.rows if self.report else None,
            "bad_rows": self.report.unusable if self.report else None,
            "data": self.report.as_dict() if self.report else None,
            "samples": self.count if known else None,
            "held_out": len(self.held_out) if known else None,
            "tokens": self.tokens if known else None,
            "tokens_are_a_bound": recipe.regenerate.enabled,
            "batches": -(-self.tokens // recipe.extract.batch_tokens) if known else None,
            "bytes": self.tokens * self.bytes_per_token if known else None,
            "local_bytes": self.local_bytes,
            "store": recipe.store.uri,
            "dump_dir": recipe.server.dump_dir or "runs/<run>/dumps",
            "not_checked": list(self.not_checked),
        }

    @property
    def local_bytes(self) -> int:
        """Most bytes on local disk at a time: every batch in work as dumps and as the shard made of them."""
        extract = self.recipe.extract
        batches = len(self.recipe.capture_servers()) * extract.in_flight
        return 2 * batches * max(extract.batch_tokens, self.recipe.data.max_tokens) * self.bytes_per_token


def make_plan(recipe: Recipe, *, on_paper: bool = False) -> Plan:
    """Read the data, count, and refuse what cannot work.

    Args:
        on_paper: a recipe that states its target's sizes is planned where neither the target nor the data are; the plan
            then says what it could not check.

    Raises:
        RecipeError, DataError: the run cannot work; says why.
    """
    prompts: list[Prompt]
    samples: list[Sample]
    report: Report | None
    if recipe.schedule.cron is not None:
        from tasks.schedule import schedule  # Prefect takes 2 s, which a plan does not need otherwise

        schedule(recipe)
    folder = Path(recipe.target.model_path)
    stated = recipe.target.hidden_size is not None and recipe.target.num_blocks is not None
    if on_paper and stated and not folder.exists():
        dtype = recipe.target.dtype if recipe.target.dtype != "auto" else "bfloat16"
        shape = TargetShape(int(recipe.target.hidden_size or 0), int(recipe.target.num_blocks or 0), None, None, dtype)
        missing = [f"{folder} is not on this machine, so samples and tokens are not counted"]
        missing += [f"{path} is not on this machine" for path in recipe.data.conversations if not Path(path).exists()]
        report, prompts, samples, tokens, rule = None, [], [], 0, None
    else:
        shape, missing = TargetShape.read(folder, recipe.target.dtype), []
        _refuse_impossible(recipe, shape)
        for found in recipe.evaluate.sets if recipe.evaluate.enabled else []:
            read_set(found, recipe, shape)
        prompts, samples, report, rule = _prepare(recipe, shape)
        tokens = sum(len(s) for s in samples) + sum(len(p.ids) + recipe.regenerate.max_new_tokens for p in prompts)
    _refuse_blocks(recipe, shape)
    _refuse_drafter(recipe, shape)
    share = recipe.data.held_out_share
    digests = [p.digest for p in prompts] + [s.digest for s in samples]
    held_out = frozenset(digest for digest in digests if is_held_out(digest, share))
    per_token = bytes_per_token(shape.hidden_size, len(recipe.capture.blocks), shape.dtype)
    plan = Plan(shape, per_token, prompts, samples, held_out, report, tuple(missing), recipe, tokens, rule)
    if report is not None:
        _refuse_small_disk(plan)
        _refuse_empty_split(plan)
    return plan


def sample_options(data: Data) -> SampleOptions:
    """How a recipe makes samples of conversations."""
    return SampleOptions(
        learn=data.learn,
        learn_reasoning=data.learn_reasoning,
        max_tokens=data.max_tokens,
        when_too_long=data.when_too_long,
        strict=data.strict,
        max_bad_share=data.max_bad_share,
        template_kwargs=data.template_kwargs,
    )


def read_set(section: PromptSet, recipe: Recipe, shape: TargetShape) -> tuple[list[Prompt], list[str]]:
    """A prompt set's usable prompts in the order of their digests, and the ids of all its rows.

    Raises:
        DataError: the file cannot be read, or nothing of it can be served.
    """
    where = f"prompt set {section.name}, {section.path}"
    room = None if shape.context is None else shape.context - recipe.evaluate.max_new_tokens
    options = replace(
        sample_options(recipe.data), max_tokens=room, when_too_long="skip", strict=True, vocab_size=shape.vocab_size
    )
    content: list[str] = []

    def rows() -> Iterator[Conversation | BadRow]:
        for row in read_conversations(section.path, strict=True):
            if isinstance(row, Conversation):
                if section.domain is not None and row.domain not in (None, section.domain):
                    continue
                content.append(row.id)
            yield row

    tokenizer = load_tokenizer(recipe.target.model_path, trust_remote_code=recipe.target.trust_remote_code)
    try:
        prepared = prepare_prompts(rows(), tokenizer, options)
    except DataError as error:
        at = "" if error.where == section.path else f"{error.where}: "
        do = "Correct the file, or take the set out of evaluate.sets; every row of a set must be usable."
        raise DataError(where, f"{at}{error.found}", error.expected, do) from error
    if not prepared.prompts:
        domain = f" of domain {section.domain}" if section.domain else ""
        reasons = f" ({prepared.report.in_words()})" if prepared.report.rows else ""
        do = "Correct the path or the domain, or take the set out of evaluate.sets."
        raise DataError(where, f"no usable prompt{domain}{reasons}", "at least one", do)
    return prepared.prompts, content


def _prepare(recipe: Recipe, shape: TargetShape) -> tuple[list[Prompt], list[Sample], Report, MaskRule | None]:
    data, most = recipe.data, recipe.data.max_conversations

    def rows() -> Any:
        for path in data.conversations:
            yield from read_conversations(path, strict=data.strict, max_bad_share=data.max_bad_share)

    tokenizer = load_tokenizer(recipe.target.model_path, trust_remote_code=recipe.target.trust_remote_code)
    room = data.max_tokens - (recipe.regenerate.max_new_tokens if recipe.regenerate.enabled else 0)
    options = replace(sample_options(data), max_tokens=room, vocab_size=shape.vocab_size)
    conversations: Any = rows()
    if recipe.regenerate.enabled:
        asked = prepare_prompts(conversations, tokenizer, options)
        prompts, samples, report = asked.prompts[:most], [], asked.report
    else:
        given = prepare(conversations, tokenizer, options)
        prompts, samples, report = [], given.samples[:most], given.report
    if not prompts and not samples:
        reasons = report.in_words() or "the files hold no rows"
        raise DataError(
            ", ".join(data.conversations), f"no usable conversation: {reasons}", "at least one", "See above."
        )
    try:
        rule = MaskRule.of(ChatTemplate(tokenizer, dict(data.template_kwargs)))
    except DataError as error:
        report.note("loss masks cannot be checked independently", "template", error.found)
        rule = None
    return prompts, samples, report, rule


def _refuse_impossible(recipe: Recipe, shape: TargetShape) -> None:
    data = recipe.data
    if shape.context and data.max_tokens > shape.context:
        raise RecipeError(
            "data.max_tokens", f"{data.max_tokens} tokens", f"at most the target's context of {shape.context}",
            "Lower it; the server would refuse longer samples.",
        )  # fmt: skip
    if recipe.regenerate.enabled and recipe.regenerate.max_new_tokens >= data.max_tokens:
        raise RecipeError(
            "regenerate.max_new_tokens", f"{recipe.regenerate.max_new_tokens} new tokens",
            f"less than data.max_tokens ({data.max_tokens})", "The prompt needs room too.",
        )  # fmt: skip
    if shape.vocab_size and recipe.train.draft_vocab_size > shape.vocab_size:
        raise RecipeError(
            "train.draft_vocab_size", f"{recipe.train.draft_vocab_size} tokens",
            f"at most the target's vocabulary of {shape.vocab_size}", "Lower it.",
        )  # fmt: skip
    for found in recipe.evaluate.sets if recipe.evaluate.enabled else []:
        if not Path(found.path).is_file():  # said now, not after days of training
            raise RecipeError(
                f"evaluate.sets, {found.name}", f"{found.path} is no file", "prompts, one a line", "Correct the path."
            )
    if recipe.evaluate.url is not None:
        raise RecipeError(
            "evaluate.url", recipe.evaluate.url, "a server that Eyas starts with the drafter it has just trained",
            "Take it out; it is for `eyas evaluate`, which measures a drafter that runs already.",
        )  # fmt: skip
    refuse_other_logits(recipe.target.model_path)
    python = recipe.server.python
    if python is not None and shutil.which(python) is None:
        raise RecipeError(
            "server.python", f"{python} is no program", "SGLang's interpreter", "Run `make setup`, or name it."
        )


def _refuse_blocks(recipe: Recipe, shape: TargetShape) -> None:
    highest = max(recipe.capture.blocks)
    if highest > shape.num_blocks - 2:
        raise RecipeError(
            "capture", f"the output of block {highest} is asked for",
            f"at most block {shape.num_blocks - 2} of {shape.num_blocks} (counted from 0)",
            "The last block's output is not captured as such: the final state, after the norm, comes along anyway.",
        )  # fmt: skip


def _refuse_drafter(recipe: Recipe, shape: TargetShape) -> None:
    """What is asked of the drafter by name is refused now, and not after the capture."""
    train = recipe.train
    if (train.start_from is not None or train.drafter) and shape.vocab_size:
        from drafter.start import first_config  # torch takes seconds that other plans need not wait for

        first_config(
            recipe.target.model_path, recipe.capture.blocks, train.draft_vocab_size, train.start_from, train.drafter
        )


def _refuse_small_disk(plan: Plan) -> None:
    try:
        place = nearest(Path(plan.recipe.server.dump_dir or ".").resolve())
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise RecipeError(
            "server.dump_dir", f"it cannot be looked up ({error.strerror})", "a folder", "Name another."
        ) from error
    if free < plan.local_bytes:
        raise RecipeError(
            f"disk of {place}", f"{free:,} bytes free", f"{plan.local_bytes:,} bytes for the batches in work",
            "Free some, name another server.dump_dir, or lower extract.batch_tokens or extract.in_flight.",
        )  # fmt: skip


def _refuse_empty_split(plan: Plan) -> None:
    training = plan.count - len(plan.held_out)
    if not plan.held_out or not training:
        raise DataError(
            "data.held_out_share", f"{len(plan.held_out)} of {plan.count} samples are held out", "some on either side",
            "Raise data.held_out_share or use more conversations.",
        )  # fmt: skip
