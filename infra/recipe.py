"""The recipe: one YAML file that says everything a run needs, as typed sections. `recipe_file` reads and checks it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # what torch's generators take
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # one folder, and no option of a command: as hidden_states/dataset_writer.py


class Section(BaseModel):
    """Base of every part of a recipe: unknown keys, silent conversions, infinities and NaN are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Target(Section):
    model_path: str = Field(description="Hugging Face folder of the model to be made faster")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("auto", description="dtype the server computes in")
    trust_remote_code: bool = Field(False, description="run the model folder's own Python code (Kimi needs it)")
    hidden_size: Positive | None = Field(None, description="only to plan without the model's folder at hand")
    num_blocks: Positive | None = Field(None, description="only to plan without the model's folder at hand")


class Server(Section):
    python: str | None = Field(None, description="interpreter of the environment SGLang is installed in")
    url: str | None = Field(None, description="capture from this server, which already runs, instead of starting one")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu adds the flags of infra/sglang_cpu")
    tp_size: Positive = Field(1, description="GPUs the target is split over")
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(None, description="loopback port; left out = a free one")
    flags: dict[str, Any] = Field(
        default_factory=dict, description="further SGLang flags, without the dashes; true = bare flag"
    )
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of the server")
    dump_dir: str | None = Field(
        None, description="capture folder; needed with `url`: the folder the running server was started with"
    )
    ready_deadline_s: Positive = Field(1800, description="seconds until a server that is not ready is ended")
    max_in_flight_tokens: Positive = Field(16384, description="tokens of unanswered requests sent at once")
    max_in_flight_requests: Positive = Field(64, description="unanswered requests sent at once")
    request_timeout_s: Positive = Field(600, description="seconds one request may take")

    @model_validator(mode="after")
    def _some_server(self) -> "Server":
        if self.python is None and self.url is None:
            raise ValueError("give `python` (Eyas starts the server), or `url` (capture from one that already runs)")
        if self.url is not None and self.dump_dir is None:
            raise ValueError("with `url`, `dump_dir` must name the folder that server writes its dumps to")
        return self


class CaptureServer(Section):
    """One of several servers to capture from: what differs from the section `server`."""

    url: str | None = None
    dump_dir: str | None = None
    python: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    flags: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class Capture(Section):
    after_block: list[int] | None = Field(None, description="decoder blocks (from 0) whose outputs are captured")
    capture_points: list[int] | None = Field(None, description="the same in SGLang's numbering: block + 1")
    mode: Literal["all", "opted-in"] = Field("all", description="opted-in: only Eyas' own requests, on a shared server")
    servers: list[CaptureServer] = Field(
        default_factory=list,
        description="servers that share the batches: per entry what differs from `server` (`url`, `dump_dir`, "
        "`python`, `port`, `flags`, `env`; `{}` = that server as it is); left out = that one server",
    )

    @model_validator(mode="after")
    def _one_numbering(self) -> "Capture":
        if (self.after_block is None) == (self.capture_points is None):
            raise ValueError("give either `after_block` or `capture_points`")
        blocks = self.blocks
        if blocks != sorted(set(blocks)) or blocks[:1] < [0]:
            raise ValueError(f"block numbers must be ascending, distinct and not negative; they are {blocks}")
        return self

    @property
    def blocks(self) -> list[int]:
        """Captured blocks as 0-based block outputs, whichever numbering the recipe uses."""
        return self.after_block if self.after_block is not None else [p - 1 for p in self.capture_points or []]


class Data(Section):
    conversations: list[str] = Field(min_length=1, description="JSONL (.gz, .zst) or Parquet files of conversations")
    max_conversations: Positive | None = Field(None, description="use this many, chosen by content")
    held_out_share: Share = Field(0.05, description="share kept for evaluation, chosen by content")
    max_tokens: Positive = Field(2048, description="longest sample, in tokens")
    when_too_long: Literal["cut", "skip", "refuse"] = Field("cut", description="what happens to longer ones")
    learn: Literal["all", "last"] = Field("all", description="assistant turns to learn from")
    learn_reasoning: bool = Field(True, description="learn the reasoning part of a reply too")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="further variables of the chat template, e.g. `enable_thinking: false`"
    )
    strict: bool = Field(True, description="the first unusable row ends the run; false = report such rows and go on")
    max_bad_share: Share = Field(0.05, description="with strict: false, more unusable rows than this end the run")


