"""Real SGLang servers for tests, on the CPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.server import CPU_ENV, CPU_FLAGS, ServerSpec, SGLangServer

REPOSITORY = Path(__file__).parent.parent
SGLANG_PYTHON = REPOSITORY / ".venv-sglang/bin/python"  # made by `make setup`
READY_DEADLINE_S = 300.0  # 15 s on two idle cores, but tests share them


def cpu_spec(
    model: Path, folder: Path, *, draft: Path | None = None, env: Mapping[str, str] | None = None, **flags: Any
) -> ServerSpec:
    """A spec for a tiny model; log and pid file go to `folder`. Flags with underscores: `chunked_prefill_size=64`."""
    folder.mkdir(parents=True, exist_ok=True)
    return ServerSpec(
        python=SGLANG_PYTHON,
        model_path=model,
        log_path=folder / "sglang.log",
        pid_file=folder / "sglang.pid",
        flags=CPU_FLAGS | {key.replace("_", "-"): value for key, value in flags.items()},
        env=CPU_ENV | {"OMP_NUM_THREADS": "1"} | dict(env or {}),  # tiny models have nothing to share between threads
        draft_path=draft,
    )


@contextmanager
def running_server(
    model: Path, folder: Path, *, draft: Path | None = None, env: Mapping[str, str] | None = None, **flags: Any
) -> Iterator[SGLangServer]:
    """A server that is ready, ended on exit. Arguments as for `cpu_spec`."""
    with SGLangServer(cpu_spec(model, folder, draft=draft, env=env, **flags)) as server:
        server.wait_ready(READY_DEADLINE_S)
        yield server
