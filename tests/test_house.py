"""The house rules that a program can check: who imports whom, how long a file is, what no file says."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MADE_BY_TOOLS = {".git", ".venv", ".venv-sglang", ".eyas", "runs", "build", "mlruns", "node_modules"}
LONGEST_FILE = 400  # lines; the aim is 300

ROOMS = {"flows", "tasks", "hidden_states", "drafter", "infra", "eyas_capture", "eyas_sglang_cpu"}
CONTRACT = "eyas_capture.contract"
STEPS_ONLY = {"prefect", "mlflow"}
NO_SERVERS = {*STEPS_ONLY, "sglang", "httpx", "requests", "aiohttp", "urllib3", "http", "urllib", "fastapi", "uvicorn"}

# What each room may import of ours. A module's name stands for itself and everything below it.
MAY_IMPORT = {
    "flows": {"flows", "tasks", "drafter", "hidden_states", "infra", CONTRACT},
    "tasks": {"tasks", "drafter", "hidden_states", "infra", CONTRACT},
    "drafter": {"drafter", "hidden_states"},
    "hidden_states": {"hidden_states", CONTRACT},
    "infra": {"infra", "hidden_states.errors", CONTRACT},
    "server_patch/eyas_capture": {"eyas_capture"},
    "infra/sglang_cpu": {"eyas_sglang_cpu"},
}
# Where a room's package names start, when that is not the checkout.
PACKAGE_ROOTS = {"server_patch/eyas_capture": ROOT / "server_patch", "infra/sglang_cpu": ROOT / "infra" / "sglang_cpu"}
NO_SERVER_IN_THEM = {"urllib.parse", "urllib3.exceptions"}  # boto3 lets urllib3's errors through
SERVER_SIDE = {"torch", "safetensors", "numpy", "sglang", "eyas_capture"}


def files(*suffixes: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in MADE_BY_TOOLS and not f.endswith(("_cache", "__", ".egg-info"))]
        folders[:] = [f for f in folders if not f.startswith(".") or f == ".ci"]
        yield from (Path(folder) / name for name in names if not suffixes or name.endswith(suffixes))


def room_of(path: Path) -> str | None:
    """The innermost room of `MAY_IMPORT` the file lies in."""
    inside = [room for room in MAY_IMPORT if path.is_relative_to(ROOT / room)]
    return max(inside, key=len, default=None)


def imports(path: Path, package_root: Path = ROOT) -> set[str]:
    """Full names of everything a file imports, at any depth of its code, relative imports resolved.

    `from a import b` gives both a and a.b: b may be a module or a name in one.
    """
    package = path.relative_to(package_root).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def covers(allowed: set[str], name: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in allowed)


def top(name: str) -> str:
    return name.split(".")[0]


def python_files(room: str) -> list[Path]:
    return [path for path in files(".py") if room_of(path) == room]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    found = python_files(room)
    assert found, f"{room} has no Python file"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in found
        for name in sorted(imports(path, PACKAGE_ROOTS.get(room, ROOT)))
        if top(name) in ROOMS and not covers(MAY_IMPORT[room], name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ["hidden_states", "drafter"])
def test_the_libraries_know_no_orchestrator_and_no_server(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(room)
        for name in sorted(imports(path))
        if top(name) in NO_SERVERS and not covers(NO_SERVER_IN_THEM, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_flows_and_tasks_import_prefect_and_mlflow() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for room in set(MAY_IMPORT) - {"flows", "tasks"}
        for path in python_files(room)
        if {top(name) for name in imports(path, ROOT)} & STEPS_ONLY
    ]
    assert not wrong, wrong


def test_the_plugin_needs_nothing_that_sglang_does_not_have() -> None:
    room = "server_patch/eyas_capture"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(room)
        for name in sorted(imports(path, PACKAGE_ROOTS[room]))
        if top(name) not in SERVER_SIDE | sys.stdlib_module_names
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", ["infra/lifeline.py", "server_patch/eyas_capture/contract.py"])
def test_what_must_run_anywhere_needs_the_standard_library_only(file: str) -> None:
    assert {top(name) for name in imports(ROOT / file)} <= sys.stdlib_module_names


def test_no_file_is_too_long_to_read() -> None:
    long = {str(p.relative_to(ROOT)): n for p in files(".py") if (n := len(p.read_text().splitlines())) >= LONGEST_FILE}
    assert not long, long


def test_no_file_leans_on_one_workplace_or_leaves_work_for_later() -> None:
    # Put together here, so that this file does not find itself.
    forbidden = re.compile(
        "|".join(["(?<![\\w.])/wo" + "rk/", r"\.\./sha" + "red", r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b"])
    )
    wrong = []
    for path in files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        wrong += [
            f"{path.relative_to(ROOT)}:{n}: {line[:100]}" for n, line in enumerate(lines, 1) if forbidden.search(line)
        ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_drawer_for_things_without_a_name() -> None:
    nameless = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert not [str(p.relative_to(ROOT)) for p in files(".py") if p.name in nameless]


def test_a_benchmark_says_what_it_asks_and_can_be_run() -> None:
    modules = {p.stem: p for p in (ROOT / "benchmarks").glob("*.py") if p.name != "__init__.py"}
    shared = {name.split(".")[1] for p in modules.values() for name in imports(p) if name.startswith("benchmarks.")}
    wrong = []
    for name, path in modules.items():
        module = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(module):
            wrong.append(f"{name}: no docstring; it is the question the benchmark answers")
        runs = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in module.body)
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)
        if name not in shared and not (runs and has_main):
            wrong.append(f"{name}: neither run by itself (a main) nor used by another benchmark")
    assert not wrong, "\n".join(wrong)


# --- the checks themselves -------------------------------------------------------------------------------------------


def test_imports_are_found_wherever_they_hide(tmp_path: Path) -> None:
    package = tmp_path / "room"
    package.mkdir()
    file = package / "noun.py"
    file.write_text(
        "from __future__ import annotations\nimport a.b, c as d\nfrom e import f\n"
        "from . import near\nfrom .g import h\n"
        "def late():\n    import mlflow.pyfunc\n    '''import not_this'''\n"
        "if True:\n    from prefect import task\n"
    )
    assert imports(file, tmp_path) == {
        "__future__.annotations", "a.b", "c", "e.f", "room.near", "room.g.h", "mlflow.pyfunc", "prefect.task",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("hidden_states.errors.Refusal", True), ("hidden_states.errors", True), ("hidden_states.errors_too", False)],
)
def test_a_module_stands_for_what_is_below_it_only(name: str, allowed: bool) -> None:
    assert covers({"hidden_states.errors"}, name) is allowed
