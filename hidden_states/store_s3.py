"""An S3 bucket as a store, through boto3.

Uploads above BLOCK_BYTES go in parts, several at once, each part's bytes read once and sent from memory. The server is
given the CRC32 of every part and of the whole object, computed from our bytes, and refuses what does not match.
"""

import base64
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError
from urllib3.exceptions import HTTPError

from hidden_states.crc32 import crc32
from hidden_states.errors import StoreError
from hidden_states.pieces import PIECE_BYTES, write_at
from hidden_states.store import (
    BLOCK_BYTES,
    PROBE_FOLDER,
    Capabilities,
    Digester,
    FileDigest,
    ObjectInfo,
    Store,
    StoreUnreachable,
    check_key,
    digest_file,
)
from hidden_states.store_s3_errors import explain, patiently

MAX_PARTS = 10_000
UPLOAD_THREADS = 6
REQUEST_ATTEMPTS = 8  # about 40 s of pauses in all
CONNECT_TIMEOUT_S = 4.0
READ_TIMEOUT_S = 60.0
FIRST_CONTACT_TIMEOUT_S = 5.0  # twice, with a short pause: an endpoint that is not there is reported within 15 s


class S3Store(Store):
    """Objects of `bucket` under `prefix` (may be empty). Credentials, and region unless given, as boto3 finds them."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
    ) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.endpoint_url, self.region, self.profile = endpoint_url, region, profile
        self._fresh()

    def _fresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._client: Any = None
        self._capabilities: Capabilities | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fresh()

    def __repr__(self) -> str:
        return f"S3Store({self.uri}, endpoint_url={self.endpoint_url})"

    # -- connection

    @property
    def client(self) -> Any:
        """The boto3 client of this process, after one look whether the bucket answers at all."""
        if self._pid != os.getpid():  # a forked data-loader worker must not share sockets with its parent
            self._fresh()
        with self._lock:
            if self._client is None:
                self._first_contact()
                self._client = self._connect(
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                    max_pool_connections=32,
                    retries={
                        "mode": "standard",
                        "total_max_attempts": REQUEST_ATTEMPTS,
                    },  # backoff with jitter, up to 20 s a pause
                )
            return self._client

    def _connect(self, **options: Any) -> Any:
        with self._explained("", "connect"):
            session = boto3.Session(profile_name=self.profile, region_name=self.region)
            return session.client(
                "s3",
                endpoint_url=self.endpoint_url,
                region_name=session.region_name or "us-east-1",
                # Bytes read are checked against our own digests; botocore's Python CRC on top would cost a core.
                config=Config(response_checksum_validation="when_required", tcp_keepalive=True, **options),
            )

    def _first_contact(self) -> None:
        client = self._connect(
            connect_timeout=FIRST_CONTACT_TIMEOUT_S,
            read_timeout=FIRST_CONTACT_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 2},
        )
        with self._explained("", "look at the bucket"):
            try:
                client.head_bucket(Bucket=self.bucket)
            except ClientError as exc:
                # 403 on this one is no verdict: a policy may allow objects and not the bucket. The operation will tell.
                if exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 403:
                    raise

    @contextlib.contextmanager
    def _explained(self, key: str, action: str) -> Iterator[None]:
        where = self.object_uri(key) if key else self.uri
        try:
            yield
        except (BotoCoreError, ClientError, HTTPError, ValueError) as exc:  # ValueError: an endpoint that is no URL
            # `from None`: a foreign exception's text may hold what we do not want in a log.
            raise explain(exc, where=where, action=action, endpoint=self.endpoint_url) from None

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    # -- writing

    def put_file(self, key: str, path: Path, digest: FileDigest | None = None, *, if_none_match: bool = False) -> str:
        digest = digest or digest_file(path)
        if if_none_match:
            self.require_conditional_put()
        condition = {"IfNoneMatch": "*"} if if_none_match else {}
        with self._explained(key, "write"), open(path, "rb") as file:
            try:
                self._put(key, file, digest, condition)
            except ClientError as exc:
                if not self._was_ours(exc, key, digest):
                    raise
        return self._prove(key, digest)

    def _put(self, key: str, file: BinaryIO, digest: FileDigest, condition: dict[str, str]) -> None:
        if digest.bytes > BLOCK_BYTES:
            self._put_parts(key, file.fileno(), digest, condition)
            return
        body = file.read(digest.bytes + 1)
        whole = {"ChecksumCRC32": _crc_text(digest.crc32)} if self._sends_checksums() else {}
        self.client.put_object(Bucket=self.bucket, Key=self._name(key), Body=body, **whole, **condition)

    def _was_ours(self, exc: ClientError, key: str, digest: FileDigest) -> bool:
        """Whether a refusal came to a repetition of what had arrived already: only the first answer was lost."""
        repeated = exc.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0
        if not repeated or exc.response["Error"]["Code"] not in ("PreconditionFailed", "NoSuchUpload"):
            return False
        there = self.head(key)
        return there is not None and there.bytes == digest.bytes and there.crc32 in (None, digest.crc32)

    def _put_parts(self, key: str, descriptor: int, digest: FileDigest, condition: dict[str, str]) -> None:
        at = {"Bucket": self.bucket, "Key": self._name(key)}
        part_bytes = max(BLOCK_BYTES, -(-digest.bytes // MAX_PARTS))
        starts = range(0, digest.bytes, part_bytes)
        checks = self._sends_checksums()
        kind = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if checks else {}
        upload_id = self.client.create_multipart_upload(**at, **kind)["UploadId"]
        stop = threading.Event()

        def send(number: int) -> dict[str, Any]:
            if stop.is_set():
                raise StoreError(self.object_uri(key), "upload ended early")
            start = starts[number - 1]
            data = os.pread(descriptor, min(part_bytes, digest.bytes - start), start)
            part = {"ChecksumAlgorithm": "CRC32"} if checks else {}
            answer = self.client.upload_part(**at, UploadId=upload_id, PartNumber=number, Body=data, **part)
            kept = {"PartNumber": number, "ETag": answer["ETag"]}
            return kept | ({"ChecksumCRC32": answer["ChecksumCRC32"]} if "ChecksumCRC32" in answer else {})

        try:
            with ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="eyas-upload") as pool:
                try:
                    parts = list(pool.map(send, range(1, len(starts) + 1)))
                except BaseException:
                    stop.set()
                    raise
            whole = {"ChecksumCRC32": _crc_text(digest.crc32), "ChecksumType": "FULL_OBJECT"} if checks else {}
            self.client.complete_multipart_upload(
                **at, UploadId=upload_id, MultipartUpload={"Parts": parts}, **whole, **condition
            )
        except BaseException:
            # Best effort: what stays behind is found by `abort_stale_uploads`.
            with contextlib.suppress(BotoCoreError, ClientError, HTTPError):
                self.client.abort_multipart_upload(**at, UploadId=upload_id)
            raise

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if if_none_match else {}
        with self._explained(key, "write"):
            self.client.put_object(Bucket=self.bucket, Key=self._name(key), Body=data, **condition)

    def _sends_checksums(self) -> bool:
        """False where the user has told boto3 that the store does not understand them."""
        return self.client.meta.config.request_checksum_calculation != "when_required"

    def _prove(self, key: str, digest: FileDigest) -> str:
        """Compares what the store holds with `digest`; see `Store.put_file`."""
        info = self.head(key)
        if self.capabilities().checksums and info is not None and info.crc32 is not None:
            if (info.bytes, info.crc32) == (digest.bytes, digest.crc32):
                return "checksum by the store"
            found = f"CRC32 {info.crc32:08x} of {info.bytes} bytes"
            expected = f"{digest.crc32:08x} of {digest.bytes} bytes"
        else:
            digester = Digester()
            if info is not None:
                for block in self.blocks(key, info.bytes):
                    digester.update(block)
            back = digester.digest()
            if back == digest:
                return "read back"
            found = f"sha256 {back.sha256[:16]} of {back.bytes} bytes"
            expected = f"{digest.sha256[:16]} of {digest.bytes} bytes"
        raise StoreError(
            self.object_uri(key),
            f"holds {found}",
            f"{expected}, as written",
            "The store changed the bytes, or another worker wrote the same key. The batch is sent again; if "
            "it happens twice, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required (some stores save boto3's "
            "checksum framing inside the object).",
        )

    # -- reading

    def get_bytes(self, key: str) -> bytes:
        def once() -> bytes:
            return self.client.get_object(Bucket=self.bucket, Key=self._name(key))["Body"].read()

        with self._explained(key, "read"):
            return patiently(once)

    def read_into(self, key: str, start: int, room: memoryview) -> None:
        if room:
            self._read(key, start, len(room), lambda done: room[done : done + PIECE_BYTES], lambda done, data: None)

    def copy_range(self, key: str, start: int, length: int, descriptor: int) -> int:
        piece, crc = memoryview(bytearray(min(PIECE_BYTES, length))), 0

        def take(done: int, data: memoryview) -> None:
            nonlocal crc
            write_at(descriptor, data, start + done)
            crc = crc32(data, crc if done else 0)  # a read that broke off begins again

        self._read(key, start, length, lambda done: piece[: length - done], take)
        return crc

    def _read(
        self,
        key: str,
        start: int,
        length: int,
        room: Callable[[int], memoryview],
        take: Callable[[int, memoryview], None],
    ) -> None:
        """Reads a range piece by piece, each into what `room` gives for it, and hands it to `take`; both are told how
        many bytes of the range came before. May begin again."""

        def once() -> int:
            """Bytes of the answer; fewer than asked for when the object ends there."""
            span = f"bytes={start}-{start + length - 1}"
            answer = self.client.get_object(Bucket=self.bucket, Key=self._name(key), Range=span)
            done = 0
            with contextlib.closing(answer["Body"]) as body:
                while done < length and (more := body.readinto(piece := room(done))):
                    take(done, piece[:more])
                    done += more
            if done < min(length, answer["ContentLength"]):
                raise IncompleteReadError(actual_bytes=done, expected_bytes=answer["ContentLength"])
            return done

        with self._explained(key, "read"):
            done = patiently(once)
        if done < length:
            raise StoreError(
                self.object_uri(key),
                f"{done} bytes from byte {start}",
                f"{length}",
                "The object is truncated: verify the dataset and capture the batch again.",
            )

    def head(self, key: str) -> ObjectInfo | None:
        with self._explained(key, "look at"):
            try:
                answer = self.client.head_object(Bucket=self.bucket, Key=self._name(key), ChecksumMode="ENABLED")
            except ClientError as exc:
                if exc.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                    return None
                raise
        # A multipart object may carry a checksum of its parts' checksums ("...-12"): nothing about the whole.
        text = answer.get("ChecksumCRC32", "-")
        crc32 = int.from_bytes(base64.b64decode(text), "big") if "-" not in text else None
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp(), crc32)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        skip = len(self.prefix) + 1 if self.prefix else 0
        with self._explained(prefix, "list"):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=f"{self.prefix}/{prefix}" if self.prefix else prefix
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    yield ObjectInfo(entry["Key"][skip:], entry["Size"], entry["LastModified"].timestamp())

    # -- housekeeping

    def delete(self, key: str) -> None:
        with self._explained(key, "delete"):
            self.client.delete_object(Bucket=self.bucket, Key=self._name(key))

    def abort_stale_uploads(self, prefix: str, older_than_s: float) -> tuple[str, ...]:
        aborted = []
        skip = len(self.prefix) + 1 if self.prefix else 0
        with self._explained(prefix, "list the unfinished uploads of"):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=f"{self.prefix}/{prefix}" if self.prefix else prefix
            )
            for upload in (entry for page in pages for entry in page.get("Uploads", [])):
                if time.time() - upload["Initiated"].timestamp() < older_than_s:
                    continue
                self.client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted.append(upload["Key"][skip:])
        return tuple(aborted)

    def capabilities(self) -> Capabilities:
        self.client  # noqa: B018  first, since it clears what a parent process has found out
        if self._capabilities is None:
            self._capabilities = self.probe()
        return self._capabilities

    def probe(self) -> Capabilities:
        key = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
        data = b"eyas looks whether what it writes is what it reads"
        self.put_bytes(key, data, if_none_match=False)
        back = self.get_bytes(key)
        if back != data:
            raise StoreError(
                self.object_uri(key),
                f"{len(back)} bytes that differ from the {len(data)} written",
                None,
                "The store saves boto3's checksum framing inside the object. Set "
                "AWS_REQUEST_CHECKSUM_CALCULATION=when_required and try again.",
            )
        conditional = self._is_refused(key, IfNoneMatch="*")
        wrong = _crc_text(Digester().digest().crc32 ^ 1)
        checksums = self._sends_checksums() and self._is_refused(f"{key}-c", ChecksumCRC32=wrong)
        try:
            for name in (key, f"{key}-c"):
                self.delete(name)
            may_delete = True
        except StoreUnreachable:
            raise
        except StoreError:  # a write-once policy is no obstacle to a dataset, only to `eyas datasets rm`
            may_delete = False
        return Capabilities(conditional_put=conditional, checksums=checksums, delete=may_delete)

    def _is_refused(self, key: str, **wrong: str) -> bool:
        """Whether the store turns down a put that it must not accept."""
        with self._explained(key, "write"):
            try:
                self.client.put_object(Bucket=self.bucket, Key=self._name(key), Body=b"second", **wrong)
            except ClientError as exc:
                status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
                if (status >= 500 and status != 501) or status == 403:
                    raise
                return status in (400, 412)
        return False


def _crc_text(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()
