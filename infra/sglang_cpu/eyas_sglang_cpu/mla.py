"""Multi-head latent attention (DeepSeek, Kimi) on the `torch_native` back end."""


def register() -> None:
    """Pin the absorbed MLA method for `torch_native`.

    SGLang has no handler for this back end and falls back to triton's, which takes plain multi-head attention for a
    prefill without a cached prefix. torch_native then reads the latent cache as if it held per-head keys and values.
    Symptom: when kv_lora_rank + rope == nope + rope the shapes fit, and every answer is wrong without an error; else
    a shape error in scaled_dot_product_attention.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: handlers.AttnForwardMethod.MLA)
