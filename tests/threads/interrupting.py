"""A KeyboardInterrupt at a chosen line of the library: whatever it breaks must say so, or be right."""

from __future__ import annotations

import contextlib
import functools
import linecache
import pathlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import hvd_async

LIBRARY = pathlib.Path(hvd_async.__file__).parent
SIMULATED = ("testing.py",)
"""Files of the package that stand for a network and a job in tests: an interrupt there interrupts no library code."""


@functools.cache
def files_of(names: tuple[str, ...]) -> frozenset[str]:
    """Return the paths of the package's Python files that ``names`` select.

    Args:
        names: paths inside the package, of files (``"runtime/memory.py"``) or folders (``"torch"``; ``"."`` is all).

    Raises:
        ValueError: a name selects no file, so a test that names it would test less than it says.
    """
    chosen = set[str]()
    for name in names:
        path = LIBRARY / name
        found = {str(one) for one in ([path] if path.is_file() else path.rglob("*.py"))}
        if not found:
            raise ValueError(f"name must be a file or a folder of {LIBRARY}, got {name!r}. Was it renamed?")
        chosen |= found
    return frozenset(chosen)


class Interrupt:
    """Raises KeyboardInterrupt in this thread, at a line of the library.

    No interrupt comes between the last line of a ``with`` block and the exit of its context: Python traces that moment
    as a line, but handles no signal in it. (The lines that run in the exit are lines like others.)

    Args:
        line: index of the line to interrupt, among the lines that run while ``armed``.
        without: files and folders whose lines do not count, as ``files_of`` takes them. All others of the package do.

    Attributes:
        seen: number of lines that have run while armed, up to the interrupt.
    """

    def __init__(self, line: int, without: tuple[str, ...] = SIMULATED) -> None:
        self._left, self._traced = line, files_of((".",)) - files_of(without)
        self.seen = 0

    @property
    def struck(self) -> bool:
        """Whether the interrupt has come."""
        return self._left < 0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Count lines inside, and interrupt at the chosen one."""
        before = sys.gettrace()
        sys.settrace(self._trace_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in self._traced:
            return None
        entered = set[int]()

        def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
            line = frame.f_lineno
            if event == "line" and not self.struck and line not in entered:
                if linecache.getline(path, line).lstrip().startswith("with "):
                    entered.add(line)
                self.seen += 1
                self._left -= 1
                if self.struck:
                    raise KeyboardInterrupt(f"{path}:{line}")
            return trace_line

        return trace_line
