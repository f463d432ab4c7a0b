"""Memory for batches: used again, never under a tensor that somebody still holds."""

import torch

from hidden_states.batch_memory import BatchMemory


def test_batch_memory_is_used_again_only_when_no_tensor_of_it_is_left() -> None:
    memory = BatchMemory()
    shape, dtype = (1000, 3, 512), torch.bfloat16
    first = memory.empty(shape, dtype)
    address = first.data_ptr()
    first.fill_(1)
    part = first[10:20, 1]  # a view is enough to hold it
    del first
    others = [memory.empty(shape, dtype) for _ in range(3)]
    for other in others:
        other.fill_(2)
    assert bool((part == 1).all()) and len({other.data_ptr() for other in others} | {address}) == 4
    del part, other
    others.clear()
    again = [memory.empty((900, 3, 512), dtype).data_ptr() for _ in range(20)]  # each dropped at once
    assert address in again and len(set(again)) <= 4
    held = [memory.empty(shape, dtype).fill_(n) for n in range(30)]  # more than are kept
    assert all(bool((tensor == n).all()) for n, tensor in enumerate(held))
