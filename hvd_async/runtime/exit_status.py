"""How this process ends: normally, or on an error. Exit hooks are not told.

An uncaught exception is in ``sys.last_value``, where an earlier one may be too (a notebook's cell). ``sys.exit(n)`` and
``exit(n)`` raise an exception that may be caught. Both are told apart by what of the exception's way is left.
(``raise SystemExit(n)`` leaves nothing: it counts as a normal end, after which the process has status n.)
"""

from __future__ import annotations

import atexit
import builtins
import dis
import logging
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from hvd_async.runtime.log import flush_notices

_FAILED = 1


class _Exit(SystemExit):
    """``SystemExit`` as ``sys.exit`` raises it: it says when it has ended the process.

    The interpreter drops an uncaught one when no Python code runs any more; a caught one is dropped by code that runs.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        exit_status.raised = weakref.ref(self)

    def __del__(self) -> None:
        last = exit_status.raised is not None and exit_status.raised() is self  # (not the context of a later one)
        if last and sys._getframe().f_back is None:
            exit_status.code = self.code


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def _uncaught(error: BaseException) -> bool:
    """Whether nothing has run since in the outermost frame that the exception is known to have come to."""
    if error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame
    return frame.f_lasti == error.__traceback__.tb_lasti or _opname(frame) in ("RAISE_VARARGS", "RERAISE")


def _opname(frame: FrameType) -> str:
    """The last instruction that a frame has run."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


class ExitStatus:
    """One a process.

    Attributes:
        code: what an exception of ``sys.exit`` has ended the process with; None if none has.
        raised: the last of these that was raised.
    """

    def __init__(self) -> None:
        self.code: object = None
        self.raised: weakref.ref[SystemExit] | None = None
        self._watching = self._failed = self._forked = False

    def watch(self) -> None:
        """From now on know of ``sys.exit`` and ``exit``; calling it again does nothing."""
        if self._watching:
            return
        self._watching = True
        original = sys.exit

        def exit(status: Any = None, /) -> Any:
            if threading.current_thread() is not threading.main_thread():  # it ends the thread only
                original(status)
            raise _Exit(status)

        sys.exit = exit
        main = vars(sys.modules["__main__"])
        for name in [name for name, value in main.items() if value is original]:
            main[name] = exit  # (the script did `from sys import exit`)
        quitter = type(getattr(builtins, "exit", None))
        if quitter.__name__ == "Quitter":  # (of the module ``site``)

            def quit(self: Any, code: Any = None) -> Any:
                exit(code)

            quitter.__call__ = quit  # type: ignore[method-assign]

    def error(self) -> str | None:
        """Return the error that the process ends on, None if it ends normally; for exit hooks."""
        last = getattr(sys, "last_value", None)
        if last is not None and _uncaught(last) and not hasattr(sys, "ps1"):
            return f"{type(last).__name__}: {last}"
        raised = None if self.raised is None else self.raised()
        if raised is not None and _uncaught(raised):  # something still holds it
            self.code = raised.code
        return None if self.code in (None, 0) else f"sys.exit({self.code!r})"

    def fail(self) -> None:
        """Have the process end with status 1, though Python takes its end for a normal one."""
        self._failed = True

    def in_child(self) -> None:
        """(In a forked child.) Have the process end without the destructors of C++ libraries, with the status it has.

        Horovod's would take apart what the child shares with its parent (Gloo's epoll set), whose connections are dead
        then. What ``raise SystemExit(n)`` would have for a status is lost: it is 0.
        """
        self._forked = True

    def _status(self) -> int:
        error = self.error()
        if error is None:
            return _FAILED if self._failed else 0
        return self.code if isinstance(self.code, int) and self.code else _FAILED

    def enforce(self) -> None:
        """The exit hook for both; the last of all hooks that were registered after this module was imported."""
        if self._failed or self._forked:
            logging.shutdown()
            flush_notices()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self._status())


exit_status = ExitStatus()
atexit.register(exit_status.enforce)
