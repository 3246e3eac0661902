"""The coordinator's listening socket: closed until the ranks' keys are known, and again once all of them are in.

ZeroMQ takes connections as they come, and one that says nothing keeps its file descriptor until its handshake has run
out of time. So the port is only reserved at first; and while it is shut, on Linux, the kernel drops whoever
knocks, whereas connections that are open go on. (Unbinding would end these too.) Elsewhere the keys alone decide.

A leaf module.
"""

from __future__ import annotations

import array
import contextlib
import socket
import struct
import sys

ATTACH_FILTER, DETACH_FILTER = 26, 27
"""Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: keep 0 bytes of it."""
BACKLOG = 4096
"""All ranks of a large job may come at once."""
LOOPBACK = "127.0.0.1"


class ListeningSocket:
    """A TCP port, reserved; connections are refused until ``open``.

    Attributes:
        port: its number.
    """

    def __init__(self) -> None:
        self._socket = _bound("", 0)
        self.port: int = self._socket.getsockname()[1]
        self._shut = False

    def open(self, local: bool) -> int:
        """Listen: on the loopback interface alone, or on all.

        Returns:
            The file descriptor to take connections from; it is the caller's to close.
        """
        if local:
            reserved = self._socket
            self._socket = _bound(LOOPBACK, self.port)
            reserved.close()
        self._socket.listen(BACKLOG)
        return self._socket.dup().detach()

    def shut(self, shut: bool) -> None:
        """Take no more connections, or take them again."""
        if shut == self._shut or not sys.platform.startswith("linux"):
            return
        self._shut = shut
        with contextlib.suppress(OSError):  # a sandbox without filters: the keys decide
            if shut:
                code = array.array("B", DROP_ALL)
                program = struct.pack("HL", 1, code.buffer_info()[0])  # (which the kernel copies)
                self._socket.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)

    def close(self) -> None:
        """Give the port back; calling it again does nothing."""
        self._socket.close()


def _bound(address: str, port: int) -> socket.socket:
    """A socket that does not listen yet, on an IPv4 address or, without one, on all of IPv4 and IPv6."""
    both = not address and socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # (beside the one that only reserves the port)
        if both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setblocking(False)  # else one that connects and leaves at once would block the thread that answers
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made
