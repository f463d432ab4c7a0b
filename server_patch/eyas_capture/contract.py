"""The one contract between the capture plugin, which writes dumps, and `hidden_states`, which reads them.

Standard library only: this file is imported inside SGLang's environment and inside the pipeline's.

    <dump dir>/<writer id>/writer.json
                          /req_<counter>/states.safetensors   input_ids [S] int64; after_block_<k> [R,H]; final [R,H]
                          /req_<counter>/record.json

S is the prompt's length, R the rows that were captured: R == S in a complete dump. In an incomplete one the rows are
those of `spans`, in order. Temporary folders of a dump being written are named `.req_<counter>.partial`.

writer.json is rewritten (atomically) at most about once a second and when the writer stops. In it:
`state` is one of WRITER_STATES; `refused` lists in words why nothing is captured (empty while capturing);
`pid_start_time` is field 22 of /proc/<pid>/stat (clock ticks after boot), which tells a live writer from a reused pid;
`totals` has TOTALS_KEYS: captured = complete + sum(incomplete) + sum(lost) + pending, and the next dump's counter is
`captured`. Every prefill that is captured takes one number, in the order of first rows, also when its dump ends up
incomplete or lost. `queue_bytes` are the rows of dumps under way or waiting; `memory_peak_bytes` is the most memory
they took, which is given back a pass at a time, with the last of its dumps.
"""

import array
import hashlib
import re
import sys
from collections.abc import Iterable

VERSION = 1

# Environment variables the plugin reads. DUMP_DIR unset = the plugin does nothing at all.
ENV_DUMP_DIR = "SGLANG_HS_DUMP_DIR"
ENV_AFTER_BLOCK = "SGLANG_HS_AFTER_BLOCK"  # block outputs, e.g. "2,30,58"
ENV_CAPTURE_POINTS = "SGLANG_HS_CAPTURE_POINTS"  # the same in SGLang's numbering, e.g. "3,31,59"; not both
ENV_MODE = "SGLANG_HS_MODE"  # "all" (default) or "opted-in"
ENV_QUEUE_BYTES = "SGLANG_HS_QUEUE_BYTES"  # bound of host memory with rows between the forward pass and the disk
ENV_WHEN_FULL = "SGLANG_HS_WHEN_FULL"  # "block" (default) or "skip"

WRITER_FILE = "writer.json"
STATES_FILE = "states.safetensors"
RECORD_FILE = "record.json"
FINAL = "final"
INPUT_IDS = "input_ids"
CHECKSUM_PREFIX = "sha256:"
PARTIAL_SUFFIX = ".partial"
PARTIAL_GLOB = f".req_*{PARTIAL_SUFFIX}"  # dumps being written, or left so by a crash
OPT_IN_PREFIX = "eyas-"  # request ids that are captured in mode "opted-in"
HEALTH_PREFIX = "HEALTH_CHECK"  # never captured

_REQ = re.compile(r"req_(\d+)")

WRITER_KEYS = (
    "contract", "writer_id", "pid", "pid_start_time", "host", "started_at", "dp_rank", "tp_size", "dp_size", "pp_size",
    "plugin_version", "sglang_version", "model_path", "config_sha256", "architecture", "dtype", "hidden_size", "blocks",
    "after_block", "capture_points", "final_norm", "mode", "flags", "totals", "state", "refused",
)  # fmt: skip
RECORD_KEYS = (
    "contract", "counter", "request_id", "writer_id", "tokens", "spans", "prefix_cached", "tokens_sha256", "checksums",
    "written_at", "complete", "incomplete_reason",
)  # fmt: skip
TOTALS_KEYS = (
    "captured", "complete", "incomplete", "lost", "pending", "bytes", "queue_bytes", "queue_peak_bytes",
    "memory_peak_bytes", "blocked_seconds", "unseen_passes",
)  # fmt: skip

CAPTURING = "capturing"
REFUSED = "refused"  # this server or SGLang release cannot be captured from: see `refused`
BROKEN = "broken"  # capture stopped while serving went on: see `refused`
STOPPED = "stopped"  # the server ended; what the disk had no time for is lost, or pending with a publisher
WRITER_STATES = (CAPTURING, REFUSED, BROKEN, STOPPED)

# Values of `incomplete_reason` and keys of totals.incomplete; of totals.lost too, when there was nothing to write. A
# reader may show any other text as it is.
PREFIX_CACHE = "prefix cache"  # SGLang reused cached rows: send a unique extra_key, or restart with the cache off
ABORTED = "aborted"  # the request ended before its prompt was prefilled
QUEUE_FULL = "queue full"  # the disk was slower than the prefill (SGLANG_HS_WHEN_FULL=skip, or blocked too long)
SERVER_STOPPED = "server stopped"
ADAPTER = "lora adapter"  # the states are not the base model's
NOT_ONLY_TOKENS = "not only tokens"  # images or input embeddings: the token ids do not determine the states
TOKENS_DIFFER = "tokens differ"  # rows belong to other tokens than the request's: never use them
CAPTURE_FAILED = "capture failed"  # half-way: no memory for further rows, or the capture has stopped
INCOMPLETE_REASONS = (
    PREFIX_CACHE, ABORTED, QUEUE_FULL, SERVER_STOPPED, ADAPTER, NOT_ONLY_TOKENS, TOKENS_DIFFER, CAPTURE_FAILED,
)  # fmt: skip


def block_tensor(block: int) -> str:
    """Tensor name of the output of decoder block `block` (0-based)."""
    return f"after_block_{block}"


def dump_name(counter: int) -> str:
    """Folder name of dump number `counter` of a writer."""
    return f"req_{counter}"


def partial_name(counter: int) -> str:
    """Folder name of dump number `counter` while it is being written."""
    return f".{dump_name(counter)}{PARTIAL_SUFFIX}"


def parse_dump_name(name: str) -> int | None:
    """The counter in a published dump's folder name; None for anything else (temporary folders, other files)."""
    match = _REQ.fullmatch(name)
    return int(match[1]) if match else None


def tokens_sha256(ids: Iterable[int]) -> str:
    """Hex sha256 of token ids as little-endian int64: the identity of what was sent and of what was captured."""
    packed = array.array("q", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.sha256(packed.tobytes()).hexdigest()


def tensor_checksum(data: "bytes | memoryview") -> str:
    """`sha256:<hex>` of a tensor's raw row-major little-endian bytes, as safetensors stores them."""
    return CHECKSUM_PREFIX + hashlib.sha256(data).hexdigest()
