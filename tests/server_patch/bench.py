"""A capture with a model that is easy to check: what a scheduler would do with it, step by step."""

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from eyas_capture import contract
from eyas_capture.capture import Capture
from eyas_capture.identity import Identity
from eyas_capture.layers import CaptureLayers
from eyas_capture.writer import Writer
from tests.server_patch.test_layers import Llama

H = 4
AFTER_BLOCK = (1, 3)


class Request:
    """What the plugin reads of SGLang's Req."""

    def __init__(self, rid: str, tokens: int, n: int = 1, max_new_tokens: int = 1) -> None:
        self.rid = rid
        self.origin_input_ids = array("q", [hash((rid, k)) % 1000 for k in range(tokens)])
        self.sampling_params = SimpleNamespace(n=n, max_new_tokens=max_new_tokens)
        self.lora_id: str | None = None
        self.multimodal_inputs: Any = None
        self.input_embeds: Any = None
        self.positional_embed_overrides: Any = None
        self.token_type_ids: Any = None
        self.multi_item_delimiter_indices: Any = None
        self.to_finish: Any = None
        self.over = False

    def finished(self) -> bool:
        return self.over


class Mode:
    def __init__(self, prefill: bool) -> None:
        self.prefill = prefill

    def is_extend_without_speculative(self) -> bool:
        return self.prefill


class Model:
    """A pass whose rows tell which token they belong to and which block made them."""

    def __init__(self, packed: bool) -> None:
        self.llama = Llama(6)
        self.packed = packed
        self.passes = 0

    def forward(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any) -> Any:
        self.passes += 1
        final = input_ids[:, None].repeat(1, H).float()
        on = self.llama.model.layers_to_capture
        if not on:
            return final
        aux = [final + 1000 * point for point in on]
        return final, torch.cat(aux, dim=-1) if self.packed else aux


class Bench:
    """A capture with its model and writer; `run` is one scheduler step."""

    def __init__(
        self, folder: Path, mode: str = "all", packed: bool = True, queue_bytes: int = 0, ranks: int = 1
    ) -> None:
        """With `queue_bytes` the queue is that long, and does not wait for the disk."""
        self.model = Model(packed)
        self.writer = Writer(Identity(folder, None, {}), queue_bytes or 1 << 20, wait_when_full=not queue_bytes)
        layers = CaptureLayers(self.model.llama, AFTER_BLOCK)
        self.capture = Capture(layers, mode, self.writer, ranks)
        self.writer.start(lambda: None)
        self.folder = self.writer.identity.folder

    def batch(self, parts: list[tuple[Request, int, int]], prefill: bool = True) -> Any:
        """(request, start, stop) of each; rows at and beyond the prompt's end are made-up output tokens."""
        ids = [r.origin_input_ids[k] if k < len(r.origin_input_ids) else -1 for r, a, b in parts for k in range(a, b)]
        return SimpleNamespace(
            forward_mode=Mode(prefill),
            rids=[r.rid for r, _, _ in parts],
            extend_seq_lens_cpu=[b - a for _, a, b in parts],
            extend_prefix_lens_cpu=[a for _, a, _ in parts],
            input_ids=torch.tensor(ids),
        )

    def announce(self, parts: list[tuple[Request, int, int]], prefill: bool = True) -> Any:
        batch = self.batch(parts, prefill)
        self.capture.announce([r for r, _, _ in parts], batch)
        return batch

    def run(self, parts: list[tuple[Request, int, int]], prefill: bool = True) -> None:
        batch = self.announce(parts, prefill)
        result = self.capture.forward(self.model.forward, (batch.input_ids, None, batch), {})
        assert isinstance(result, torch.Tensor), "the caller must see what the stock model returns"
        assert torch.equal(result[:, 0], batch.input_ids.float())

    def end(self) -> dict[str, dict[str, Any]]:
        """Every record by request id, each checked against the model."""
        assert self.writer.stop(10)
        records = {}
        for path in self.folder.glob("req_*"):
            record = json.loads((path / contract.RECORD_FILE).read_text())
            tensors = load_file(path / contract.STATES_FILE)
            rows = [k for a, b in record["spans"] for k in range(a, b)]
            expected = tensors[contract.INPUT_IDS][rows].float()[:, None].expand(-1, H)
            assert torch.equal(tensors[contract.FINAL], expected)
            for block in AFTER_BLOCK:
                assert torch.equal(tensors[contract.block_tensor(block)], expected + 1000 * (block + 1))
            assert record["request_id"] not in records, "one dump a request"
            records[record["request_id"]] = record
        return records

    @property
    def totals(self) -> dict[str, Any]:
        return self.writer.totals.as_json()
