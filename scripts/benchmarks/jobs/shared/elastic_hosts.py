"""The hosts of an elastic job as its ranks see them: lines of a file, where more may be written."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

from virtual_elastic import CLUSTER


class Hosts:
    """The hosts that Horovod finds: lines of a file, with as many ranks each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "hosts"
        self._spare = self._file.with_name("hosts.spare").read_text().split()
        self.per_host = int(self._spare[0].partition(":")[2])

    def change(self, gone: str | None = None, more: int = 0) -> None:
        """Take a host away, or add new ones."""
        if gone is None and more < 1:
            return
        lines = [line for line in self._file.read_text().split() if line.partition(":")[0] != gone]
        lines += [self._spare[claim(self._folder, "host")] for _ in range(more)]  # (none that a process has had)
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        unfinished.write_text("".join(f"{line}\n" for line in lines))
        unfinished.replace(self._file)

    def alive(self) -> list[str]:
        """Return those on which no process has died."""
        names = [line.partition(":")[0] for line in self._file.read_text().split()]
        return [name for name in names if not (self._folder / f"dead.{name}").exists()]


def claim(folder: Path, name: str) -> int:
    """Return the first number that no process has had by this name."""
    number = 0
    while True:
        with contextlib.suppress(FileExistsError), (folder / f"{name}.{number}").open("x"):
            return number
        number += 1


def on_a_virtual_host() -> bool:
    """Whether this process is on one."""
    return CLUSTER in os.environ


def cut_link(seconds: float | None = None) -> None:
    """Cut this process's virtual host off: what it sends, and is sent, is lost.

    Args:
        seconds: until its link is restored; None: it never is.
    """
    link = f"nsenter --net=/proc/{os.environ[CLUSTER]}/ns/net ip link set {socket.gethostname()}"
    subprocess.run(f"{link} down", shell=True, check=True)
    if seconds is not None:
        subprocess.Popen(f"sleep {seconds}; {link} up", shell=True, start_new_session=True)


def die() -> None:
    """Die at once, as by the kernel when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
