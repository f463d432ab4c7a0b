"""The model's own capture path: found, set, read back, and switched on only while a prefill is captured.

SGLang numbers capture points by the block whose *input* they are; Eyas numbers block *outputs* (`after_block`).
Point p is the output of block p - 1. What a model file does with the ids it is given differs from file to file, so
nothing is believed that was not read back from `layers_to_capture`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Model classes (the ones that own `layers_to_capture`) whose captured rows were compared with transformers:
# see benchmarks/capture_matrix.py.
PROVEN = frozenset({"DeepseekV2Model", "LlamaModel", "Qwen3Model", "Qwen3MoeModel"})
_MARK = "_is_layer_to_capture"  # qwen2_moe, qwen3_moe and others read this attribute of the block instead


class LayersError(ValueError):
    """This model, or this choice of blocks, cannot be captured; the message says why."""


def default_blocks(blocks: int) -> tuple[int, ...]:
    """An early, a middle and a late block, EAGLE-3's choice: {1, n/2 - 1, n - 4} of n."""
    return tuple(sorted({block for block in (1, blocks // 2 - 1, blocks - 4) if 0 <= block <= blocks - 2}))


def find_inner_model(model: Any) -> Any:
    """The one module with a capture path, also inside a multimodal wrapper. Raises LayersError."""
    found = [module for module in model.modules() if hasattr(module, "layers_to_capture") and hasattr(module, "layers")]
    if len(found) != 1:
        names = [type(module).__name__ for module in found]
        raise LayersError(
            f"{type(model).__name__}: expected one module with SGLang's capture path (layers_to_capture), found "
            f"{names or 'none'}. This model cannot be captured with this SGLang release"
        )
    return found[0]


class CaptureLayers:
    """Capture of `after_block` on one loaded model; off except inside `on()`.

    Off, the model runs its stock path: decode passes, CUDA graphs and other people's prefills see no difference.
    """

    def __init__(self, model: Any, after_block: tuple[int, ...] | None) -> None:
        """`model` is the causal LM (or its multimodal wrapper) after loading. Raises LayersError."""
        self.inner = find_inner_model(model)
        self.blocks = len(self.inner.layers)
        self.after_block = after_block or default_blocks(self.blocks)
        if not self.after_block or self.after_block[-1] > self.blocks - 2:
            raise LayersError(
                f"after_block {list(self.after_block)}: the model has {self.blocks} blocks, so 0 to {self.blocks - 2} "
                "can be captured (the last block's output exists only after the final norm, and is stored as 'final')"
            )
        self.points = [block + 1 for block in self.after_block]
        if self.inner.layers_to_capture:
            raise LayersError(
                f"SGLang already captures layers {list(self.inner.layers_to_capture)} for itself. Drop "
                "--enable-return-aux-hidden-states and --return-aux-hidden-state-layer-ids: this plugin turns capture "
                "on by itself"
            )
        self._off = self.inner.layers_to_capture
        flags = {id(module): module.capture_aux_hidden_states for module in model.modules() if _has_flag(module)}
        try:
            self._on, self._marked = self._set_and_read_back(model)
        finally:
            self._restore(model, flags)

    @property
    def proven(self) -> bool:
        """Whether this model class was compared with a reference implementation."""
        return type(self.inner).__name__ in PROVEN

    @contextmanager
    def on(self) -> Iterator[None]:
        """The model captures inside this block, and is stock again after it, also after an error."""
        self._switch(on=True)
        try:
            yield
        finally:
            self._switch(on=False)

    def _switch(self, on: bool) -> None:
        self.inner.layers_to_capture = self._on if on else self._off
        for layer in self._marked:
            setattr(layer, _MARK, on)

    def _set_and_read_back(self, model: Any) -> tuple[Any, list[Any]]:
        """Let the model file turn capture on, accept only exactly our points; (layers_to_capture, marked blocks).

        Most files add 1 to the ids; deepseek_v2 and glm4_moe_lite add 1 only when the first id is 1 and take other ids
        raw. Whatever the file does, one of the three ways below gives our points, or we refuse.
        """
        seen = []
        for setter, ids in (
            ("set_eagle3_layers_to_capture", list(self.after_block)),
            ("set_eagle3_layers_to_capture", list(self.points)),
            ("set_dflash_layers_to_capture", list(self.after_block)),
        ):
            call: Callable[[list[int]], None] | None = getattr(model, setter, None)
            if call is None:
                continue
            self._clear_marks()
            try:
                call(ids)
            except (AttributeError, IndexError, ValueError) as error:  # a wrapper without the path, ids out of range
                seen.append(f"{setter}({ids}) raised {error!r}")
                continue
            layers_to_capture = self.inner.layers_to_capture
            marked = [n for n, layer in enumerate(self.inner.layers) if getattr(layer, _MARK, False)]
            seen.append(f"{setter}({ids}) gave {sorted(layers_to_capture)}")
            if sorted(layers_to_capture) == self.points and marked in ([], self.points):
                return layers_to_capture, [self.inner.layers[n] for n in marked]
        tried = "; ".join(seen) or "no setter found"
        raise LayersError(f"{type(model).__name__} did not accept capture points {self.points}: {tried}")

    def _restore(self, model: Any, flags: dict[int, bool]) -> None:
        """Leave the model as SGLang loaded it.

        The causal LM must go on expecting a bare hidden state, because the plugin takes the captured rows away before
        it sees them. With its flag left on, it would try to unpack a tensor.
        """
        self.inner.layers_to_capture = self._off
        self._clear_marks()
        for module in model.modules():
            if not _has_flag(module):
                continue
            if id(module) in flags:
                module.capture_aux_hidden_states = flags[id(module)]
            else:
                del module.capture_aux_hidden_states

    def _clear_marks(self) -> None:
        for layer in self.inner.layers:
            if getattr(layer, _MARK, False):
                setattr(layer, _MARK, False)


def _has_flag(module: Any) -> bool:
    """Its own: some model files work it out from `layers_to_capture`, as a property."""
    return isinstance(vars(module).get("capture_aux_hidden_states"), bool)
