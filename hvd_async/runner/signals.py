"""Stopping a run from outside: a signal asks for a checkpoint and the end, an exit status says that work is left.

That is what a cluster's scheduler needs that is about to take the machines away.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable

SIGNAL = signal.SIGUSR1
UNFINISHED = os.EX_TEMPFAIL
"""The exit status, 75, of a run that was stopped: to be started again with --resume."""


def asked_by_signal() -> Callable[[], bool]:
    """From now on SIGUSR1 does not end the process; returns what tells whether it has come. For the main thread.

    A launcher may start ranks with the signal blocked: one that comes before this is then kept, and not deadly.
    """
    came: list[int] = []
    signal.signal(SIGNAL, lambda number, frame: came.append(number))
    signal.siginterrupt(SIGNAL, False)  # no library's system call is to fail because of it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    # At its very end Python takes its handlers back, and one more signal would be deadly.
    atexit.register(signal.signal, SIGNAL, signal.SIG_IGN)
    return lambda: bool(came)
