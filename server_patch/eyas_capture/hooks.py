"""Where the plugin touches SGLang, and the check that SGLang still is what it knows."""

import inspect
import pkgutil
from typing import Any

from eyas_capture.refusals import Drift

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
INIT_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
EVENT_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
# While serving: a dump of the new weights must not carry the digest of the old.
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
NEW_WEIGHTS = (
    *(f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
    f"{_UPDATER}.begin_weight_update",  # comes before others' writes straight into this process's memory
)
REGISTER = "sglang.srt.plugins.hook_registry.HookRegistry.register"

# Hooked or called functions -> the parameters the plugin relies on, in this order from the first.
_SIGNATURES = {
    LOAD_MODEL: ("self",),
    INIT_BATCH: ("batch", "model_runner"),
    EVENT_LOOP: ("self",),
    **dict.fromkeys(NEW_WEIGHTS, ("self",)),
    REGISTER: ("target", "hook", "hook_type"),
    "sglang.srt.managers.schedule_batch.Req.finished": ("self",),
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative": ("self",),
}
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_BATCH_FIELDS = ("forward_mode", "input_ids", "rids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
_REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"
# Of a request, what makes its states other than those of its token ids: given embeddings, or another mask.
_BESIDES_TOKENS = ("input_embeds", "positional_embed_overrides", "token_type_ids", "multi_item_delimiter_indices")
BESIDES_TOKENS = ("multimodal_inputs", *_BESIDES_TOKENS)
_REQUEST_FIELDS = ("rid", "origin_input_ids", "sampling_params", "lora_id", *_BESIDES_TOKENS)
_MODEL_FORWARD = ("input_ids", "positions", "forward_batch")


def check_sglang() -> None:
    """Compare what is hooked with what the plugin was written for. Raises Drift naming everything that changed."""
    changed = [text for path, wanted in _SIGNATURES.items() if (text := _difference(path, wanted))]
    for path, fields, kind in ((_BATCH, _BATCH_FIELDS, "field"), (_REQUEST, _REQUEST_FIELDS, "parameter")):
        found = _parameters(path)
        if found is None:
            changed.append(f"{path} is gone")
        else:
            changed += [f"{path} has no {kind} {name}" for name in fields if name not in found]
    if changed:
        raise Drift("SGLang differs from what this plugin knows: " + "; ".join(changed))


def check_forward(model: Any) -> None:
    """The inner model's forward must begin with the three arguments that are read. Raises Drift."""
    found = tuple(inspect.signature(model.forward).parameters)
    if found[: len(_MODEL_FORWARD)] != _MODEL_FORWARD:
        raise Drift(f"{type(model).__name__}.forward takes {found}, expected {_MODEL_FORWARD} first")


def _difference(path: str, wanted: tuple[str, ...]) -> str | None:
    found = _parameters(path)
    if found is None:
        return f"{path} is gone"
    if found[: len(wanted)] != wanted:
        return f"{path} takes {found}, expected {wanted} first"
    return None


def _parameters(path: str) -> tuple[str, ...] | None:
    try:
        return tuple(inspect.signature(pkgutil.resolve_name(path)).parameters)
    except (ImportError, AttributeError):
        return None
