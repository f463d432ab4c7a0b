"""TCP ports of this machine: a free one, and who holds a taken one.

A server binds its port seconds to minutes after the look. Until then the process that looked holds the number, so that
another of ours does not find the same one free.
"""

import errno
import random
import socket
import sys

import psutil

from hidden_states.errors import ServerError

# All below those the kernel gives to outgoing connections, so that nothing takes a port between the look and the use.
# SGLang looks for the port its ranks meet at between 22,000 and 30,000: those of services, which may be used 10,000
# higher too, end below.
SERVER_PORTS = range(30_000, 32_000)
SERVICE_PORTS = range(10_000, 12_000)

_held: dict[int, socket.socket] = {}  # by port, as long as this process lives


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on, for a server; held for this process.

    Raises:
        ServerError: none found.
    """
    for port in random.sample(SERVER_PORTS, 50):
        if _take([port], host):
            return port
    raise ServerError(host, "none of 50 ports tried is free", None, "Name one in server.port.")


def free_ports(count: int, also_at: int = 0) -> int:
    """The first of `count` free loopback ports in a row, for services; those `also_at` higher are free too.

    All are held for this process.

    Raises:
        ServerError: none found.
    """
    for _ in range(1000):
        first = random.choice(SERVICE_PORTS[: -count + 1 or None])
        if _take(sorted({port + more for port in range(first, first + count) for more in (0, also_at)})):
            return first
    raise ServerError("127.0.0.1", f"no {count} free ports in a row", None, "End what listens there.")


def refuse_used_port(host: str, port: int) -> None:
    """Raises ServerError, naming who listens, when the port cannot be bound."""
    error = _bind_error(host, port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise ServerError(f"{host}:{port}", f"cannot be bound: {error.strerror}", None, "Name another address or port.")
    holder = listening_process(port)
    who = f"process {holder.pid} ({holder.name()})" if holder else "another program"
    raise ServerError(f"{host}:{port}", f"{who} listens there", None, "End it, or leave server.port out.")


def listening_process(port: int) -> psutil.Process | None:
    """Who listens on a TCP port, as far as this user may see it."""
    for process in psutil.process_iter():
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:  # gone, or somebody else's
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return process
    return None


def _take(ports: list[int], host: str = "127.0.0.1") -> bool:
    """Holds these ports for this process if all are free; else none."""
    taken: dict[int, socket.socket] = {}
    for port in ports:
        holder = socket.socket(socket.AF_UNIX)
        try:
            if sys.platform == "linux":  # a name without a file, known wherever the port is, gone with the process
                holder.bind(f"\0eyas-port-{port}")
            free = _bind_error(host, port) is None
        except OSError:  # another process of ours
            free = False
        taken[port] = holder
        if not free:
            for other in taken.values():
                other.close()
            return False
    _held.update(taken)
    return True


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections of a former server are no bar
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