class Regenerate(Section):
    enabled: bool = Field(True, description="let the target answer the prompts itself (on-policy replies)")
    max_new_tokens: Positive = Field(1024, description="longest reply; a reply cut by it is kept and marked")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0 = greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus sampling, with a temperature")
    top_k: Annotated[int, Field(ge=-1)] = Field(-1, description="sample among so many tokens; -1 = all")


class Extract(Section):
    batch_tokens: Positive = Field(65536, description="tokens of a batch = a shard = an upload = a retry")
    in_flight: Positive = Field(
        1,
        description="batches a server has in work: with 2, the next is captured while one is proved and uploaded, and "
        "a kill costs up to 2",
    )
    dump_timeout_s: Positive = Field(120, description="seconds a dump may arrive after its answer")
    teacher_samples: Positive = Field(4, description="samples of every batch that go through the teacher check")
    reference_samples: Annotated[int, Field(ge=0)] = Field(
        1, description="samples of every batch compared with a transformers forward, where the target fits this machine"
    )
    min_teacher_agreement: Share = Field(0.99, description="share of the server's own tokens the states must reproduce")
    max_quarantined_share: Share = Field(0.02, description="more quarantined samples than this end the run")


class Store(Section):
    uri: str = Field("s3://eyas/datasets", description="s3://bucket/prefix or file:///folder")
    endpoint_url: str | None = Field(
        None, description="S3 endpoint; left out = AWS_ENDPOINT_URL, else the embedded store"
    )
    region: str | None = Field(None, description="S3 region")
    profile: str | None = Field(None, description="profile of the AWS credentials file; never a key")
    embedded: bool = Field(True, description="start an object store on loopback when no endpoint is given")


class DatasetSection(Section):
    name: str | None = Field(
        None, pattern=NAME, description="left out = the recipe's name; versions are counted below it"
    )
    on_complete: Literal["reuse", "new"] = Field(
        "reuse", description="a run whose dataset is already complete uses it, or makes a new version"
    )
    aux: Literal["captured", "bfloat16", "float8_e4m3", "int8"] = Field(
        "captured", description="how the blocks' states are kept; what each costs: docs/dataset.md"
    )
    final: Literal["captured", "bfloat16", "float8_e4m3", "int8", "top_k"] = Field(
        "captured", description="how the final state is kept; top_k = its largest teacher logits in its place"
    )
    final_rows: Literal["all", "taught"] = Field(
        "all", description="taught = the final state only where the loss will count"
    )
    top_k: Positive | None = Field(None, description="how many logits, with `final: top_k`")

    @model_validator(mode="after")
    def _counted(self) -> "DatasetSection":
        if (self.final == "top_k") != (self.top_k is not None):
            raise ValueError("`top_k` says how many logits `final: top_k` keeps: give both, or neither")
        return self


