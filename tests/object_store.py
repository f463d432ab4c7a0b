"""A real S3 server for the tests: one SeaweedFS a session, on free loopback ports, in a fresh folder."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hidden_states.store_s3 import S3Store
from infra.object_store import credentials, object_store
from infra.process import OwnedProcess
from infra.service import wait_ready

BUCKET = "eyas-tests"


@dataclass(frozen=True)
class RunningStore:
    """Its credentials are in the environment while it runs."""

    url: str
    folder: Path
    bucket: str = BUCKET

    def store(self, prefix: str, endpoint_url: str | None = None) -> S3Store:
        return S3Store(self.bucket, prefix, endpoint_url=endpoint_url or self.url, region="us-east-1")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    folder = tmp_path_factory.mktemp("object-store")
    service = object_store(folder, BUCKET)
    access, secret = credentials(folder)
    names = {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "AWS_EC2_METADATA_DISABLED": "true"}
    with (
        OwnedProcess(service.command, log_path=folder / "log", pid_file=folder / "pid", env=service.env) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        wait_ready(service, process)
        for name, value in names.items():
            patch.setenv(name, value)
        for name in [name for name in os.environ if name.startswith("AWS_") and name not in names]:
            patch.delenv(name)
        yield RunningStore(service.url, folder)


_prefixes = itertools.count()


@pytest.fixture
def s3_store(s3_server: RunningStore) -> S3Store:
    """An empty place in the running server."""
    return s3_server.store(f"test-{next(_prefixes)}")
