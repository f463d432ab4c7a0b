"""Where objects live: one interface over an S3 bucket and a local folder.

    open_store("s3://bucket/prefix", endpoint_url=...)  -> S3Store     (store_s3.py)
    open_store("file:///data/eyas")                     -> LocalStore  (store_local.py)

Keys are relative to the prefix and use `/`. An object appears whole or not at all, in both. Stores are cheap to pickle
and safe to use from threads: connections are made on first use, again in every process.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hidden_states.crc32 import crc32, crc32_joined
from hidden_states.errors import StoreError
from hidden_states.pieces import pieces, write_at

READ_BLOCK = 4 << 20
BLOCK_BYTES = 16 << 20  # of one ranged read, and of one part of an upload
READ_THREADS = 4
PROBE_FOLDER = ".eyas-probe"


class StoreUnreachable(StoreError):
    """No answer, or no usable one after all retries: trying again later can help."""


class ObjectMissing(StoreError):
    """The key does not exist."""


class ObjectExists(StoreError):
    """A put with `if_none_match` found the key taken."""


@dataclass(frozen=True)
class FileDigest:
    """What a file's bytes are: `sha256` in hex, `crc32` as an unsigned int (the checksum S3 servers compute too)."""

    bytes: int
    sha256: str
    crc32: int


class Digester:
    """Builds a FileDigest from bytes that pass by."""

    def __init__(self) -> None:
        self._sha, self._crc, self._bytes = hashlib.sha256(), 0, 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._sha.update(data)
        self._crc = crc32(data, self._crc)
        self._bytes += memoryview(data).nbytes

    def digest(self) -> FileDigest:
        return FileDigest(self._bytes, self._sha.hexdigest(), self._crc)


def digest_file(path: Path) -> FileDigest:
    digester = Digester()
    with open(path, "rb") as file:
        while block := file.read(READ_BLOCK):
            digester.update(block)
    return digester.digest()