class Train(Section):
    draft_vocab_size: Positive = Field(32000, description="target tokens the drafter can propose")
    ttt_steps: Positive = Field(7, description="training-time-test steps K")
    lr: Annotated[float, Field(gt=0)] = Field(1e-4, description="peak learning rate of AdamW")
    schedule: Literal["cosine", "linear", "wsd"] = Field("cosine", description="how the rate falls after the warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(100, description="optimiser steps of linear warm-up")
    beta2: Annotated[float, Field(gt=0, lt=1)] = Field(0.95, description="AdamW's second beta (the first is 0.9)")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's weight decay")
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="largest gradient norm")
    step_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="weight of TTT step j: step_decay^j")
    batch_tokens: Positive = Field(16384, description="tokens of an optimiser step")
    steps: Positive | None = Field(None, description="optimiser steps; left out = `epochs` or `max_seconds`")
    epochs: Positive | None = Field(None, description="passes over the training split")
    max_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="training ends here even if steps are left; the schedule follows the clock"
    )
    eval_every: Positive = Field(500, description="optimiser steps between evaluations on the held-out split")
    checkpoint_every: Positive = Field(500, description="optimiser steps between checkpoints")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the matrix products; weights stay float32")
    seed: Seed = Field(0, description="of the first weights and of the order of samples")
    start_from: str | None = Field(
        None,
        description="folder of a published drafter to train further (names of SGLang, SpecForge, vLLM, speculators or "
        "NeMo Automodel); it keeps its shape and its draft vocabulary",
    )
    drafter: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of a fresh drafter that differ from what its target gives, as `fc_norm: true`; they are "
        "those of `DrafterConfig` in drafter/config.py, and `latent_attention`",
    )

    @model_validator(mode="after")
    def _bounded(self) -> "Train":
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            raise ValueError("give at least one of `steps`, `epochs`, `max_seconds`: training needs an end")
        return self


class PromptSet(Section):
    """One further set of prompts a drafter is judged on."""

    name: Annotated[str, Field(pattern=NAME)]
    path: str
    version: str = "1"
    domain: str | None = None
    prompts: Positive = 64


class Sampling(Section):
    """How production samples."""

    temperature: Annotated[float, Field(gt=0)]
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1


