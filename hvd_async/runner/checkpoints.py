"""Checkpoints read again: by rank 0, for all ranks. What is wrong with a file is an error on every one of them."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HINT = "remove it, or start without --resume"


def shared(
    path: Path, made_by: object, read: Callable[[Path], Any], rank: int, broadcast: Callable[[Any], Any]
) -> dict[str, Any] | None:
    """Collective: what rank 0's file holds, None if it has none.

    made_by: what the file must say under that name. read: gives the content, by name. broadcast: rank 0's object.

    Raises ValueError, on every rank, if the file is damaged, is no checkpoint, or one of a run with other options.
    """
    found: dict[str, Any] | str | None = _read(path, made_by, read) if rank == 0 and path.exists() else None
    # Errors travel too: a rank that raised alone would leave the others waiting.
    found = broadcast(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _read(path: Path, made_by: object, read: Callable[[Path], Any]) -> dict[str, Any] | str:
    """The content, or what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # (which frameworks do not look at when they load)
        content = read(path)
    except Exception as error:  # noqa: BLE001  whatever a reader makes of damaged bytes
        return f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}): {HINT}"
    if damaged is not None:
        return f"{path} is damaged, its part {damaged} has a wrong checksum: {HINT}"
    if not isinstance(content, dict):
        return f"{path} is no checkpoint, it holds a {type(content).__name__}: {HINT}"
    if content.get("made_by") != made_by:
        return (
            f"{path} was written by a run with {content.get('made_by')}, this one has {made_by}: give the same "
            f"options, or another --checkpoint-dir"
        )
    return content


@contextlib.contextmanager
def fitting(path: Path) -> Iterator[None]:
    """In it a checkpoint's content is put where it belongs: what is missing, or of another kind, is a ValueError."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold what this run needs ({type(error).__name__}: {error}): {HINT}"
        ) from error
