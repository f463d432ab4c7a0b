"""A local folder as a store: the same rules as a bucket, kept with rename, link and fsync."""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from hidden_states.errors import StoreError
from hidden_states.pieces import PIECE_BYTES
from hidden_states.store import (
    PROBE_FOLDER,
    Capabilities,
    Digester,
    FileDigest,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    Store,
    check_key,
    digest_file,
)

TEMPORARY = ".eyas-tmp-"


class LocalStore(Store):
    """Objects are files under `root`, each written under a temporary name beside its place, synced, then renamed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()

    def __repr__(self) -> str:
        return f"LocalStore({self.uri})"

    def put_file(self, key: str, path: Path, digest: FileDigest | None = None, *, if_none_match: bool = False) -> str:
        with self._explained(key), self._publish(key, if_none_match) as temporary:
            digester = Digester()
            with open(path, "rb") as source, open(temporary, "xb") as target:
                while piece := source.read(PIECE_BYTES):
                    digester.update(piece)
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
            expected = digest or digester.digest()
            found = digest_file(temporary)
            if found != expected:
                raise StoreError(
                    self.object_uri(key),
                    f"sha256 {found.sha256[:16]} of {found.bytes} bytes after the copy of {path}",
                    f"{expected.sha256[:16]} of {expected.bytes} bytes, as computed when it was written",
                    "The file changed on the local disk or in the copy. Check the disk; the batch is made again.",
                )
        return "read back"

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False) -> None:
        with self._explained(key), self._publish(key, if_none_match) as temporary, open(temporary, "xb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())

    def get_bytes(self, key: str) -> bytes:
        with self._explained(key):
            return self._path(key).read_bytes()

    def read_into(self, key: str, start: int, room: memoryview) -> None:
        done = 0
        with self._explained(key), open(self._path(key), "rb", buffering=0) as file:
            file.seek(start)
            while done < len(room) and (more := file.readinto(room[done:])):
                done += more
        if done < len(room):
            raise StoreError(
                self.object_uri(key),
                f"ends after byte {start + done}",
                f"{start + len(room)} bytes",
                "The object is truncated: verify the dataset and capture the batch again.",
            )

    def head(self, key: str) -> ObjectInfo | None:
        with self._explained(key):
            try:
                status = self._path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = self.root / prefix.rpartition("/")[0]
        with self._explained(prefix or "."):
            found = []
            for path in folder.rglob("*"):
                key = path.relative_to(self.root).as_posix()
                if key.startswith(prefix) and not path.name.startswith(TEMPORARY) and path.is_file():
                    # One that another worker replaces or removes meanwhile is simply not listed.
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        with self._explained(key):
            self._path(key).unlink(missing_ok=True)

    def abort_stale_uploads(self, prefix: str, older_than_s: float) -> tuple[str, ...]:
        removed = []
        with self._explained(prefix or "."):
            for path in (self.root / prefix.rpartition("/")[0]).rglob(f"{TEMPORARY}*"):
                key = path.relative_to(self.root).as_posix()
                if key.startswith(prefix.rpartition("/")[0]) and time.time() - path.stat().st_mtime >= older_than_s:
                    path.unlink(missing_ok=True)
                    removed.append(key)
        return tuple(removed)

    def capabilities(self) -> Capabilities:
        key = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
        self.put_bytes(key, b"eyas", if_none_match=True)
        try:
            self.put_bytes(key, b"second", if_none_match=True)
        except ObjectExists:
            conditional = self.get_bytes(key) == b"eyas"
        else:
            conditional = False
        self.delete(key)
        return Capabilities(conditional_put=conditional, checksums=False, delete=True)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextlib.contextmanager
    def _publish(self, key: str, if_none_match: bool) -> Iterator[Path]:
        """Yields a temporary path that becomes the object when the block ends well, and vanishes when it does not."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            yield temporary
            if if_none_match:
                os.link(temporary, path)  # fails when the name is taken, for whichever of two writers comes second
            else:
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        where = self.object_uri(key)
        try:
            yield
        except FileExistsError as exc:
            raise ObjectExists(where, "exists already", "a free key") from exc
        except FileNotFoundError as exc:
            raise ObjectMissing(where, f"not found ({exc.filename})", None, "Check the path.") from exc
        except PermissionError as exc:
            raise StoreError(
                where,
                f"no permission ({exc.strerror}: {exc.filename})",
                "read and write permission",
                "Change the folder's owner or mode, or choose another folder.",
            ) from exc
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            do = "Free space on that disk or choose another folder." if full else "Check the disk and its mount."
            raise StoreError(where, f"{exc.strerror} ({exc.filename})", None, do) from exc
