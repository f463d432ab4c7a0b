"""TCP ports of this machine: a free one, and who holds a taken one."""

import errno
import random
import socket

import psutil

from hidden_states.errors import ServerError

# All below those the kernel gives to outgoing connections, so that nothing takes a port between the look and the use.
# SGLang binds only after loading: its ports lie above 22,000 to 30,000, where it looks for the one its ranks meet at,
# and those of services, which may be used 10,000 higher too, begin below.
SERVER_PORTS = range(30_000, 32_000)
SERVICE_PORTS = range(10_000, 20_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on, for a server.

    Raises:
        ServerError: none found.
    """
    for port in random.sample(SERVER_PORTS, 50):
        if _bind_error(host, port) is None:
            return port
    raise ServerError(host, "none of 50 ports tried is free", None, "Name one in server.port.")


def free_ports(count: int, also_at: int = 0) -> int:
    """The first of `count` free loopback ports in a row, for services; those `also_at` higher are free too.

    Raises:
        ServerError: none found.
    """
    for _ in range(1000):
        first = random.choice(SERVICE_PORTS)
        wanted = range(first, first + count)
        if wanted.stop <= SERVICE_PORTS.stop and all(
            _bind_error("127.0.0.1", number) is None for port in wanted for number in {port, port + also_at}
        ):
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


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections of a former server are no bar
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
