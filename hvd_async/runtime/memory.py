"""Memory for the vectors of each step, reused once a vector is no longer referenced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ALIGNMENT = 64
"""Alignment of blocks in bytes: frameworks use aligned memory directly, and copy other memory first."""


class ReusedBlocks:
    """Pool of memory blocks for vectors on a CPU, kept until ``clear``.

    The system allocates and frees large blocks page by page, which costs more than copying them.

    A block becomes free when the last array on it is deleted, including views and references of frameworks.

    Args:
        most: limit of free blocks per length: after a straggler has caught up, there would be many more.
    """

    def __init__(self, most: int) -> None:
        self._free: dict[int, list[Bytes]] = {}
        self._lent: dict[int, tuple[weakref.ref[Bytes], list[Bytes], Bytes]] = {}
        """By id of the reference of each array in use: this reference, the list for its block when free, the block."""
        self._take_back = _taking_back(self._lent, most)

    def take(self, nbytes: int) -> Bytes:
        """Return an uninitialized array of ``nbytes`` bytes."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        free = self._free.setdefault(nbytes, [])
        try:
            block = free.pop()  # (another thread may have taken the last one)
        except IndexError:
            block = _aligned(nbytes)
        # (on a buffer: a view of a view refers to the base array, so the view in between would be deleted too early)
        lent: Bytes = np.frombuffer(block.data, np.uint8)
        reference = weakref.ref(lent, self._take_back)
        self._lent[id(reference)] = reference, free, block
        return lent

    def clear(self) -> None:
        """Release the free blocks now, and the others when they become free."""
        self._free = {}


def _aligned(nbytes: int) -> Bytes:
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def _taking_back(
    lent: dict[int, tuple[weakref.ref[Bytes], list[Bytes], Bytes]], most: int
) -> Callable[[weakref.ref[Bytes]], None]:
    """Return a callback for weak references, which frees the block of a deleted array. (A ``weakref.finalize`` costs
    several times as much.)"""

    def take_back(reference: weakref.ref[Bytes]) -> None:
        _, free, block = lent.pop(id(reference))
        if len(free) < most:
            free.append(block)

    return take_back
