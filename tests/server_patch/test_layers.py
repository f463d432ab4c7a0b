"""Setting the model's own capture, reading it back, and leaving the model as it was."""

import re
from typing import Any

import pytest
import torch

from eyas_capture.layers import CaptureLayers, LayersError, default_blocks


class Block(torch.nn.Module):
    pass


class Inner(torch.nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.layers_to_capture: list[int] = []


class LlamaModel(Inner):
    """By its name, one that was compared with a reference."""


class Llama(torch.nn.Module):
    """llama.py and most others: id k is the output of block k."""

    def __init__(self, blocks: int = 61) -> None:
        super().__init__()
        self.model = LlamaModel(blocks)
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [k + 1 for k in ids]


class DeepSeek(Llama):
    """deepseek_v2.py: adds 1 only when the first id is 1."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [k + 1 for k in ids] if ids[0] == 1 else list(ids)

    def set_dflash_layers_to_capture(self, ids: list[int]) -> None:
        super().set_eagle3_layers_to_capture(ids)


class QwenMoe(Llama):
    """qwen2_moe.py: marks blocks, and never takes a mark away."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        super().set_eagle3_layers_to_capture(ids)
        for k in self.model.layers_to_capture:
            self.model.layers[k]._is_layer_to_capture = True


class Lfm2(torch.nn.Module):
    """lfm2.py: works the flag out, and lets nobody set it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner(61)

    @property
    def capture_aux_hidden_states(self) -> bool:
        return bool(self.model.layers_to_capture)

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [k + 1 for k in ids]


class RawIds(Llama):
    """A file nobody has seen yet: takes ids raw, and marks blocks."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = list(ids)
        for k in ids:
            self.model.layers[k]._is_layer_to_capture = True


class Wrapper(torch.nn.Module):
    """kimi_k25.py: the text model inside a multimodal one."""

    def __init__(self, text: torch.nn.Module) -> None:
        super().__init__()
        self.vision_tower = Block()
        self.language_model = text

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.language_model.set_eagle3_layers_to_capture(ids)

    def set_dflash_layers_to_capture(self, ids: list[int]) -> None:
        self.language_model.set_dflash_layers_to_capture(ids)


def state(model: torch.nn.Module) -> list[Any]:
    """Everything capture changes about a model."""
    return [
        (getattr(m, "layers_to_capture", None), getattr(m, "_is_layer_to_capture", False),
         getattr(m, "capture_aux_hidden_states", None)) for m in model.modules()
    ]  # fmt: skip


@pytest.mark.parametrize("after_block", [(2, 30, 58), (1, 29, 57), (0, 30), (0, 1, 2), (59,)])
@pytest.mark.parametrize("kind", [Llama, DeepSeek, QwenMoe, Lfm2, RawIds, lambda: Wrapper(DeepSeek())])
def test_every_file_ends_up_at_the_blocks_asked_for(kind: Any, after_block: tuple[int, ...]) -> None:
    model = kind()
    before = state(model)
    layers = CaptureLayers(model, after_block)
    assert layers.points == [k + 1 for k in after_block]
    assert state(model) == before
    with layers.on():
        assert list(layers.inner.layers_to_capture) == layers.points
        marks = [n for n, block in enumerate(layers.inner.layers) if getattr(block, "_is_layer_to_capture", False)]
        assert marks == (layers.points if isinstance(model, QwenMoe | RawIds) else [])
        causal_lm = model.language_model if isinstance(model, Wrapper) else model
        assert causal_lm.capture_aux_hidden_states is isinstance(model, Lfm2)
    assert state(model) == before


def test_the_model_is_stock_again_after_an_error_in_the_pass() -> None:
    model = QwenMoe()
    layers = CaptureLayers(model, (3,))
    before = state(model)
    with pytest.raises(RuntimeError), layers.on():
        raise RuntimeError("out of memory")
    assert state(model) == before


def test_a_difference_on_reading_back_is_refused_and_leaves_no_trace() -> None:
    class OneOff(QwenMoe):
        def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
            super().set_eagle3_layers_to_capture([k + 3 for k in ids])

    model = OneOff()
    before = state(model)
    with pytest.raises(LayersError, match=re.escape("gave [6, 34]")):
        CaptureLayers(model, (2, 30))
    assert state(model) == before


@pytest.mark.parametrize("after_block", [(60,), (2, 61)])
def test_the_last_blocks_output_cannot_be_had(after_block: tuple[int, ...]) -> None:
    with pytest.raises(LayersError, match="0 to 59"):
        CaptureLayers(Llama(), after_block)


def test_a_model_without_the_path_is_refused() -> None:
    with pytest.raises(LayersError, match="found none"):
        CaptureLayers(Block(), (1,))


def test_capture_that_somebody_else_turned_on_is_left_to_them() -> None:
    model = Llama()
    model.set_eagle3_layers_to_capture([1, 2])
    before = state(model)
    with pytest.raises(LayersError, match="--enable-return-aux-hidden-states"):
        CaptureLayers(model, (1, 2))
    assert state(model) == before


@pytest.mark.parametrize(("blocks", "expected"), [(61, (1, 29, 57)), (30, (1, 14, 26)), (6, (1, 2)), (2, (0,))])
def test_default_blocks(blocks: int, expected: tuple[int, ...]) -> None:
    assert default_blocks(blocks) == expected
