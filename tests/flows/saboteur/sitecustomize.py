"""On the path of a program under test: it dies, or refuses, when it enters the step that a file names.

`EYAS_TEST_SABOTAGE` is the file, one line: `kill <step>` or `refuse <step>`. It is taken away as it takes effect, so
that a retry passes. Nothing of Eyas knows about it.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ORDERS = Path(os.environ.get("EYAS_TEST_SABOTAGE", "/nonexistent"))


class OnImport(importlib.abc.MetaPathFinder):
    """Patches `tasks.job` once it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "tasks.job":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_patch(module: ModuleType) -> None:
                load(module)
                patch(module)

            spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def patch(module: ModuleType) -> None:
    clock, note = module.Job.clock, module.Job.note

    @contextlib.contextmanager
    def clocked(job: Any, step: str) -> Iterator[None]:
        obey(step)
        with clock(job, step):
            yield

    def noted(job: Any, event: str, **facts: Any) -> None:
        note(job, event, **facts)
        if event == "batch begun":
            obey("extract batch")

    module.Job.clock, module.Job.note = clocked, noted


def obey(step: str) -> None:
    try:
        order, _, where = ORDERS.read_text().strip().partition(" ")
    except OSError:
        return
    if where != step:
        return
    with contextlib.suppress(FileNotFoundError):
        ORDERS.unlink()
    if order == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    from hidden_states.errors import DatasetError

    raise DatasetError(step, "sabotage", None, "Retry it.")


if ORDERS.parent.is_dir():
    sys.meta_path.insert(0, OnImport())
