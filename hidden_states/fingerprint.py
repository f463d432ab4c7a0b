"""The fingerprint: everything that must be equal for states to be comparable, named field by field."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hidden_states.errors import DataError
from hidden_states.record import Writer

Field = str | int | list[int] | list[str]

FULL_HASH_BYTES = 8 << 30  # up to here weights are hashed in full (6 s a core at 1.4 GB/s); above, by sample
SAMPLE_BLOCKS = 64  # blocks of SAMPLE_BYTES a file, evenly spread, the last one at its end
SAMPLE_BYTES = 64 << 10
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt",
)  # fmt: skip
_TOKENIZER_PATTERNS = ("*.tiktoken", "tiktoken.model", "tokenization_*.py")


@dataclass(frozen=True)
class Fingerprint:
    """Named fields; two captures may be mixed only when all of them are equal."""

    fields: Mapping[str, Field]

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise TypeError(f"a fingerprint of {self.fields!r}")

    @property
    def digest(self) -> str:
        """Hex sha256 of the fields as canonical JSON."""
        text = json.dumps(dict(self.fields), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def short(self) -> str:
        """The first 16 hex digits, as they stand in object names."""
        return self.digest[:16]

    def differences(self, other: "Fingerprint") -> list[str]:
        """One line a field that differs, `name: ours / theirs`, in the order of names."""
        names = sorted({*self.fields, *other.fields})
        absent = "(absent)"
        return [
            f"{name}: {self.fields.get(name, absent)} / {other.fields.get(name, absent)}"
            for name in names
            if self.fields.get(name, absent) != other.fields.get(name, absent)
        ]


def capture_fingerprint(
    target_folder: Path, *, mask_rule: str, writer: Writer, template: str | None = None
) -> Fingerprint:
    """The fingerprint of what a writer captures of the target in a folder.

    Args:
        mask_rule: how loss masks were made, in one line; another rule is another dataset.
        template: a chat template that replaces the target's own.

    Raises:
        DataError: the folder is no target, or the writer refused to capture.
    """
    return Fingerprint({**target_fields(target_folder, template), "mask_rule": mask_rule, **writer_fields(writer)})


def writer_fields(writer: Writer) -> dict[str, Field]:
    """What a writer says of its states: `after_block`, `final_norm`, `dtype`, `sglang_version`, `plugin_version`.

    Raises:
        DataError: it refused to capture.
    """
    names = ("after_block", "final_norm", "dtype", "sglang_version", "plugin_version")
    said = {name: getattr(writer, name) for name in names}
    unsaid = [name for name, value in said.items() if not value]
    if unsaid:
        raise DataError(
            f"writer {writer.writer_id}", f"no {', '.join(unsaid)}", None, "It refused to capture: see its log."
        )
    return {**said, "after_block": list(said["after_block"])}


def target_fields(target_folder: Path, template: str | None = None) -> dict[str, Field]:
    """Digests of what makes the target: `weights`, `config`, `tokenizer`, `template`.

    Raises:
        DataError: no config.json or no weights in the folder, or its tokenizer's files cannot be read.
    """
    config = target_folder / "config.json"
    if not config.is_file():
        raise DataError(str(target_folder), "no config.json", "a Hugging Face model folder", "Correct target.path.")
    try:
        return {
            "weights": weights_digest(target_folder),
            "config": _sha256(config.read_bytes()),
            "tokenizer": _tokenizer_digest(target_folder),
            "template": _sha256((_template(target_folder) if template is None else template).encode()),
        }
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            str(target_folder), f"its tokenizer's files cannot be read ({error})", "a complete Hugging Face folder",
            "Copy the model again, with all its files.",
        ) from error  # fmt: skip


def weights_digest(target_folder: Path) -> str:
    """`full:<hex>` or `sampled:<hex>`: sha256 over name, size and digest of each weight file, in the order of names.

    A file's digest is that of all its bytes while the target has at most FULL_HASH_BYTES. Beyond (600 GB of Kimi would
    take ten minutes at every start) it covers SAMPLE_BLOCKS blocks spread over the file, of which the first holds the
    safetensors header or its beginning and the last the end. A fine-tune changes every block of a tensor, so this tells
    checkpoints apart; it is no proof against somebody who alters single values on purpose.

    Raises:
        DataError: no weight files.
    """
    files = sorted(target_folder.glob("*.safetensors")) or sorted(target_folder.glob("*.bin"))
    if not files:
        raise DataError(str(target_folder), "no *.safetensors or *.bin", "the target's weights", "Correct target.path.")
    sizes = {path: path.stat().st_size for path in files}
    full = sum(sizes.values()) <= FULL_HASH_BYTES
    lines = [f"{path.name}\t{size}\t{_file_digest(path, size, full)}\n" for path, size in sizes.items()]
    return f"{'full' if full else 'sampled'}:{_sha256(''.join(lines).encode())}"


def _file_digest(path: Path, size: int, full: bool) -> str:
    with open(path, "rb") as file:
        if full:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha = hashlib.sha256()
        last = max(0, size - SAMPLE_BYTES)
        for index in range(SAMPLE_BLOCKS):
            file.seek(last * index // (SAMPLE_BLOCKS - 1))
            sha.update(file.read(SAMPLE_BYTES))
        return sha.hexdigest()


def _tokenizer_digest(target_folder: Path) -> str:
    """Over the tokenizer's files but not its chat template, which is a field of its own."""
    names = set(_TOKENIZER_FILES) | {
        path.name for pattern in _TOKENIZER_PATTERNS for path in target_folder.glob(pattern)
    }
    lines = []
    for name in sorted(names):
        path = target_folder / name
        if path.is_file():
            data = path.read_bytes()
            if name == "tokenizer_config.json":
                config = json.loads(data)
                config.pop("chat_template", None)
                data = json.dumps(config, sort_keys=True).encode()
            lines.append(f"{name}\t{_sha256(data)}\n")
    return _sha256("".join(lines).encode())


def _template(target_folder: Path) -> str:
    own = target_folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    config = target_folder / "tokenizer_config.json"
    inside = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return inside if isinstance(inside, str) else json.dumps(inside, sort_keys=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
