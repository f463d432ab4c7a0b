"""Running `eyas` as a user does, in a folder of its own; and what it leaves behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.tiny_models import make_tiny

CHECKOUT = Path(__file__).parents[2]
SGLANG = CHECKOUT / ".venv-sglang" / "bin" / "python"
EYAS = [sys.executable, "-m", "flows.cli"]
ELSEWHERE = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "EYAS_HOME")


@dataclass
class Place:
    """A working folder with state, recipes and runs of its own."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def command(*args: str) -> list[str]:
        return [*EYAS, *args]

    def start(self, *args: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k not in ELSEWHERE and not k.startswith("PREFECT")}
        env |= {"PYTHONPATH": str(CHECKOUT), **self.env}
        return subprocess.Popen(
            self.command(*args), cwd=self.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *args: str, timeout: float = 550) -> tuple[int, str]:
        """Exit code and all output."""
        process = self.start(*args)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            raise AssertionError(f"eyas {' '.join(args)} took more than {timeout} s:\n{output}") from None
        return process.returncode, output

    def summaries(self) -> list[dict[str, Any]]:
        """Summaries of the runs that went to their end, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("runs/*/summary.json"))]

    def processes(self) -> list[psutil.Process]:
        """Every living process started from here: by its working folder, which SGLang's renaming does not hide."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:  # gone, or somebody else's
                continue
        return found

    def wait_empty(self, deadline_s: float) -> list[str]:
        """What still runs after at most so many seconds."""
        wait_for(lambda: not self.processes(), deadline_s)
        return [" ".join(process.cmdline()) for process in self.processes()]


def wait_for(happened: Callable[[], bool], deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def tiny_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """A recipe for a tiny random DeepSeek-V3 (MLA and MoE, as in Kimi-K2.5), and the data it needs, in `folder`.

    Args:
        sections: keys to set, by section.
    """
    model = folder / "tiny-deepseek-v3"
    if not model.exists():
        make_tiny("deepseek_v3", model)
    conversations = folder / "conversations.jsonl"
    if not conversations.exists():
        rows = [
            {"messages": [{"role": "user", "content": f"def f{i}(x): return x + {i * 7}  # explain"}]}
            for i in range(40)
        ]
        conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content: dict[str, Any] = {
        "name": "tiny",
        "target": {"model_path": str(model), "dtype": "float32"},
        "server": {"python": str(SGLANG), "device": "cpu", "ready_deadline_s": 200, "max_in_flight_requests": 8},
        "capture": {"after_block": [1, 2, 4]},
        "data": {"conversations": [str(conversations)], "held_out_share": 0.2, "max_tokens": 128},
        "regenerate": {"max_new_tokens": 12},
        "extract": {"batch_tokens": 300},
        "train": {"draft_vocab_size": 256, "ttt_steps": 3, "lr": 1e-3, "steps": 6, "warmup_steps": 2,
                  "batch_tokens": 512, "eval_every": 3, "checkpoint_every": 2},
        "evaluate": {"prompts": 2, "max_new_tokens": 12, "control": False},
    }  # fmt: skip
    for section, keys in sections.items():
        content[section] = {**content.get(section, {}), **keys}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
