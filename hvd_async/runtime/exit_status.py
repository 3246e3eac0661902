"""Whether this process ends normally or on an error, which Python does not report to exit hooks.

``sys.last_value`` holds an uncaught exception, but possibly an earlier one (of a notebook's cell). ``sys.exit(n)`` and
``exit(n)`` raise an exception that may be caught. Both cases are distinguished by what an exception leaves behind: the
frame that it has reached, and the place where it was dropped. (``raise SystemExit(n)`` leaves nothing: it counts as a
normal end, and the process has status n.)
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
from typing import Any

from hvd_async.runtime.log import flush_notices

_FAILED = 1


class _Exit(SystemExit):
    """``SystemExit`` as ``sys.exit`` raises it; it records when it has ended the process.

    The interpreter drops an uncaught one when no Python code runs any more; a caught one is dropped by running code.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        exit_status.raised = weakref.ref(self)

    def __del__(self) -> None:
        last = exit_status.raised is not None and exit_status.raised() is self  # (not the context of a later one)
        if last and sys._getframe().f_back is None:
            exit_status.code = self.code


def _uncaught(error: BaseException) -> bool:
    """Return whether no code has run since the exception in the outermost frame that it has reached."""
    if error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame
    last_instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return frame.f_lasti == error.__traceback__.tb_lasti or last_instruction in ("RAISE_VARARGS", "RERAISE")


class ExitStatus:
    """State of how this process ends; a singleton.

    Attributes:
        code: the code of the ``sys.exit`` that has ended the process; None if none has.
        raised: the last exception that ``sys.exit`` has raised.
    """

    def __init__(self) -> None:
        self.code: object = None
        self.raised: weakref.ref[SystemExit] | None = None
        self._watching = self._failed = self._skips_destructors = False

    def watch(self) -> None:
        """Patch ``sys.exit`` and ``exit`` to record their use; calling it again does nothing."""
        if self._watching:
            return
        self._watching = True
        original = sys.exit

        def exit(status: Any = None, /) -> Any:
            if threading.current_thread() is not threading.main_thread():  # (it only ends the thread)
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
        """Return the error on which the process ends, None if it ends normally; for exit hooks."""
        last = getattr(sys, "last_value", None)
        if last is not None and _uncaught(last) and not hasattr(sys, "ps1"):
            return f"{type(last).__name__}: {last}"
        raised = None if self.raised is None else self.raised()
        if raised is not None and _uncaught(raised):  # something still holds it
            self.code = raised.code
        return None if self.code in (None, 0) else f"sys.exit({self.code!r})"

    def fail(self) -> None:
        """Make the process end with status 1, although Python considers its end normal."""
        self._failed = True

    def skip_destructors(self) -> None:
        """Make the process end with its status, but without the destructors of C++ libraries.

        In a forked child Horovod's would change state that the child shares with its parent (Gloo's epoll set), and end
        the parent's connections. With a collective in flight they would wait for the other ranks, and a thread that
        returns from it to a finalized interpreter would abort the process. The status of ``raise SystemExit(n)`` is
        lost: it becomes 0.
        """
        self._skips_destructors = True

    def _status(self) -> int:
        error = self.error()
        if error is None:
            return _FAILED if self._failed else 0
        return self.code if isinstance(self.code, int) and self.code else _FAILED

    def enforce(self) -> None:
        """Enforce ``fail`` and ``skip_destructors``, after all exit hooks registered since this module was imported."""
        if self._failed or self._skips_destructors:
            logging.shutdown()
            flush_notices()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self._status())


exit_status = ExitStatus()
atexit.register(exit_status.enforce)
