"""Faster torch versions of what a prefill does besides its matrix products. SGLang's own are made to be read, not run.

On SmolLM2-135M a quarter of a prefill's time was spent in them:

- Attention calls torch request by request; for short prompts the calls cost more than what they compute. Here prompts
  of about the same length go through one call, padded behind their end: a causal query never looks there.
- The rotary embedding writes eight intermediate results, SwiGLU's product one. Here they write into what is there.

Each step is the same arithmetic on the same values; only the order of a sum inside torch's attention may differ.
"""

from itertools import accumulate

LEAST_FILL = 0.75  # of the longest prompt of a call: shorter ones go into another call


class _Together:
    """Prompts that share a call: where their queries, keys and results lie. B prompts, padded to L tokens.

    Attributes:
        shape: (B, L).
        queries: [B*L] rows of the pass; where a prompt's prefix comes from the cache, and behind its end, any of them.
        slots: [B*L] of the key and value cache; behind a prompt's end its last one, which holds finite numbers.
        kept: positions in [B*L] that hold a row of the pass, which is row `rows` of it.
    """

    def __init__(self, table, requests, starts, prefixes, lengths) -> None:
        import torch

        first, cached, whole = (torch.tensor(numbers)[:, None] for numbers in (starts, prefixes, lengths))
        at = torch.arange(max(lengths))[None]
        inside = torch.minimum(at, whole - 1)
        queries = (first + (inside - cached).clamp(min=0)).flatten()
        self.shape = (len(lengths), max(lengths))
        self.queries = queries
        self.slots = table[torch.tensor(requests)[:, None], inside].flatten()
        self.kept = ((at >= cached) & (at < whole)).flatten().nonzero().flatten()
        self.rows = queries[self.kept]


def _sorted_by_length(batch, table) -> list[_Together]:
    prefixes, extended = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    lengths = [cached + new for cached, new in zip(prefixes, extended, strict=True)]
    starts = [0, *accumulate(extended)][:-1]
    prompts = zip(batch.req_pool_indices.tolist(), starts, prefixes, lengths, strict=True)
    calls: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=lambda prompt: -prompt[-1]):
        if not calls or prompt[-1] < LEAST_FILL * calls[-1][0][-1]:
            calls.append([])
        calls[-1].append(prompt)
    return [_Together(table, *zip(*call, strict=True)) for call in calls]


def _extend(original, backend, q, k, v, layer, batch, *args, **kwargs):
    """Lays out a pass once for all its layers, where it is a plain prefill."""
    backend.eyas_calls = None
    if batch.forward_mode.is_extend_without_speculative() and batch.extend_prefix_lens_cpu is not None:
        if not hasattr(batch, "eyas_calls"):
            batch.eyas_calls = _sorted_by_length(batch, backend.req_to_token_pool.req_to_token)
        backend.eyas_calls = batch.eyas_calls
    return original(backend, q, k, v, layer, batch, *args, **kwargs)


def _attend(
    original, backend, query, output, k_cache, v_cache, table, requests, lengths, prefixes, extended,
    encoder_lens=None, **how,
):  # fmt: skip
    """All prompts of about a length at once; what is no plain causal attention goes SGLang's way."""
    from torch.nn.functional import scaled_dot_product_attention

    window = how.get("sliding_window_size")
    plain = (
        how.get("causal") and not how.get("is_cross_attn") and encoder_lens is None and (window is None or window < 0)
    )
    if backend.eyas_calls is None or not plain:
        lay = (table, requests, lengths, prefixes, extended, encoder_lens)
        return original(backend, query, output, k_cache, v_cache, *lay, **how)
    for call in backend.eyas_calls:
        q, k, v = (
            tensor.index_select(0, index).unflatten(0, call.shape).transpose(1, 2).to(query.dtype)
            for tensor, index in ((query, call.queries), (k_cache, call.slots), (v_cache, call.slots))
        )
        gqa, scale = how.get("enable_gqa", False), how.get("scaling")
        result = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        output.index_copy_(0, call.rows, result.transpose(1, 2).flatten(0, 1).index_select(0, call.kept))
    return output


def _rotate_both(original, rope, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    cache = rope.cos_sin_cache
    plain = rope.is_neox_style and rope.rotary_dim == rope.head_size and not hasattr(rope, "sin_cos_cache")
    if not plain or offsets is not None or fused_set_kv_buffer_arg is not None or query.dtype != cache.dtype:
        return original(rope, positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = cache.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x, cos, sin):
    """x: [T, heads * D] or [T, heads, D]; cos, sin: [T, 1, D/2]."""
    import torch

    heads = x.view(x.shape[0], -1, 2 * cos.shape[-1])
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    (a, b), (left, right) = heads.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right).addcmul_(a, sin)
    return rotated.view(x.shape)


def _silu_and_mul(activation, x):
    from torch.nn.functional import silu

    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def register() -> None:
    """Put these in the place of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{attention}.forward_extend", _extend, HookType.AROUND)
    HookRegistry.register(f"{attention}._run_sdpa_forward_extend", _attend, HookType.AROUND)
    rope = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding"
    HookRegistry.register(f"{rope}.forward_native", _rotate_both, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.activation.SiluAndMul.forward_native", _silu_and_mul, HookType.REPLACE)
