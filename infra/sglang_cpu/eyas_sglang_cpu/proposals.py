"""What the drafter proposes, written to a file: lets a test compare the served drafter with a reference of its own.

`EYAS_CPU_PROPOSALS_LOG=FILE` appends one JSON line per request and verification:

    {"rid": "a", "length": 21, "last_token": 7, "drafted": [12, 3, 99]}

`length` counts the committed tokens, prompt and output, `last_token` included; `drafted` are target ids proposed for
the positions from `length` on. A request that ends while the next pass is already under way gets one line more.
"""

import json
import os

LOG_VARIABLE = "EYAS_CPU_PROPOSALS_LOG"


def register() -> None:
    """Hook the verification step if the variable is set."""
    path = os.environ.get(LOG_VARIABLE)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def write(worker, batch, *args, **kwargs) -> None:
        if batch.forward_mode.is_idle():
            return
        chains = batch.spec_info.draft_token.view(len(batch.reqs), -1).tolist()
        with open(path, "a", encoding="utf-8") as log:
            for request, cached, chain in zip(batch.reqs, batch.seq_lens.tolist(), chains, strict=True):
                # The last committed token is the first of the chain; SGLang's length counts the cached ones before it.
                line = {"rid": request.rid, "length": cached + 1, "last_token": chain[0], "drafted": chain[1:]}
                log.write(json.dumps(line) + "\n")

    HookRegistry.register("sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify", write, HookType.BEFORE)
