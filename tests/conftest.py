"""Fixtures for every room's tests; nothing is started before a test asks for it."""

import signal

from tests.object_store import s3_server, s3_store

__all__ = ["s3_server", "s3_store"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs deaf to Ctrl-C, and so would be every program under test that is sent one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
