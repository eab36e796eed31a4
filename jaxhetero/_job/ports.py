"""A port that is held until the process that is to listen there does so."""

from __future__ import annotations

import socket

from jaxhetero.config import format_address
from jaxhetero.errors import AddressInUse


def reserve_port(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Hold a port of this host's address, or any free one for 0, until rank 0 listens on it.

    The socket is bound, has SO_REUSEADDR, and never listens. So rank 0, whose listener has SO_REUSEADDR too, can bind
    the same port. The kernel gives the port to no outgoing connection, and to no other process that takes any free one.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # For a given port SO_REUSEADDR must come before bind, to ignore connections of an earlier job in TIME_WAIT. For
        # any port it must come after: with it, the kernel may choose a port that another process holds.
        if port:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        holder.close()
        raise AddressInUse(f"cannot use {format_address(host, port)} for the coordinator: {error.strerror}") from None
    return holder
