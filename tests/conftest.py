"""Fixtures for every room's tests; nothing is started before a test asks for it."""

import signal

import hypothesis
import pytest

from tests.object_store import s3_server, s3_store

__all__ = ["s3_server", "s3_store"]

# A busy machine takes its time: no example fails by the clock.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

# What takes minutes goes first, so that the last worker is not left alone with it.
FIRST = ("test_champion", "test_pipeline", "test_operated", "test_several_servers", "test_mlflow_backends",
         "test_refusals", "test_given_services", "test_sglang_cpu", "test_real_server", "test_acceptance")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in that order, then the others as they come; the order within a file stays."""
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs deaf to Ctrl-C, and so would be every program under test that is sent one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
