"""Fixtures for every room's tests; nothing is started before a test asks for it."""

from tests.object_store import s3_server, s3_store

__all__ = ["s3_server", "s3_store"]
