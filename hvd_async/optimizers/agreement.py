"""Collectives over replicas, common to all families: agreement of buffers, and the distance of the ranks' weights."""

from __future__ import annotations

import abc
import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.log import users_line
from hvd_async.runtime.worker import Worker

Array = np.ndarray[Any, Any]


class Buffer(abc.ABC):
    """A tensor or variable of the model that no optimizer trains, on one rank.

    Attributes:
        name: the name that messages show.
        key: unique among a rank's buffers, and the same on all ranks.
        kind: shape and dtype, in one string.
        is_statistic: whether it is a running mean or variance of batch norm, which ranks average.
        is_writable: whether ``put_data`` can be called.
    """

    name: str
    key: str
    kind: str
    is_statistic: bool
    is_writable = True

    @abc.abstractmethod
    def data(self) -> Array:
        """Return the elements as bytes, shape (n,), uint8; n depends on ``kind`` alone if it is writable."""

    @abc.abstractmethod
    def put_data(self, data: Array) -> None:
        """Write the bytes that ``data`` returned on another rank."""

    @abc.abstractmethod
    def values(self) -> Array:
        """Return the elements of a statistic, shape (n,), float64, a new array."""

    @abc.abstractmethod
    def put_values(self, values: Array) -> None:
        """Write the elements of a statistic, shape (n,), float64."""


class Buffers(NamedTuple):
    """The buffers of one rank.

    Attributes:
        every: all buffers, with distinct keys.
        vector_of: converts an array on the CPU into a vector of the framework.
    """

    every: Sequence[Buffer]
    vector_of: Callable[[Array], Vector]


def unique_keys(names: Iterable[str]) -> list[str]:
    """Return a key for each name: the name, with a number where it occurred before."""
    seen: dict[str, int] = {}
    keys = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        keys.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return keys


def kept_buffers(buffers: Callable[[], Buffers | None]) -> Callable[[], None]:
    """Return a function that restores the present values of buffers.

    Args:
        buffers: returns the buffers at the time of the call.
    """

    def writable() -> dict[tuple[str, str], Buffer]:
        held = buffers()
        return {} if held is None else {(one.key, one.kind): one for one in held.every if one.is_writable}

    kept = {key: one.data() for key, one in writable().items()}

    def put_back() -> None:
        for key, one in writable().items():
            if key in kept:
                one.put_data(kept[key])

    return put_back


def unify_buffers(worker: Worker, buffers: Buffers | None, policy: str, root: int) -> None:
    """Make each buffer agree separately. A collective of the ranks that still have the optimizer.

    With policy "average", statistics become their mean over the ranks where they are finite, computed in float64. All
    other buffers, and every buffer with policy "root", become a copy of those of rank ``root``, byte by byte. A buffer
    that is equal on all ranks does not change. A buffer that some ranks lack, or that has different shapes or dtypes on
    the ranks, does not change either; a warning names it.

    Args:
        worker: this rank's worker.
        buffers: this rank's buffers; None, on all ranks, if there are none.
        policy: "average" or "root".
        root: a rank; if it no longer has the optimizer, the lowest rank that has it is used instead.
    """
    if buffers is None:
        return
    own = {buffer.key: buffer for buffer in buffers.every}
    described = {key: _describe(buffer, policy) for key, buffer in own.items()}
    table = json.dumps(described).encode()
    if _is_the_same(worker, buffers, table):
        return
    length = np.array([len(table)], np.int64).view(np.uint8)
    (length_at_root,) = _at_root(worker, buffers, length, root, "the number of buffers").view(np.int64)
    sent = np.resize(np.frombuffer(table, np.uint8), length_at_root)  # (the root sends its entire table)
    at_root = json.loads(_at_root(worker, buffers, sent, root, "the names of buffers").tobytes())
    # Find the root's buffers that all ranks have, and those of them that differ on any rank.
    has = {key for key, one in at_root.items() if key in own and described[key][:-1] == one[:-1]}
    differs = {key for key in has if described[key] != at_root[key]}
    flags = np.array([[key in found for key in at_root] for found in (has, differs)], np.float64)
    total, ranks, _ = worker.sum(buffers.vector_of(flags.reshape(-1)), "the comparison of buffers")
    found = list(zip(at_root, *np.asarray(total).reshape(2, -1), strict=True))
    on_all = {key for key, having, _ in found if having == len(ranks)}
    different = [key for key, _, differing in found if key in on_all and differing]
    averaged = [key for key in different if at_root[key][1]]
    copied = [key for key in different if at_root[key][2] and key not in averaged]
    _average(worker, buffers, [own[key] for key in averaged])
    if copied:
        parts = [own[key].data() for key in copied]
        data = _at_root(worker, buffers, np.concatenate(parts), root, "the broadcast of buffers")
        ends = np.cumsum([len(part) for part in parts])[:-1]
        for key, part in zip(copied, np.split(data, ends), strict=True):
            if key in differs:
                own[key].put_data(part)
    left = own.keys() - on_all | set(different) - {*averaged, *copied}
    _warn([own[key].name for key in own if key in left], UNLIKE)


