"""Ctrl-C at any line of the library, one after the other: what an interrupt may break must say so, or be right."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import hvd_async

LIBRARY = str(pathlib.Path(hvd_async.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt in this thread, at a line of the library's.

    Args:
        line: which of the lines that run, from 0; they are counted while ``armed``.
        folders: only files whose path ends in one of these count.
    """

    def __init__(self, line: int, *files: str) -> None:
        self._left, self._files = line, files
        self.seen = 0

    @property
    def struck(self) -> bool:
        """Whether it has come."""
        return self._left < 0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """In it the lines are counted, and the interrupt comes."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(LIBRARY) or not path.endswith(self._files or ".py"):
            return None
        if event == "line" and not self.struck:
            self.seen += 1
            self._left -= 1
            if self.struck:
                raise KeyboardInterrupt(f"{path}:{frame.f_lineno}")
        return self._trace
