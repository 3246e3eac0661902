"""A rank of a launcher's that a fork server starts: ``forked_rank.py SOCKET SCRIPT ARGUMENT...``.

The launcher sees this small process, which passes on the signals that it gets and ends as the rank does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def connect(
    path: str, command: Sequence[str], environment: Mapping[str, str], folder: str, files: Sequence[int]
) -> socket.socket:
    """Have the server at ``path`` fork a rank: its process id, then its exit status can be read from what returns."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    rank = {"command": [*command], "environment": {**environment}, "folder": folder}
    socket.send_fds(server, [json.dumps(rank).encode()], files)
    return server


def read(server: socket.socket) -> int:
    """Return the next number that the server sends.

    Raises:
        EOFError: it has ended.
    """
    if not (answer := server.recv(100)):
        raise EOFError("the fork server has ended")
    return int(answer)


def main() -> None:
    """Have the rank forked, wait for its end, and end alike."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server = connect(sys.argv[1], sys.argv[2:], os.environ, os.getcwd(), [0, 1, 2])
    rank = read(server)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # (it has ended)
            os.kill(rank, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = read(server)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
