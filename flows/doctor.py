"""`eyas doctor`: every part a recipe needs, asked one by one, with what to do about those that fail."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.environment import state_dir
from flows.workshop import open_section
from hidden_states.errors import Refusal, ServerError
from infra.folders import nearest
from infra.recipe import Recipe
from infra.recipe_file import shortened

ASK_SERVER_ENVIRONMENT = """
import importlib.metadata as m, json
def v(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
plugins = [e.value for e in m.entry_points(group="sglang.srt.plugins")]
names = ("sglang", "torch", "eyas-capture", "eyas-sglang-cpu")
print(json.dumps({**{name: v(name) for name in names}, "plugins": plugins}))
"""
ANSWERS_WITHIN_S = 60
KNOWN_SGLANG = "0.5.23"


def examine(recipe: Recipe) -> list[dict[str, Any]]:
    """Ask every part. Each finding: `part`, `ok`, `says`."""
    checks: list[tuple[str, Callable[[Recipe], str]]] = [
        ("target", _target),
        ("conversations", _conversations),
        ("server", _server),
        ("dump folder", _dump_folder),
        ("store", _store),
        ("MLflow", _mlflow),
        ("Prefect", _prefect),
    ]
    findings = []
    for part, check in checks:
        try:
            findings.append({"part": part, "ok": True, "says": check(recipe)})
        except Refusal as refusal:
            findings.append({"part": part, "ok": False, "says": str(refusal)})
    return findings


def _target(recipe: Recipe) -> str:
    from tasks.planning import TargetShape

    shape = TargetShape.read(Path(recipe.target.model_path), recipe.target.dtype)
    return f"{recipe.target.model_path}: {shape.num_blocks} blocks, hidden size {shape.hidden_size}, {shape.dtype}"


def _conversations(recipe: Recipe) -> str:
    from tasks.planning import make_plan

    plan = make_plan(recipe)
    rows = plan.report.rows if plan.report else 0
    return f"{plan.count} samples of {rows} rows, at most {plan.tokens:,} tokens"


def _server(recipe: Recipe) -> str:
    server = recipe.server
    if server.url is not None:
        from infra.server import attach

        info = attach(server.url).info()
        return f"{server.url} answers: SGLang {info.get('version')}"
    assert server.python is not None
    if shutil.which(server.python) is None:
        raise ServerError("server.python", f"{server.python} is no program", "an interpreter", "Run `make setup`.")
    found = _ask_interpreter(server.python)
    if found["sglang"] is None:
        raise ServerError("server.python", "no SGLang in this environment", None, "Name the interpreter that has it.")
    if not any("eyas_capture" in plugin for plugin in found["plugins"]):
        raise ServerError(
            "server.python", "the capture plugin is not installed there", None,
            f"Run: {server.python} -m pip install --no-deps ./server_patch",
        )  # fmt: skip
    if server.device == "cpu" and found["eyas-sglang-cpu"] is None:
        raise ServerError(
            "server.python", "SGLang does not start on a CPU without eyas-sglang-cpu", None,
            f"Run: {server.python} -m pip install --no-deps ./infra/sglang_cpu",
        )  # fmt: skip
    other = "" if found["sglang"] == KNOWN_SGLANG else f" (Eyas is tested with {KNOWN_SGLANG})"
    return f"SGLang {found['sglang']}{other}, capture plugin {found['eyas-capture']}, torch {found['torch']}"


def _ask_interpreter(python: str) -> dict[str, Any]:
    """What `ASK_SERVER_ENVIRONMENT` prints there."""
    expected, do = "Python 3.10 or later", "Name the interpreter of the environment SGLang is installed in."
    try:
        asked = subprocess.run(
            [python, "-c", ASK_SERVER_ENVIRONMENT], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", check=False, timeout=ANSWERS_WITHIN_S,
        )  # fmt: skip
    except OSError as error:  # a script whose own interpreter is missing, a program of another machine
        raise ServerError(
            "server.python", f"{python} cannot be started ({error.strerror or error})", expected, do
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ServerError(
            "server.python", f"{python} has not answered after {ANSWERS_WITHIN_S} s", expected, do
        ) from error
    if asked.returncode:
        said = asked.stderr.strip()[-300:] or "it says nothing"
        raise ServerError("server.python", f"{python} ends with {asked.returncode}: {said}", expected, do)
    try:
        found = json.loads(asked.stdout.strip().splitlines()[-1])
        return {name: found[name] for name in ("sglang", "torch", "eyas-capture", "eyas-sglang-cpu", "plugins")}
    except (ValueError, IndexError, KeyError, TypeError) as error:
        said = f"it says {asked.stdout.strip()[:100]!r}" if asked.stdout.strip() else "it says nothing"
        raise ServerError("server.python", f"{python} is no Python: {said}", expected, do) from error


def _dump_folder(recipe: Recipe) -> str:
    place = Path(recipe.server.dump_dir or "runs").resolve()
    try:
        existing = nearest(place)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise ServerError(
            shortened(str(place)), f"it cannot be looked up ({error.strerror})", "a folder", "Name another."
        ) from error
    if not existing.is_dir():
        raise ServerError(str(existing), "a file", "a folder", "Name another server.dump_dir.")
    if not os.access(existing, os.W_OK):
        raise ServerError(str(existing), "not writable", None, "Name another server.dump_dir.")
    return f"{place}: {free / 1e9:,.0f} GB free"


def _store(recipe: Recipe) -> str:
    with open_section(recipe.store) as store:
        store.require_conditional_put()
        return f"{recipe.store.uri}: written, read back, not overwritten"


def _mlflow(recipe: Recipe) -> str:
    from tasks.begin import tracking_uri
    from tasks.mlflow_client import mlflow_client, without_password

    return without_password(str(mlflow_client(tracking_uri(state_dir())).tracking_uri))


def _prefect(recipe: Recipe) -> str:
    url = os.environ.get("PREFECT_API_URL")
    if url is None:
        return "none named: `eyas run` starts one for itself (SQLite, loopback)"
    import httpx

    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=10).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"Prefect at {url}", f"no answer ({error})", None, "Is PREFECT_API_URL right?") from error
    return url


def print_findings(answer: dict[str, Any]) -> None:
    """One line a part."""
    console = Console(highlight=False, soft_wrap=True)
    for finding in answer["findings"]:
        console.print(f"{'ok  ' if finding['ok'] else 'FAIL'}  {finding['part']:<14} {finding['says']}", markup=False)
