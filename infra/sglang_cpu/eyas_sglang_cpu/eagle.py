"""EAGLE drafting and verification on the `torch_native` attention back end, for chains (top-k 1).

SGLang's `speculative/draft_utils.py` knows no torch_native, and torch_native knows plain prefill and decode only: it
takes lengths from the batch that mean something else in the three passes of speculation. L is the length of the
committed sequence as SGLang counts it there (the last committed token has no cache row yet), T the tokens of a
verification, j the number of a draft step.

    pass                   seq_lens in the batch   what attention needs
    verify (target)        L                       keys up to L + T, queries for the last T of them
    draft step j           L                       keys up to L + j + 1
    draft extend           L + extended            prefix = seq_lens - extended

Symptom of a wrong length here: outputs stay right, since the target verifies them, but acceptance falls towards 1.
"""


class _BatchView:
    """A ForwardBatch with a few fields replaced, for one attention call; the batch itself stays as it is."""

    def __init__(self, batch, **replaced) -> None:
        self.__dict__.update(replaced, _batch=batch)

    def __getattr__(self, name: str):
        return getattr(self._batch, name)


def _extend_in_speculation(original, backend, q, k, v, layer, batch, *args, **kwargs):
    mode = batch.forward_mode
    if mode.is_target_verify():
        import torch

        drafted = batch.spec_info.draft_token_num
        batch = _BatchView(
            batch,
            seq_lens=batch.seq_lens + drafted,
            extend_prefix_lens=batch.seq_lens,
            extend_seq_lens=torch.full_like(batch.seq_lens, drafted),
        )
    elif mode.is_draft_extend_v2():
        batch = _BatchView(batch, extend_prefix_lens=batch.seq_lens - batch.extend_seq_lens.to(batch.seq_lens.dtype))
    return original(backend, q, k, v, layer, batch, *args, **kwargs)


def _decode_in_speculation(original, backend, q, k, v, layer, batch, *args, **kwargs):
    step = getattr(backend, "draft_step", None)  # set on the back ends of _DraftSteps only
    if step is not None:
        batch = _BatchView(batch, seq_lens=batch.seq_lens + step + 1)
    return original(backend, q, k, v, layer, batch, *args, **kwargs)


class _DraftSteps:
    """What SGLang calls a multi-step draft back end: one attention back end per draft step after the first.

    (The first drafted token comes from the extend pass, so `steps` tokens need `steps - 1` decode passes.)
    """

    def __init__(self, model_runner, topk: int, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        if topk != 1:
            raise ValueError(f"eyas-sglang-cpu drafts chains only: --speculative-eagle-topk 1, not {topk}")
        self.topk, self.speculative_num_steps, self.device = topk, steps, model_runner.device
        self.attn_backends = []
        for step in range(steps - 1):
            backend = TorchNativeAttnBackend(model_runner)
            backend.draft_step = step
            self.attn_backends.append(backend)

    def init_forward_metadata(self, batch) -> None:
        pass  # torch_native reads everything from the batch

    def __getattr__(self, name: str):
        if name.startswith("_") or not self.__dict__.get("attn_backends"):
            raise AttributeError(name)
        return getattr(self.attn_backends[0], name)  # memory pools and the like, the same for all steps


def _draft_decode_backend(original, factory):
    # The factory keeps a table of back ends by name; its slot for a CPU is "intel_amx", which needs sgl_kernel.
    factory._create_intel_amx_decode_backend = lambda: (
        "torch_native",
        _DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps),
    )
    factory.draft_attn_backend = "intel_amx"
    return original(factory)


def _draft_extend_backend(original, factory):
    def create():
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return "torch_native", TorchNativeAttnBackend(factory.draft_model_runner)

    factory._create_intel_amx_prefill_backend = create
    factory.draft_attn_backend = "intel_amx"
    return original(factory)


def _share_embedding(original, model, embed):
    """SGLang's own `set_embed` of the latent drafter ends in `torch.cuda.synchronize()`, which a torch without CUDA
    refuses; its other drafters ask the platform. (Their widths are equal: Eyas exports no other drafter.)"""
    del model.model.embed_tokens.weight
    model.model.embed_tokens.weight = embed


def register() -> None:
    """Put the five functions above around SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    HookRegistry.register(f"{attention}.forward_extend", _extend_in_speculation, HookType.AROUND)
    HookRegistry.register(f"{attention}.forward_decode", _decode_in_speculation, HookType.AROUND)
    latent = "sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM"
    HookRegistry.register(f"{latent}.set_embed", _share_embedding, HookType.AROUND)
    HookRegistry.register(f"{factory}.create_decode_backend", _draft_decode_backend, HookType.AROUND)
    HookRegistry.register(f"{factory}.create_draft_extend_backend", _draft_extend_backend, HookType.AROUND)
