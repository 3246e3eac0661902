"""The hosts of an elastic job as its ranks see them: lines of a file, where more may be written."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


class Hosts:
    """The hosts that Horovod finds: lines of a file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "hosts"

    def change(self, gone: str | None = None, more: int = 0) -> None:
        """Take a host away, or add new ones."""
        if gone is None and more < 1:
            return
        lines = [line for line in self._file.read_text().split() if line != f"{gone}:1"]
        lines += [f"{self._new()}:1" for _ in range(more)]
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        unfinished.write_text("".join(f"{line}\n" for line in lines))
        unfinished.replace(self._file)

    def alive(self) -> list[str]:
        """Return those on which no process has died."""
        names = [line.partition(":")[0] for line in self._file.read_text().split()]
        return [name for name in names if not (self._folder / f"dead.{name}").exists()]

    def _new(self) -> str:
        """One more name of this machine. (A label has 63 letters at the most.)"""
        number = claim(self._folder, "host")
        return f"0x{'0' * (number // 50)}7f.0x{'0' * (number % 50)}1"


def claim(folder: Path, name: str) -> int:
    """Return the first number that no process has had by this name."""
    number = 0
    while True:
        with contextlib.suppress(FileExistsError), (folder / f"{name}.{number}").open("x"):
            return number
        number += 1


def die() -> None:
    """Die at once, as by the kernel when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