UNLIKE = (
    "have different shapes or dtypes on the ranks, or cannot be copied, or some ranks lack them: each keeps its own"
)
NOT_FINITE = "are not finite on this rank, which has no part in their average"


def _describe(buffer: Buffer, policy: str) -> list[Any]:
    """Return a buffer's kind, whether it is averaged, whether it can be copied, and its checksum."""
    averaged = policy == "average" and buffer.is_statistic
    return [buffer.kind, averaged, buffer.is_writable, zlib.crc32(buffer.data().tobytes())]


def _is_the_same(worker: Worker, buffers: Buffers, table: bytes) -> bool:
    """Return whether ``table`` is the same on all ranks. A collective."""
    digest = np.frombuffer(hashlib.blake2b(table, digest_size=16).digest(), np.uint8)
    bits = np.unpackbits(digest).astype(np.float64)
    total, ranks, _ = worker.sum(buffers.vector_of(bits), "the checksum of buffers")
    set_on = np.asarray(total)  # (number of ranks that set each bit)
    return bool(((set_on == 0) | (set_on == len(ranks))).all())


def _at_root(worker: Worker, buffers: Buffers, data: Array, root: int, what: str) -> Array:
    """Return rank ``root``'s bytes. A collective."""
    return np.asarray(worker.broadcast(buffers.vector_of(data), root, what)).astype(np.uint8)  # (a copy)


def _average(worker: Worker, buffers: Buffers, statistics: Sequence[Buffer]) -> None:
    """Replace statistics by their mean over the ranks where they are finite. A collective, if there are any."""
    if not statistics:
        return
    values = [buffer.values() for buffer in statistics]
    finite = [bool(np.isfinite(one).all()) for one in values]
    counted = [one if is_finite else np.zeros_like(one) for one, is_finite in zip(values, finite, strict=True)]
    vector = np.concatenate([*counted, np.array(finite, np.float64)])
    total = np.asarray(worker.sum(buffers.vector_of(vector), "the average of batch-norm statistics").vector)
    *sums, counts = np.split(total, np.cumsum([len(one) for one in values]))
    for buffer, one, count in zip(statistics, sums, counts, strict=True):
        if count:
            buffer.put_values(one / count)
    _warn([one.name for one, is_finite in zip(statistics, finite, strict=True) if not is_finite], NOT_FINITE)


def _warn(names: Sequence[str], problem: str) -> None:
    """Warn that buffers have a problem."""
    if names:
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(f"buffers {listed} {problem}", stacklevel=users_line())


def consensus_distance(worker: Worker, weights: Vector) -> float:
    """Return sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal. A collective.

    Args:
        worker: this rank's worker.
        weights: this rank's weights, shape (n,), float64.
    """
    total, ranks, _ = worker.sum(weights + 0.0, "consensus_distance()")
    square = ((weights - total / len(ranks)) ** 2).sum().reshape(1)
    total, ranks, _ = worker.sum(square, "consensus_distance()")
    return math.sqrt(total[0] / len(ranks))
