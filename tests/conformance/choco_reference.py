"""Messages of 8 bits with error feedback in float64 NumPy: rounding in chunks, and copies at both ends of an edge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.conformance.gossip_reference import Edge, name
from tests.conformance.reference import Array

CHUNK = 2048
"""Elements that share a scale."""


def quantise(values: Array) -> tuple[np.ndarray[Any, np.dtype[np.int8]], Array]:
    """Codes, and for each element the scale of its chunk: max|v| / 127, and round half to even(v / scale), or 0."""
    scales = [np.abs(values[first : first + CHUNK]).max() / 127 for first in range(0, len(values), CHUNK)]
    spread = np.repeat(np.array(scales), CHUNK)[: len(values)]
    codes = np.rint(np.divide(values, spread, out=np.zeros_like(values), where=spread > 0))
    return codes.astype(np.int8), spread


def int8(values: Array) -> Array:
    """What a receiver decodes of ``quantise``."""
    codes, scales = quantise(values)
    return codes * scales


class Choco:
    """8 bits with error feedback, an ``encode`` for one run. Rounding is not continuous: a run in float32 may fall on
    the other side of a half, so its own messages are replayed, after a check that they may be so.

    Args:
        recorded: the decoded differences Q(x - c) that a run sent, by (receiver, sender, step); none: computed here.
        within: how far a recorded one may be off beyond half its scale.
    """

    def __init__(self, recorded: Mapping[Edge, Array] | None = None, within: float = 1e-5) -> None:
        self.recorded, self.within = recorded, within
        self.copies: dict[tuple[int, int], Array] = {}

    def __call__(self, x: Array, receiver: int, sender: int, step: int) -> Array:
        copy = self.copies.get((receiver, sender), np.zeros_like(x))
        difference = int8(x - copy)
        if self.recorded is not None:
            difference = np.asarray(self.recorded.get((receiver, sender, step), np.nan), np.float64)
            allowed = quantise(x - copy)[1] / 2 + self.within
            if not (np.abs(difference - (x - copy)) <= allowed).all():
                message = name((receiver, sender, step))
                raise ValueError(f"impossible log: {message} was not recorded, or is no rounding of what it stands for")
        self.copies[receiver, sender] = copy + difference
        return self.copies[receiver, sender]
