"""A stand-in for a misbehaving SGLang: takes the same command line and plays one part.

loads      listens on nothing, for ever
warms-up   answers as SGLang does while warm-up hangs: 503 on /health, 200 everywhere else
slow       the same, until the file named by FAKE_READY exists
ousted     dies as SGLang does when somebody took the port its ranks should meet at; each time appends its own port to
           the file named by FAKE_READY, and is ready once that has as many lines as FAKE_OUSTED says
"""

import argparse
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def never_ready() -> None:
    """Where a hang shows in the saved stacks."""
    threading.Event().wait()


def main() -> None:
    part, ready = os.environ["FAKE_PART"], Path(os.environ.get("FAKE_READY", "/nonexistent"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    print(f"playing {part}", *sys.argv[1:], flush=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            well = self.path != "/health" or ready.exists()
            self.send_response(200 if well else 503)
            self.end_headers()
            self.wfile.write(json.dumps({"version": "fake"}).encode())

    if part == "ousted":
        with ready.open("a", encoding="utf-8") as starts:
            print(options.port, file=starts)
        if len(ready.read_text().splitlines()) < int(os.environ["FAKE_OUSTED"]):
            print("torch.distributed.DistNetworkError: port: 26211, name: EADDRINUSE, message: address already in use")
            print("Received sigquit from a child process.", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    if part != "loads":
        server = ThreadingHTTPServer((options.host, options.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    never_ready()


if __name__ == "__main__":
    main()
