"""Memory of vectors that come and go with each step: that of one which nobody holds any more serves the next one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ALIGNMENT = 64
"""Bytes to which blocks are aligned: frameworks' kernels take memory as it is then, and copy other memory first."""


class ReusedBlocks:
    """Blocks of memory for vectors on a CPU, kept until ``clear``. (The system gives and takes back large blocks page
    by page, which costs more than to copy as much.)

    A block is free when the last array on it is gone, views and references of frameworks included.

    Args:
        most: free blocks of one length that are kept: after a late rank has caught up there are many more.
    """

    def __init__(self, most: int) -> None:
        self._free: dict[int, list[Bytes]] = {}
        self._lent: dict[int, tuple[weakref.ref[Bytes], list[Bytes], Bytes]] = {}
        """For each lent array, by the id of its reference: the reference, the list its block returns to, the block."""
        self._take_back = _taking_back(self._lent, most)

    def take(self, nbytes: int) -> Bytes:
        """Return an array of so many bytes, with whatever was there before."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        free = self._free.setdefault(nbytes, [])
        try:
            block = free.pop()  # (another thread may have been quicker)
        except IndexError:
            block = _aligned(nbytes)
        # (on a buffer: a view of an array's view holds the array, and the view in between would be gone before)
        lent: Bytes = np.frombuffer(block.data, np.uint8)
        reference = weakref.ref(lent, self._take_back)
        self._lent[id(reference)] = reference, free, block
        return lent

    def clear(self) -> None:
        """Give back what is free now, and later what is still held."""
        self._free = {}


def _aligned(nbytes: int) -> Bytes:
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def _taking_back(
    lent: dict[int, tuple[weakref.ref[Bytes], list[Bytes], Bytes]], most: int
) -> Callable[[weakref.ref[Bytes]], None]:
    """Return a callback for references to lent arrays, which returns the block of an array that is gone. (A
    ``weakref.finalize`` costs several times as much.)"""

    def take_back(reference: weakref.ref[Bytes]) -> None:
        _, free, block = lent.pop(id(reference))
        if len(free) < most:
            free.append(block)

    return take_back
