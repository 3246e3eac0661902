"""Warnings of the background threads: lines to stderr, each in one write, so that none is torn apart.

A leaf module. ``logging`` is not used: a line must be out even if the launcher kills the process a moment later. So
whoever has something to say waits until it is written, but not for long: where nobody reads stderr, and the pipe is
full, lines wait in a thread of their own, and training goes on.
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
"""That wait for a reader; further ones are counted and dropped."""
LONGEST = 4000
"""Characters of a line."""
PATIENCE = 0.2
"""Seconds that a line may take to be written before whoever had it goes on."""
GOODBYE = 1.0
"""Seconds that a process waits at its end for its last lines to be written."""
PACKAGE = str(Path(__file__).parents[1])


def printable(text: str, longest: int = LONGEST) -> str:
    """``text`` as one line of bounded length, with nothing in it that would move a terminal's cursor."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:longest])
    return line if len(line) <= longest and len(text) <= longest else f"{line[:longest]} [...]"


class _Writer:
    """Writes lines in order, by a thread that lives as long as there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._busy = False

    def put(self, line: bytes) -> None:
        """Write ``line`` after all before it; return when that is done, or is known to take longer."""
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
        except RuntimeError:  # the interpreter is ending: there are no new threads
            self._run(may_block=False)
        self.flush(PATIENCE)

    def flush(self, timeout: float) -> None:
        """Wait until all is written, so many seconds at the most."""
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
                return f"hvd_async: {dropped} more lines were dropped: nobody read stderr\n".encode()
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
        return  # stderr is closed: there is nobody to tell


_writer = _Writer()


def _renew() -> None:
    """In a forked process, which has no thread but its own, and maybe a lock that nobody will give back."""
    global _writer
    _writer = _Writer()


os.register_at_fork(after_in_child=_renew)


def flush_notices() -> None:
    """Wait a little until what was said is written."""
    _writer.flush(GOODBYE)


atexit.register(flush_notices)


def warn(text: str) -> None:
    """Write ``hvd_async: text`` to the process's stderr."""
    _writer.put(f"hvd_async: {printable(text)}\n".encode())


def users_line() -> int:
    """Return the ``stacklevel`` with which a warning of the caller names the line outside of this package that led to
    it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    return level
