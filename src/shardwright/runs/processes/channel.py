"""Messages between two processes of a run: one JSON object per line, over a socket that closes when either of them ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]

LOST_AFTER_S = 30
"""A machine whose kernel does not answer for so long is lost."""

MAX_FIRST_BYTES = 100_000


class Channel:
    """One end of a connection. Several threads may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> bool:
        """Send a message. False if the other end is gone; the receiving thread learns of that by itself."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; None when the other end is gone."""
        while b"\n" not in self._unread:
            if not self._read():
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def received(self) -> tuple[list[Message], bool]:
        """The messages of one read, and whether the other end is still connected."""
        connected = self._read()
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines], connected

    def first(self, timeout_s: float) -> Message | None:
        """The first message from the other end; None if it is not one of ours, or does not arrive in time."""
        self._connection.settimeout(timeout_s)
        try:
            while b"\n" not in self._unread and len(self._unread) < MAX_FIRST_BYTES:
                if not self._read():
                    return None
            line, _, self._unread = self._unread.partition(b"\n")
            message = json.loads(line)
            self._connection.settimeout(None)
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def is_broken(self) -> bool:
        """Whether the other end is known to be gone. Waits for nothing and reads nothing."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        # Closing alone does not end the connection while a thread is receiving on it.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> bool:
        try:
            read = self._connection.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return False
        self._unread += read
        return bool(read)


def watched(connection: socket.socket) -> socket.socket:
    """The connection, with keepalive options by which the kernel detects within LOST_AFTER_S that the other machine is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux only; other systems keep their own times, which are longer.
    for name, value in (
        ("TCP_KEEPIDLE", LOST_AFTER_S // 3),
        ("TCP_KEEPINTVL", LOST_AFTER_S // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", LOST_AFTER_S * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
