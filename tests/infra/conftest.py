"""Tiny models and one plain server, shared by the tests here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infra.server import SGLangServer
from tests.servers import running_server
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads of torch on cores that a server uses too were seen to be fifty times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with running_server(tiny_llama, tmp_path_factory.mktemp("plain")) as server:
        yield server
