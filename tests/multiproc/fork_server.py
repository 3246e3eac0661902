"""Forks ranks from a process that has imported a framework once: ``fork_server.py MODULE... LISTENER``.

A client connects to the socket with that descriptor and sends one rank: what it runs, and its standard files. It
receives the process id, then the exit status. A rank whose client goes away is killed. A rank may be a fork server,
which imports more; further files of a rank follow its arguments, as descriptors.

A rank is a process of its own, with its own session, output and Horovod. It repeats neither the import, which takes
longer than most of these jobs, nor, unless its script is one of ``TO_THE_END``, takes down at its end what is imported.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import types
from typing import NamedTuple

import quick_end

STANDARD, MOST = 3, 4
"""Standard input, output and error; files that a rank may have."""
TO_THE_END = ("ends.py", "lifetimes.py", "several.py", "timeline.py")
"""Scripts that show how processes end, which end as the interpreter does; others by ``quick_end``."""


class Rank(NamedTuple):
    """The process that is to be forked."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


class Server:
    """Forks a rank for each client, until standard input ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        """By the descriptor of the rank's process."""
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(sys.stdin, select.POLLIN)

    def serve(self) -> Rank | None:
        """Serve until standard input ends. In a forked process: return its rank, at once."""
        while True:
            for descriptor, event in self._poll.poll():
                if descriptor == sys.stdin.fileno():
                    return None
                if descriptor == self._listener.fileno():
                    if (rank := self._fork()) is not None:
                        return rank
                elif descriptor in self._clients:
                    self._report(descriptor)
                elif event & (select.POLLHUP | select.POLLERR):
                    self._poll.unregister(descriptor)
                    for process, client in self._clients.items():
                        if client.fileno() == descriptor:
                            signal.pidfd_send_signal(process, signal.SIGKILL)

    def _fork(self) -> Rank | None:
        client = self._listener.accept()[0]
        client.settimeout(30.0)  # (it sends at once)
        message, files, _, _ = socket.recv_fds(client, 1 << 20, MOST)
        pid = os.fork()
        if pid == 0:
            for each in (client, self._listener, *self._clients.values()):
                each.close()
            return Rank(**json.loads(message), files=files)
        for file in files:
            os.close(file)
        process = os.pidfd_open(pid)
        self._clients[process] = client
        self._poll.register(process, select.POLLIN)
        self._poll.register(client, 0)
        client.send(str(pid).encode())
        return None

    def _report(self, process: int) -> None:
        status = os.waitid(os.P_PIDFD, process, os.WEXITED)
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        client = self._clients.pop(process)
        self._poll.unregister(process)
        try:
            self._poll.unregister(client)
            client.send(str(code).encode())
        except (KeyError, OSError):  # it has gone
            pass
        client.close()
        os.close(process)


def become(rank: Rank) -> str:
    """Make this process the rank; returns the script that it is to run."""
    os.setsid()
    os.chdir(rank.folder)
    os.environ.clear()
    os.environ.update(rank.environment)
    for own, file in enumerate(rank.files[:STANDARD]):
        os.dup2(file, own)
        os.close(file)
    tempfile.tempdir = None  # (the server's own, if an import has asked for it)
    sys.argv = [*rank.command, *map(str, rank.files[STANDARD:])]
    sys.path[0] = os.path.dirname(rank.command[0])
    return rank.command[0]


if __name__ == "__main__":
    for module in sys.argv[1:-1]:
        importlib.import_module(module)
    gc.freeze()  # else every rank looks at all that was imported once more when it ends, for a second
    with socket.socket(fileno=int(sys.argv[-1])) as listener:
        forked = Server(listener).serve()
    if forked is None:
        os._exit(0)
    else:
        script = become(forked)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = script
        with open(script, encoding="utf-8") as source:
            code = compile(source.read(), script, "exec", dont_inherit=True)
        if os.path.basename(script) in (*TO_THE_END, os.path.basename(__file__)):
            # As the interpreter runs a script: nothing of this file is on the stack when it ends.
            exec(code, vars(main))
        else:
            quick_end.run(code, vars(main))