class Evaluate(Section):
    enabled: bool = Field(True, description="serve the drafter and measure it; needs `server.python`")
    prompts: Positive = Field(64, description="held-out prompts served")
    sets: list[PromptSet] = Field(
        default_factory=list,
        description="further prompt sets: `name`, `path` (a conversations file, or HumanEval's), `version`, `domain` "
        "(rows of another `domain` are left out), `prompts` (how many are served); docs/verdict.md",
    )
    required: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="sets on which a drafter must lead to become champion; left out = all, `[held-out]` = that one",
    )
    sampling: Sampling | None = Field(
        None, description="measure at these settings of production too: `temperature`, `top_p`, `top_k`; not on a CPU"
    )
    max_new_tokens: Positive = Field(256, description="tokens answered per prompt")
    num_steps: Positive = Field(3, description="tokens drafted per verification")
    concurrency: Positive = Field(1, description="requests at once while measuring")
    control: bool = Field(True, description="measure the drafter as it was before training too")
    min_acceptance_length: Annotated[float, Field(ge=1)] | None = Field(
        None, description="less than this fails the run"
    )
    max_prediction_gap: Annotated[float, Field(gt=0)] = Field(
        0.05,
        description="a gap between served and replayed acceptance beyond this is looked into: which choice of training "
        "does serving not share?",
    )
    url: str | None = Field(
        None,
        description="`eyas evaluate`: measure on this server, which runs with the drafter, instead of starting one",
    )
    plain_url: str | None = Field(
        None, description="`eyas evaluate`: the same target without a drafter; left out = started by `server.python`"
    )

    @model_validator(mode="after")
    def _sets_apart(self) -> "Evaluate":
        names = ["held-out", *(s.name for s in self.sets)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two prompt sets are called {', '.join(twice)} (`held-out` is the dataset's own)")
        if unknown := [name for name in self.required or [] if name not in names]:
            raise ValueError(f"`required` names {', '.join(unknown)}; the sets are {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _bound_can_be_met(self) -> "Evaluate":
        most, bound = self.num_steps + 1, self.min_acceptance_length
        if bound is not None and bound > most:
            raise ValueError(
                f"`min_acceptance_length` {bound:g} can never be met: {self.num_steps} tokens drafted (`num_steps`) "
                f"make an acceptance length of at most {most}"
            )
        return self


class Register(Section):
    model_name: str | None = Field(None, description="registered model in MLflow; left out = eagle3-<target's name>")
    experiment: str | None = Field(None, description="MLflow experiment; left out = eyas/<target's name>")
    promote: bool = Field(True, description="make a drafter the `champion` when it is better than the last one")
    margin: Annotated[float, Field(ge=0)] = Field(
        0.0, description="the 95% interval of its lead in acceptance length must lie above this"
    )


class Schedule(Section):
    cron: str | None = Field(None, description="when `eyas serve` starts the pipeline by itself; left out = never")
    timezone: str = Field("UTC", description="of `cron`")
    when_busy: Literal["wait", "skip"] = Field(
        "wait", description="a run that finds this host's GPUs in use by another waits for them, or is skipped"
    )


class Recipe(Section):
    """Everything one run needs. See docs/recipe.md for the keys in words."""

    name: Annotated[str, Field(pattern=NAME)]
    target: Target
    server: Server
    capture: Capture
    data: Data
    regenerate: Regenerate = Regenerate()
    extract: Extract = Extract()
    store: Store = Store()
    dataset: DatasetSection = DatasetSection()
    train: Train
    evaluate: Evaluate = Evaluate()
    register_: Register = Field(default=Register(), alias="register")
    schedule: Schedule = Schedule()

    @model_validator(mode="after")
    def _some_store(self) -> "Recipe":  # not of the section: `eyas datasets` lets the store itself refuse
        uri = self.store.uri
        if "@" in uri:  # not repeated: what stands before the @ may be a secret
            raise ValueError("user info (`...@`) in `store.uri`; put credentials into `store.profile` or environment")
        try:
            parts = urlsplit(uri)
        except ValueError:  # of a host in brackets
            parts = urlsplit("")
        local = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
        if set("?#") & set(uri) or (not local and not (parts.scheme == "s3" and parts.netloc)):
            raise ValueError(f"`store.uri` {uri!r} is no store; s3://bucket/prefix and file:///absolute/folder are")
        return self

    @model_validator(mode="after")
    def _something_serves(self) -> "Recipe":
        attached = self.evaluate.url is not None and self.evaluate.plain_url is not None
        if self.evaluate.enabled and self.server.python is None and not attached:
            raise ValueError(
                "with `server.url` alone nothing can serve the drafter: add `server.python`, or set `evaluate.enabled` "
                "to false and register it unmeasured"
            )
        return self

    @model_validator(mode="after")
    def _samples_truly(self) -> "Recipe":
        if self.evaluate.sampling is not None and self.server.device == "cpu":
            raise ValueError(
                "`evaluate.sampling` with `server.device: cpu`: on a CPU SGLang verifies greedily at any temperature, "
                "so the figures would not be those of sampling; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _servers_apart(self) -> "Recipe":
        servers = self.capture_servers()
        for what, values in (
            ("url", [s.url for s in servers]), ("dump_dir", [s.dump_dir for s in servers]),
            ("port", [s.port for s in servers if s.url is None]),
        ):  # fmt: skip
            named = [value for value in values if value is not None]
            if len(named) != len(set(named)):
                raise ValueError(f"capture.servers: two servers have the same `{what}`; each needs its own")
        return self

    def capture_servers(self) -> list[Server]:
        """The servers states are captured from: `server`, changed by each entry of `capture.servers`."""
        if not self.capture.servers:
            return [self.server]
        servers = []
        for number, entry in enumerate(self.capture.servers, start=1):
            own = entry.model_dump(exclude_unset=True)
            base = self.server.model_dump()
            if self.server.dump_dir and "dump_dir" not in own and "url" not in own and self.server.url is None:
                base["dump_dir"] = f"{self.server.dump_dir}/server-{number}"
            merged = base | own | {key: base[key] | own.get(key, {}) for key in ("flags", "env")}
            servers.append(Server.model_validate(merged))
        return servers

    @property
    def digest(self) -> str:
        """Hex sha256 of the checked recipe: two files that mean the same have the same digest."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """The recipe with every default filled in, as plain JSON types."""
        return self.model_dump(mode="json", by_alias=True)

    def flat(self) -> dict[str, Any]:
        """Dotted key -> value, the form of overrides and of MLflow parameters."""
        return flat(self.as_dict())


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        found |= flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return found
