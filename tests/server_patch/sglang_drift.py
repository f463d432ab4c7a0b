"""Runs inside SGLang's environment: what the plugin makes of this SGLang, and of one whose functions have changed.

Prints one JSON object. argv: names of command-line flags to look up.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from eyas_capture import contract, hooks
from eyas_capture.lifecycle import Lifecycle
from eyas_capture.refusals import Drift


def drift() -> str | None:
    """What the check of SGLang's functions says; None when it knows them all."""
    try:
        hooks.check_sglang()
    except Drift as error:
        return str(error)
    return None


def main() -> None:
    """Ask as it is, then change two of the hooked functions and ask again."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    found: dict[str, Any] = {"unknown_flags": sorted(set(sys.argv[1:]) - known), "stock": drift()}

    Lifecycle(os.environ).hook()
    found["registered"] = sorted(HookRegistry._hooks)
    HookRegistry.reset()

    def init_new(scheduler_batch: Any, runner: Any) -> None:
        """A function of the same name in another release."""

    ForwardBatch.init_new = init_new
    del Req.finished
    found["changed"] = drift()
    Lifecycle(os.environ).hook()
    found["hooked"] = sorted(HookRegistry._hooks)
    files = Path(os.environ[contract.ENV_DUMP_DIR]).glob(f"*/{contract.WRITER_FILE}")
    found["writers"] = [json.loads(file.read_text()) for file in files]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
