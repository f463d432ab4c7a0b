"""A proxy between a client and a real S3 server that does to chosen requests what networks and overloaded stores do."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} says the proxy</Message></Error>"


@dataclass
class Fault:
    """What happens to the next `times` requests for which `when(method, path)` holds.

    kind: "error" answers with `status` and S3 error `code` without asking the server; "cut" closes the connection
    before the request reaches it; "torn" does so in the middle of the request's body; "lost" lets it through and drops
    the answer; "half" sends half of the answer's body; "slow" sends the answer's body in pieces, over half a second;
    "hold" signals `reached` and never answers.
    """

    kind: str
    when: Callable[[str, str], bool] = lambda method, path: True
    times: int = 1
    status: int = 500
    code: str = "InternalError"
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """`url` stands in for the server's; `faults` may be changed while it runs; `seen` are the requests it got."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url).netloc
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.pace = threading.Event()  # never set: waiting for it paces a slow answer
        lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def fault(self) -> Fault | None:
                with lock:
                    proxy.seen.append((self.command, self.path))
                    for fault in proxy.faults:
                        if fault.times > 0 and fault.when(self.command, self.path):
                            fault.times -= 1
                            return fault
                return None

            def handle_any(self) -> None:
                fault = self.fault()
                kind = fault.kind if fault is not None else ""
                if fault is not None:
                    fault.reached.set()
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length // 2 if kind == "torn" else length)
                if kind == "hold":
                    assert fault is not None
                    fault.release.wait(60)
                if kind in ("cut", "torn", "hold"):
                    self.close_connection = True
                    return
                if kind == "error":
                    assert fault is not None
                    self.answer(fault.status, {}, ERROR.format(code=fault.code).encode())
                    return
                connection = http.client.HTTPConnection(target, timeout=60)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        if name.lower() not in ("expect", "connection"):
                            connection.putheader(name, value)
                    connection.endheaders(body)
                    answer = connection.getresponse()
                    data = answer.read()
                finally:
                    connection.close()
                if kind == "lost":
                    self.close_connection = True
                    return
                self.answer(answer.status, dict(answer.getheaders()), data, half=kind == "half", slow=kind == "slow")

            def answer(
                self, status: int, headers: dict[str, str], data: bytes, half: bool = False, slow: bool = False
            ) -> None:
                self.send_response(status)
                length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                if slow:
                    piece = len(data) // 5 + 1
                    for start in range(0, len(data), piece):
                        proxy.pace.wait(0.1)
                        self.wfile.write(data[start : start + piece])
                elif self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if half else data)
                if half:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def fault_proxy(url: str) -> Iterator[FaultProxy]:
    proxy = FaultProxy(url)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        for fault in proxy.faults:
            fault.release.set()
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()


class PoorStore:
    """An S3 lookalike as some are: it keeps what it is sent, checks no checksum and knows no condition."""

    def __init__(self) -> None:
        objects: dict[str, bytes] = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def reply(self, status: int, data: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", '"x"')
                self.send_header("Last-Modified", "Sun, 29 Nov 2026 15:00:00 GMT")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def do_PUT(self) -> None:
                objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(200)

            def do_GET(self) -> None:
                data = objects.get(self.path)
                if self.path.count("/") == 1:
                    self.reply(200)
                elif data is None:
                    self.reply(404, ERROR.format(code="NoSuchKey").encode())
                elif "Range" in self.headers:
                    first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                    self.reply(206, data[int(first) : int(last) + 1])
                else:
                    self.reply(200, data)

            do_HEAD = do_GET

            def do_DELETE(self) -> None:
                objects.pop(self.path, None)
                self.reply(204)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def poor_store() -> Iterator[str]:
    store = PoorStore()
    thread = threading.Thread(target=store.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store.url
    finally:
        store.server.shutdown()
        store.server.server_close()
        thread.join()
