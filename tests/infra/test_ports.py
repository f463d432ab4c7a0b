"""Ports: free, held until their servers bind them, never given to two."""

import json
import os
import socket
import subprocess
import sys

import pytest

from hidden_states.errors import ServerError
from infra import ports
from infra.ports import SERVER_PORTS, SERVICE_PORTS, free_port, free_ports, refuse_used_port

OFFSET = 10_000
ASK = """
import json, sys
from infra.ports import free_port, free_ports
first = [free_ports(5, also_at=10_000) for _ in range(20)]
print(json.dumps([*first, *(free_ports(1) for _ in range(60)), *(free_port() for _ in range(60))]), flush=True)
sys.stdin.read()
"""


def test_ports_can_be_bound_with_their_companions() -> None:
    first = free_ports(5, also_at=OFFSET)
    for port in (free_port(), *range(first, first + 5), *range(first + OFFSET, first + OFFSET + 5)):
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_no_port_is_given_twice_while_its_asker_lives_even_unbound() -> None:
    askers = [
        subprocess.Popen([sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    given = set()
    for asker in askers:
        assert asker.stdout is not None
        found = json.loads(asker.stdout.readline())
        wide = {port for first in found[:20] for port in range(first, first + 5)}
        for ports_of_one in (wide, {port + OFFSET for port in wide}, set(found[20:])):
            assert len(ports_of_one) in (100, 120)
            assert not given & ports_of_one
            given |= ports_of_one
    for asker in askers:
        asker.communicate("")


def test_a_port_is_given_again_once_its_asker_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(1)
    monkeypatch.setattr(ports, "SERVICE_PORTS", range(first, first + 1))
    with pytest.raises(ServerError, match="no 1 free ports in a row"):
        free_ports(1)
    ports._held.pop(first).close()
    assert free_ports(1) == first


def test_what_others_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(2, also_at=OFFSET)
    for port in (first, first + 1, first + OFFSET, first + OFFSET + 1):
        ports._held.pop(port).close()
    monkeypatch.setattr(ports, "SERVICE_PORTS", range(first, first + 2))
    for busy in (first, first + 1, first + OFFSET, first + OFFSET + 1):
        with socket.create_server(("127.0.0.1", busy)):
            with pytest.raises(ServerError, match="no 2 free ports in a row"):
                free_ports(2, also_at=OFFSET)
            with pytest.raises(ServerError, match=f"process {os.getpid()} .* listens there"):
                refuse_used_port("127.0.0.1", busy)
    assert free_ports(2, also_at=OFFSET) == first  # a refused look holds nothing


def test_ours_stay_clear_of_sglangs_and_the_kernels() -> None:
    """SGLang looks for the port of its ranks from 22,000 on; outgoing connections have theirs from 32,768 on."""
    assert SERVICE_PORTS.stop + OFFSET <= 22_000
    assert SERVER_PORTS.start >= 30_000
    assert SERVER_PORTS.stop <= 32_768


def test_a_held_port_does_not_keep_its_server_from_binding_again_and_again() -> None:
    port = free_port()
    for _ in range(2):  # the second time with a connection of the first still closing
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass
