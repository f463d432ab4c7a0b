"""Dumps as the capture plugin writes them, from a transformers forward of a tiny model: no server needed.

target = make_tiny("llama", tmp_path / "target")          # tests/tiny_models.py
factory = DumpFactory(tmp_path / "dumps", target, after_block=(1, 2, 4))
factory.write(request_id, input_ids)                      # publishes req_0
factory.write(request_id, input_ids, states=changed)      # any states instead of the model's own
"""

import copy
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from eyas_capture import contract


@dataclass
class DumpFactory:
    """One writer in a dump folder; its counter goes on with each dump.

    Attributes:
        target: Hugging Face folder of the model whose states are written.
        dtype: dtype the model computes in.
    """

    folder: Path
    target: Path
    after_block: tuple[int, ...] = (1, 2, 4)
    dtype: str = "float32"
    writer_id: str = "20261129T150000-4121"
    counter: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    computed: dict[tuple[int, ...], dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(self.target, dtype=getattr(torch, self.dtype))
        self.model: PreTrainedModel = loaded.eval()
        self.write_writer()

    def elsewhere(self, folder: Path, writer_id: str | None = None) -> "DumpFactory":
        """A new writer (counter 0) in another folder, with the model that is already loaded."""
        made = copy.copy(self)
        made.folder, made.writer_id, made.counter = folder, writer_id or self.writer_id, 0
        made.write_writer()
        return made

    def write_writer(self, **changes: Any) -> None:
        """(Re)write writer.json; `changes` replace fields."""
        config = self.model.config
        facts = {
            "contract": contract.VERSION, "writer_id": self.writer_id, "pid": os.getpid(), "pid_start_time": 1,
            "host": "test", "started_at": "2026-11-29T15:00:00+00:00", "dp_rank": None, "tp_size": 1, "dp_size": 1,
            "pp_size": 1, "plugin_version": "0.1.0", "sglang_version": "0.5.23", "model_path": str(self.target),
            "config_sha256": hashlib.sha256((self.target / "config.json").read_bytes()).hexdigest(),
            "architecture": type(self.model).__name__, "dtype": self.dtype, "hidden_size": config.hidden_size,
            "blocks": config.num_hidden_layers, "after_block": list(self.after_block),
            "capture_points": [block + 1 for block in self.after_block], "final_norm": "post", "mode": "all",
            "flags": {}, "totals": {"captured": self.counter}, "state": contract.CAPTURING, "refused": [],
        }  # fmt: skip
        self.facts = facts | changes
        path = self.folder / self.writer_id / contract.WRITER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.facts))

    def states(self, input_ids: list[int]) -> dict[str, torch.Tensor]:
        """What a right dump of these tokens holds, in its order: the caller's own copies."""
        known = self.computed.get(tuple(input_ids))
        if known is None:
            known = self.computed[tuple(input_ids)] = self._forward(input_ids)
        return {name: tensor.clone() for name, tensor in known.items()}

    @torch.no_grad()
    def _forward(self, input_ids: list[int]) -> dict[str, torch.Tensor]:
        outputs: dict[int, torch.Tensor] = {}
        decoder = self.model.get_decoder()
        hooks = [
            decoder.layers[block].register_forward_hook(
                lambda _module, _args, out, block=block: outputs.__setitem__(
                    block, (out if isinstance(out, torch.Tensor) else out[0])[0].clone()
                )
            )
            for block in self.after_block
        ]
        final = decoder(input_ids=torch.tensor([input_ids]), use_cache=False).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        made = {contract.INPUT_IDS: torch.tensor(input_ids)}
        made |= {contract.block_tensor(block): outputs[block] for block in self.after_block}
        return made | {contract.FINAL: final}

    def write(
        self,
        request_id: str,
        input_ids: list[int],
        states: dict[str, torch.Tensor] | None = None,
        **record: Any,
    ) -> Path:
        """Publish a dump with honest checksums of whatever states it is given; `record` replaces record fields."""
        tensors = self.states(input_ids) if states is None else states
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        path = self.folder / self.writer_id / contract.dump_name(self.counter)
        path.mkdir(parents=True)
        write_safetensors(tensors, path / contract.STATES_FILE)
        facts = {
            "contract": contract.VERSION, "counter": self.counter, "request_id": request_id,
            "writer_id": self.writer_id, "tokens": len(input_ids), "spans": [[0, len(input_ids)]], "prefix_cached": 0,
            "tokens_sha256": contract.tokens_sha256(input_ids),
            "checksums": {name: contract.tensor_checksum(raw_bytes(tensor)) for name, tensor in tensors.items()},
            "written_at": "2026-11-29T15:00:01.000+00:00", "complete": True, "incomplete_reason": None,
        }  # fmt: skip
        (path / contract.RECORD_FILE).write_text(json.dumps(facts | record))
        self.counter += 1
        return path


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes as safetensors stores them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors in the order given (the library's own writer sorts them by dtype and name)."""
    header, offset = {}, 0
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw_bytes(t) for t in tensors.values()))
