"""What a model's forward gives while it captures, told apart: the stock answer, and the captured rows behind it."""

from typing import Any

import torch

from eyas_capture.refusals import Drift


def told_apart(result: Any) -> tuple[Any, Any]:
    """What the stock model returns, and the captured rows, None without any. Some models return a tuple as stock."""
    if not isinstance(result, tuple) or len(result) < 2:
        return result, None
    *answer, captured = result
    return (answer[0] if len(answer) == 1 else tuple(answer)), captured


def states(answer: Any, captured: Any, tokens: int, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The final state and `count` blocks' rows, [tokens, H] each. Raises Drift when that is not what there is."""
    hidden = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(hidden, torch.Tensor):
        raise Drift(f"the model returned a {type(hidden).__name__} where its final state should be")
    rows, width = hidden.shape
    if rows != tokens:
        raise Drift(f"a pass over {tokens} tokens gave {rows} rows")
    if isinstance(captured, torch.Tensor):  # packed: [rows, count * H]
        if captured.shape != (rows, count * width):
            raise Drift(f"captured rows have shape {tuple(captured.shape)}, expected {(rows, count * width)}")
        return hidden, list(captured.split(width, dim=-1))
    shapes = [tuple(part.shape) for part in captured or ()]
    if shapes != [(rows, width)] * count:
        raise Drift(f"captured rows have shapes {shapes}, expected {count} of {(rows, width)}")
    return hidden, list(captured)
