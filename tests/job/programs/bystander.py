"""Listens at as many ports as the first argument says, and shows everybody out after their first bytes, as a job does.

Prints the ports; ends when its standard input does.
"""

import contextlib
import selectors
import socket
import sys

FIRST_BYTES = 44


def main() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(int(sys.argv[1]))]
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    selector = selectors.DefaultSelector()
    for listener in listeners:
        selector.register(listener, selectors.EVENT_READ, data="listener")
    selector.register(sys.stdin, selectors.EVENT_READ, data="end")
    while True:
        for key, _ in selector.select():
            if key.data == "end":
                return
            if key.data == "listener":
                guest, _ = key.fileobj.accept()  # type: ignore[union-attr]
                guest.setblocking(False)
                selector.register(guest, selectors.EVENT_READ, data="guest")
                continue
            with contextlib.suppress(OSError):
                key.fileobj.recv(FIRST_BYTES)  # type: ignore[union-attr]
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]


main()
