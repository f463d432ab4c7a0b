"""When the model's capture path fails: whether, and with what, a pass may be done once more as stock.

A capture path that this release broke, or that needs memory which the stock path does not, must not cost a request;
when the trouble was not capture's, the stock path raises by itself. Where repeating could do harm, the error is the
server's.
"""

from typing import Any

import torch


def from_the_start(forward_batch: Any) -> bool:
    """Whether a pass is one of prompts from their first token on: it can be done twice, whatever the model is.

    Otherwise it goes on from a state which a recurrent model has moved on by then.
    """
    if not forward_batch.forward_mode.is_extend_without_speculative() or forward_batch.rids is None:
        return False
    return not any(forward_batch.extend_prefix_lens_cpu)


def once_more(args: tuple[Any, ...], kwargs: dict[str, Any], dry_run: bool, alone: bool) -> Any:
    """(args, kwargs) to repeat a pass with; None where that must not be. Raises RuntimeError, without memory.

    After the `dry_run` that is where other ranks may wait for this one, and with given embeddings: a model may add to
    them in place, and they are not copied every time.
    """
    given = [
        value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    if not dry_run:
        return (args, kwargs) if alone and not given else None
    try:
        copies = {id(value): value.clone() for value in given}
    except RuntimeError:  # no memory
        if not alone:  # the others would repeat a pass that this rank does not
            raise
        return None
    return tuple(copies.get(id(v), v) for v in args), {k: copies.get(id(v), v) for k, v in kwargs.items()}


def is_defect(error: Exception) -> bool:
    """Whether every rank must have met it: no memory, or a broken link, may be the trouble of one.

    cuBLAS, Triton, SGLang's NCCL and the CPU's allocator say only in words what they lack.
    """
    said = str(error).lower()
    of_one = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
    return not isinstance(error, of_one) and not any(word in said for word in ("alloc", "memory", "cuda", "nccl"))
