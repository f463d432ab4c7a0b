"""Torch versions of the `sgl_kernel` CPU operations on SGLang's EAGLE path, for chains (top-k 1).

Names and argument order are those SGLang calls them with (`sglang/kernels/ops`); arguments marked "out" are written in
place. An operation that is missing here raises NotImplementedError with its name when SGLang reaches it.

    B requests, T draft tokens of a verification (steps + 1), P width of a request's row in the token table
"""

import ctypes

import numpy as np
import torch


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy KV rows between slots in every layer, by address. With chains only start-up calls it, to warm it up."""
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long().numpy(), src_loc.long().numpy()
    rows = int(max(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_ubyte * (rows * int(row_bytes))).from_address(int(address))
        layer = np.frombuffer(memory, np.uint8).reshape(rows, int(row_bytes))
        layer[target] = layer[source]


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new cache slots into its row of the token table [requests, P] (out), from start to end."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The reverse: gather each request's cache slots from start to end into one flat list (out)."""
    given = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[given : given + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        given += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """Gather the cache slots (out) that the draft's own steps write, right behind each request's committed tokens."""
    count = topk * num_steps
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[i * count : (i + 1) * count] = req_to_token[row, length : length + count].to(out_cache_loc.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, seq_lens, tree_mask, positions, retrieve_index, next_token, next_sibling,
    topk, depth, draft_tokens, tree_mask_mode,
):  # fmt: skip
    """Describe the draft as a tree (all tensors out): with top-k 1 a chain, each token the child of the one before."""
    if topk != 1:
        raise NotImplementedError(f"eyas-sglang-cpu drafts chains only: --speculative-eagle-topk 1, not {topk}")
    requests, step = seq_lens.numel(), torch.arange(draft_tokens)
    positions.view(-1)[: requests * draft_tokens] = (seq_lens[:, None] + step[None]).reshape(-1).to(positions.dtype)
    retrieve_index.view(requests, draft_tokens).copy_(torch.arange(requests * draft_tokens).view(requests, -1))
    child = step + 1
    child[-1] = -1
    next_token.view(requests, draft_tokens).copy_(child[None].expand(requests, -1))
    next_sibling.fill_(-1)
    if tree_mask.numel() == requests * draft_tokens * draft_tokens:
        causal = torch.ones(draft_tokens, draft_tokens, dtype=torch.bool).tril()
        tree_mask.view(requests, draft_tokens, draft_tokens).copy_(causal[None].expand(requests, -1, -1))


def verify_tree_greedy_cpu(
    *, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Accept drafted tokens up to the first that is not the target's own choice.

    Args:
        predicts: [B*T] out, the target's token after each accepted position; the last of them is its bonus token.
        accept_index: [B, T] out, flat positions of the accepted chain, -1 behind it.
        accept_token_num: [B] out, number of drafted tokens accepted, the bonus token not counted.
        candidates: [B, T]; column 0 is the last committed token, the others are drafted.
        target_predict: [B, T], the target's arg-max after each candidate.
    """
    requests, width = candidates.shape
    target_predict = target_predict.view(requests, width)
    right = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1).sum(1)
    flat = torch.arange(requests * width).view(requests, width)
    on_chain = torch.arange(width)[None] <= right[:, None]
    accept_index.copy_(torch.where(on_chain, flat, -1))
    predicts.copy_(torch.where(on_chain, target_predict, 0).reshape(-1))
    accept_token_num.copy_(right)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Pick the last accepted token of each request (out): the one the next draft starts from."""
    requests = accept_lens.numel()
    last = torch.arange(requests) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:requests] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)