@dataclass(frozen=True)
class ObjectInfo:
    """`modified`: seconds since the epoch. `crc32` only where the store keeps a checksum of the whole object."""

    key: str
    bytes: int
    modified: float
    crc32: int | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a round trip showed. `conditional_put`: the second put with If-None-Match was refused. `checksums`: a put
    with a wrong checksum was refused, so a checksum the store reports is one it has computed. `delete`: allowed."""

    conditional_put: bool
    checksums: bool
    delete: bool


class Store(ABC):
    """Objects under one prefix. Every method raises StoreError, or a subclass, naming the object and what to do."""

    uri: str

    @abstractmethod
    def put_file(self, key: str, path: Path, digest: FileDigest | None = None, *, if_none_match: bool = False) -> str:
        """Stores a file and proves that it arrived.

        `digest` is the file's, as computed when it was written, so that damage on the local disk is seen as well; left
        out, the file is read once more. Returns how the proof was made: "checksum by the store" (the server computed
        the CRC32 of what it holds) or "read back" (all bytes were fetched again and their sha256 compared).
        """

    @abstractmethod
    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> None: ...

    @abstractmethod
    def get_bytes(self, key: str) -> bytes: ...

    @abstractmethod
    def read_into(self, key: str, start: int, room: memoryview) -> None:
        """Fills `room` with the object's bytes from `start` on; an object that ends before is a StoreError."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes; a shorter object is a StoreError."""
        room = bytearray(length)
        self.read_into(key, start, memoryview(room))
        return bytes(room)

    @abstractmethod
    def head(self, key: str) -> ObjectInfo | None: ...

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, in the order of their keys."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes an object; one that is not there is fine."""

    @abstractmethod
    def abort_stale_uploads(self, prefix: str, older_than_s: float) -> tuple[str, ...]:
        """Removes what uploads that never ended have left under `prefix`; returns the keys they were for."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Measured by a round trip of a few bytes, once a process."""

    def probe(self) -> Capabilities:
        """Write, read, compare, delete: proof that this store can be worked with, made afresh."""
        return self.capabilities()

    def copy_range(self, key: str, start: int, length: int, descriptor: int) -> int:
        """Writes exactly `length` bytes of an object to their place in a file; returns their crc32."""
        room = memoryview(bytearray(length))
        self.read_into(key, start, room)
        write_at(descriptor, room, start)
        return crc32(room)

    def blocks(self, key: str, size: int) -> Iterator[memoryview]:
        """An object of `size` bytes from its first byte to its last, BLOCK_BYTES at a time, the next ones under way.

        A block is good until the next one is asked for: its memory is used again, since fresh memory costs a page fault
        for each 4 KB, together more than receiving them.
        """
        memory: list[bytearray] = []
        starts = iter(range(0, size, BLOCK_BYTES))
        under_way: deque[tuple[bytearray, Future[memoryview]]] = deque()
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="eyas-read") as pool:

            def get(start: int, piece: bytearray) -> memoryview:
                room = memoryview(piece)[: size - start]
                self.read_into(key, start, room)
                return room

            def ask() -> None:
                for start in islice(starts, 1):
                    piece = memory.pop() if memory else bytearray(BLOCK_BYTES)
                    under_way.append((piece, pool.submit(get, start, piece)))

            try:
                for _ in range(READ_THREADS + 1):  # one more than are read at a time: the one in the caller's hands
                    ask()
                while under_way:
                    piece, block = under_way.popleft()
                    yield block.result()
                    memory.append(piece)
                    ask()
            finally:
                for _, future in under_way:
                    future.cancel()

    def download(self, key: str, size: int, path: Path) -> FileDigest:
        """Writes an object of `size` bytes to a file; returns the digest of what arrived."""
        digester = Digester()
        with open(path, "wb") as file:
            for piece in chain.from_iterable(map(pieces, self.blocks(key, size))):
                file.write(piece)
                digester.update(piece)
        return digester.digest()

    def fetch(self, key: str, size: int, path: Path) -> int:
        """The same; returns the crc32 alone.

        Ranges are written and summed as they arrive, side by side. A sha256, which has to see the bytes in their order,
        takes as long as receiving them.
        """
        lengths = {start: min(BLOCK_BYTES, size - start) for start in range(0, size, BLOCK_BYTES)}
        crc = 0
        with open(path, "wb") as file, ThreadPoolExecutor(READ_THREADS, thread_name_prefix="eyas-read") as pool:
            parts = pool.map(lambda start: self.copy_range(key, start, lengths[start], file.fileno()), lengths)
            try:
                for length, part in zip(lengths.values(), parts, strict=True):
                    crc = crc32_joined(crc, part, length)
            finally:
                pool.shutdown(cancel_futures=True)
        return crc

    def local_path(self, key: str) -> Path | None:
        """The object as a file that can be mapped into memory, where there is one."""
        return None

    def object_uri(self, key: str) -> str:
        return f"{self.uri.rstrip('/')}/{key}"

    def require_conditional_put(self) -> None:
        """Refuses a store that lets two committers overwrite each other."""
        if not self.capabilities().conditional_put:
            raise StoreError(
                self.uri,
                "a second put with If-None-Match overwrote the first",
                "a store that refuses it (HTTP 412)",
                "The commit of a dataset rests on that refusal. Use AWS S3, MinIO, SeaweedFS, a recent Ceph, or a "
                "file:// folder.",
            )


def check_key(key: str) -> str:
    """A key that stays under the prefix, in a bucket as on a disk."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise ValueError(f"not a key relative to the store: {key!r}")
    return key


def open_store(
    uri: str, *, endpoint_url: str | None = None, region: str | None = None, profile: str | None = None
) -> Store:
    """The store behind `s3://bucket/prefix` or `file:///folder`. Touches no network yet.

    Credentials come from boto3's usual chain (environment, profile, role), never from the URI.
    """
    if "@" in uri or (endpoint_url and "@" in endpoint_url.split("?")[0]):
        # The text is not repeated: what stands before the @ may be a secret.
        raise StoreError(
            "store",
            "user info (`...@`) in the URI or the endpoint",
            None,
            "Put credentials into a profile or the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).",
        )
    if any(letter in uri for letter in "?#") or "\0" in unquote(uri):
        raise StoreError(
            uri, "a ?, a # or a zero byte in it", "a plain path",
            "Another folder would be taken for it: write %3F and %23 in a file:// URI, or choose another prefix.",
        )  # fmt: skip
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise StoreError(uri, f"not a URI ({error})", "s3://bucket/prefix or file:///absolute/folder") from error
    if parts.scheme == "s3" and parts.netloc:
        from hidden_states.store_s3 import S3Store  # boto3 takes a while to import; a local folder does not need it

        return S3Store(parts.netloc, parts.path.strip("/"), endpoint_url=endpoint_url, region=region, profile=profile)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        from hidden_states.store_local import LocalStore

        return LocalStore(Path(unquote(parts.path)))
    raise StoreError(uri, "not a store", "s3://bucket/prefix or file:///absolute/folder", "Correct the URI.")
