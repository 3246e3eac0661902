"""Warnings of the background threads: lines on stderr, each written at once, so that lines do not mix.

A leaf module. ``logging`` is not used: a line must be written even if the launcher kills the process a moment later. So
the caller waits until its line is written, for a limited time. If the pipe of stderr is full, because no process reads
it, lines wait in a separate thread, and training continues.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
from collections import deque
from pathlib import Path

MOST_LINES = 1000
"""Limit of pending lines; further ones are counted and dropped."""
LONGEST = 4000
"""Limit of the characters per line."""
PATIENCE = 0.2
"""Seconds that a caller waits for its line to be written."""
GOODBYE = 1.0
"""Seconds that a process waits at its end until its last lines are written."""
INSTALLED = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
"""In the paths of the files of installed packages."""
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def printable(text: str) -> str:
    """Return ``text`` as one line of bounded length, without control characters."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} [...]"


class _Writer:
    """Writer of lines in order, with a thread that runs while lines are pending."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._busy = False

    def put(self, line: bytes) -> None:
        """Write ``line`` after all earlier ones; return when it is written, or after ``PATIENCE`` seconds."""
        with self._changed:
            if len(self._lines) >= MOST_LINES:
                self._dropped += 1
                return
            self._lines.append(line)
            if self._busy:
                return
            self._busy = True
        try:
            threading.Thread(target=self._run, name="hvd_async-notices", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and starts no threads
            self._run(may_block=False)
        self.flush(PATIENCE)

    def flush(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all lines are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, timeout)

    def _run(self, may_block: bool = True) -> None:
        while (line := self._next()) is not None:
            if may_block or _writable():
                _write(line)

    def _next(self) -> bytes | None:
        with self._changed:
            if self._lines:
                return self._lines.popleft()
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                return f"hvd_async: {dropped} more lines were dropped: stderr was not read\n".encode()
            self._busy = False
            self._changed.notify_all()
            return None


def _writable() -> bool:
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return bool(poll.poll(PATIENCE * 1000))


def _write(line: bytes) -> None:
    try:
        os.write(2, line)
    except OSError:
        return  # (stderr is closed)


_writer = _Writer()


def _renew() -> None:
    """Reset the writer in a forked child, which has no writer thread, and may have a lock that is never released."""
    global _writer
    _writer = _Writer()


os.register_at_fork(after_in_child=_renew)


def flush_notices() -> None:
    """Wait at most ``GOODBYE`` seconds until all lines are written."""
    _writer.flush(GOODBYE)


atexit.register(flush_notices)


def warn(text: str) -> None:
    """Write ``hvd_async: text`` to stderr."""
    _writer.put(f"hvd_async: {printable(text)}\n".encode())


def users_line() -> int:
    """Return the ``stacklevel`` with which a warning of the caller names the line of user code that led to it.

    It is neither this library's nor an installed package's: schedulers, a GradScaler and trainers call ``step()`` too.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_of_a_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _is_of_a_library(file: str) -> bool:
    """Return whether a source file is this library's, ``contextlib``, or an installed package's."""
    return file.startswith((PACKAGE, contextlib.__file__)) or any(folder in file for folder in INSTALLED)
