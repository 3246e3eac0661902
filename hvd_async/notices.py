"""What the background threads have to say to people: one line to stderr, in one write, so that it is not torn apart.

A leaf module. ``logging`` is not used: the line must be out even if the launcher kills the process a moment later.
"""

from __future__ import annotations

import os


def notice(text: str) -> None:
    """Write ``hvd_async: text`` to the process's stderr."""
    try:
        os.write(2, f"hvd_async: {text}\n".encode())
    except OSError:
        return  # stderr is closed: there is nobody to tell
