"""The other end of a bare ZeroMQ round trip: python -m weightsync_agent.bench.echo ENDPOINT. Says `hello`, then echoes
every frame; ends at an empty one.
"""

from __future__ import annotations

import sys

import zmq

from .. import parent, wire


def main() -> int:
    parent.end_with_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, monitor = wire.connect_dealer(context, sys.argv[1], "")
    frame = b"hello"
    while frame:
        socket.send(frame)
        frame = socket.recv()
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
