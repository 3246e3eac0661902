"""Files that are whole or not there: what is read again after a crash must not be half written."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in place at once; on an error the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keras chooses a file's format by its ending, so the ending is kept.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # else the new name may reach the disk before the contents do
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write CSV, whole or not at all."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    write_atomically(path, lambda place: place.write_text(text.getvalue(), newline=""))
