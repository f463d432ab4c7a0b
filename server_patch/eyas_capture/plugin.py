"""Entry point of the SGLang plugin (group `sglang.srt.plugins`): does nothing without its environment variable."""

import logging
import os
import sys

from eyas_capture import contract

logger = logging.getLogger(__name__)

# Processes that run or start the model have this module; the detokenizer and the like have no business with capture.
_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


def register() -> None:
    """Called by SGLang once in each of its processes, before models are built. Never raises."""
    if not os.environ.get(contract.ENV_DUMP_DIR) or _SCHEDULER_MODULE not in sys.modules:
        return
    # Imported only now, so that an installed but unused plugin costs nothing and can break nothing.
    from eyas_capture.lifecycle import Lifecycle

    try:
        Lifecycle(os.environ).hook()
    except Exception:  # SGLang would log it as well; said here in words that name the consequence
        logger.exception("EYAS CAPTURE IS OFF, serving goes on: the plugin could not start")
