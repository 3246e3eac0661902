"""Encoding of vectors of weights as bytes: uncompressed, in half precision, or in 8 bits; and its form in NumPy.

An encoded vector is the same bytes in every framework.
"""

from __future__ import annotations

import abc
import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_async.runtime.interfaces import Rows, Vector
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.runtime.process_sets import RankGroup

# -- messages in any framework -----------------------------------------------------------------------------------------


HEADER = struct.Struct("<qd")
"""The header of a message: its key, the sender's push-sum weight."""


class OutgoingMessage(NamedTuple):
    """A message to the place ``to``: its bytes, and its push-sum weight if that is not the sender's."""

    to: int
    data: Vector
    weight: float | None = None


CHUNK = 2048
"""Elements that share a scale in 8 bits."""
LEVELS = 127
ALIGNMENT = 16
"""Alignment of rows in bytes, so that each can be read as numbers in place."""


def encoded_bytes(elements: int, itemsize: int, compression: str) -> int:
    """Return the size of an encoded vector in bytes."""
    if compression == "int8":
        return -(-elements // CHUNK) * (CHUNK + 4)
    return elements * (itemsize if compression == "none" else 2)


def row_bytes(nbytes: int) -> int:
    """Return the size of a row, which holds an encoded vector and its header, in bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT + HEADER.size


class MessageFormat(abc.ABC):
    """Messages between the ranks that share an optimizer, and operations on the vectors in them.

    A message holds one of ``parts`` equal parts of a vector, or an uncompressed vector in pieces.

    Args:
        elements: number of elements of a vector.
        kind: dtype of a vector in the framework, float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        messages: maximum number of messages per exchange.
        rank_group: the ranks that share the optimizer; None: all.
        parts: number of parts of a vector, one per rank of a host.
        plain: maximum number of uncompressed messages per exchange.

    Attributes:
        nbytes: bytes of an encoded part.
        rows: number of rows that a rank submits to each exchange.
        plain_rows: rows per uncompressed message.
        lossless: whether ``decode(encode(x))`` is x.
        differences: whether messages are differences from the receiver's estimate (CHOCO-SGD).
        process_set: the ranks that share the optimizer, as known to the binding's collectives; None: all.
        members: those ranks; empty: all.
        process_set_id: number of the process set; 0: all ranks.
    """

    _nothing: Rows
    """Rows of an exchange without messages."""

    def __init__(
        self,
        elements: int,
        kind: Any,
        compression: str,
        messages: int,
        rank_group: RankGroup | None = None,
        parts: int = 1,
        plain: int = 0,
    ) -> None:
        self._elements, self._parts, self._part = elements, parts, -(-elements // parts)
        self._kind, self._compression = kind, compression
        self.nbytes = encoded_bytes(self._part, kind.itemsize, compression)
        self._stride = row_bytes(self.nbytes)
        self.plain_rows = max(1, -(-self._part * kind.itemsize // max(1, self.nbytes)))
        self.rows = max(messages, plain * self.plain_rows)
        self._alone = parts == 1 == self.rows  # (behind one of several parts is the next part)
        self.lossless, self.differences = compression == "none", compression == "int8"
        self.process_set = None if rank_group is None else rank_group.process_set
        self.members = () if rank_group is None else rank_group.members
        self.process_set_id = 0 if rank_group is None else rank_group.id

    def encode(self, vector: Vector) -> Vector:
        """Return a part as bytes (uint8, flat), which may share its memory. The sender keeps the compression error."""
        if self._compression == "none":
            return self.as_bytes(vector)
        data = self._bytes(self._stride)[: self.nbytes]  # (with room for a header)
        (self._quantize if self._compression == "int8" else self._halve)(vector, data)
        return data

    @abc.abstractmethod
    def decode(self, data: Vector) -> Vector:
        """Return the part that was encoded."""

    @abc.abstractmethod
    def as_bytes(self, vector: Vector) -> Vector:
        """Return a part as bytes like ``encode``, without compression."""

    def mark(self, vector: Vector) -> None:  # noqa: B027  on a CPU a vector is computed at once
        """Note that a vector is computed, and read, by the work queued so far, for ``apart``."""

    def apart(self, *vectors: Vector) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the engine thread computes from vectors, behind no later work of the device. Work
        that the training thread queues afterwards comes behind it."""
        return contextlib.nullcontext()

    def from_bytes(self, data: Vector) -> Vector:
        """Return the part of which these are ``as_bytes``; further bytes may follow."""
        return data[: self._part * self._kind.itemsize].view(self._kind)

    def pack(self, messages: Sequence[tuple[Vector, bytes]]) -> Rows:
        """Return ``rows`` rows that hold these data, of at most ``nbytes`` bytes each, and their headers at the end."""
        if not messages:
            return self._nothing
        packed = self._row_of(messages[0][0]) if self._alone else None
        if packed is None:
            packed = self._bytes(self.rows * self._stride).reshape(self.rows, self._stride)
            for row, (data, _) in zip(packed, messages, strict=False):
                row[: len(data)] = data
        self._write_headers(packed[: len(messages), -HEADER.size :], b"".join(header for _, header in messages))
        return packed

    @abc.abstractmethod
    def unpack(self, row: Any) -> tuple[Vector, bytes]:
        """Return the data and the header of a row."""

    def room(self) -> Rows | None:
        """Return memory for the rows that an exchange receives at most; None: the collective allocates it."""
        return None

    @abc.abstractmethod
    def add(self, x: Vector, y: Vector, a: float) -> Vector:
        """Return x + a y; may change x."""

    @abc.abstractmethod
    def times(self, x: Vector, a: float) -> Vector:
        """Return a x as a new vector."""

    @abc.abstractmethod
    def split(self, vector: Vector) -> list[Vector]:
        """Return a vector as parts of equal length, the last padded with zeros."""

    @abc.abstractmethod
    def concatenate(self, pieces: Sequence[Vector]) -> Vector:
        """Return one flat array of several."""

    @abc.abstractmethod
    def join(self, pieces: Sequence[Vector]) -> Vector:
        """Return the vector that was ``split``."""

    @abc.abstractmethod
    def zeros(self) -> Vector:
        """Return a vector of zeros, which must not be changed; may return the same vector each time."""

    @abc.abstractmethod
    def scalar(self, value: float) -> Vector:
        """Return a vector of one float64."""

    @abc.abstractmethod
    def _bytes(self, nbytes: int) -> Vector:
        """Return uninitialized memory, uint8."""

    @abc.abstractmethod
    def _quantize(self, vector: Vector, data: Vector) -> None:
        """Encode a part in 8 bits per element: a float32 scale per ``CHUNK``, max |v| / 127, then the elements."""

    @abc.abstractmethod
    def _halve(self, vector: Vector, data: Vector) -> None:
        """Encode a part in half precision, clipped to the largest finite number."""

    @abc.abstractmethod
    def _row_of(self, data: Vector) -> Rows | None:
        """Return the row that begins with these bytes, if the memory behind them is free for the header."""

    @abc.abstractmethod
    def _write_headers(self, ends: Rows, headers: bytes) -> None:
        """Write headers to the ends of rows."""


# -- NumPy's form ------------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]
LARGEST = {"fp16": np.float32(65504), "bf16": np.uint32(0x7F7F0000).view(np.float32)}
"""The largest finite number of each half precision."""
CACHED = 32768
"""Number of elements that stay in a core's cache between two passes."""


def to_bf16(vector: Array) -> Array:
    """Convert float32 to the nearest bfloat16 (ties to even), as uint16."""
    bits = vector.astype(np.float32, copy=False).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(vector), np.uint16(0x7FC0), rounded)


def from_bf16(bits: Array) -> Array:
    """Convert bfloat16, as uint16, to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantize(vector: Array) -> Array:
    """Return a vector as bytes: a float32 scale per chunk, max |v| / 127, then 8 bits per element."""
    chunks = np.zeros((-(-len(vector) // CHUNK), CHUNK), np.float32)
    chunks.reshape(-1)[: len(vector)] = vector
    scales = np.abs(chunks).max(axis=1, keepdims=True) / np.float32(LEVELS)
    levels = np.rint(chunks / np.where(scales > 0, scales, 1)).astype(np.int8)
    return np.concatenate([scales.reshape(-1).view(np.uint8), levels.reshape(-1).view(np.uint8)])


def dequantize(data: Array, elements: int) -> Array:
    """Return the float32 vector of ``elements`` elements that ``quantize`` encoded."""
    count = -(-elements // CHUNK)
    scales = data[: 4 * count].view(np.float32).reshape(count, 1)
    levels = data[4 * count :].view(np.int8).reshape(count, CHUNK)
    return (levels * scales).reshape(-1)[:elements]


def vector_with_room(elements: int, dtype: Any, memory: ReusedBlocks) -> Array:
    """Return an uninitialized vector with room for a header behind it, so that its message is sent without a copy."""
    nbytes = elements * np.dtype(dtype).itemsize
    return memory.take(row_bytes(nbytes))[:nbytes].view(dtype)


def _runs(elements: int) -> Iterator[slice]:
    """Yield slices of a vector that fit into a core's cache."""
    for start in range(0, elements, CACHED):
        yield slice(start, start + CACHED)


class NumpyMessageFormat(MessageFormat):
    """Messages and vectors in NumPy.

    Args:
        elements, compression, messages, rank_group, parts, plain: as in ``MessageFormat``.
        dtype: float32 or float64.
        memory: memory of vectors and messages; None: new memory each time.
    """

    def __init__(
        self,
        elements: int,
        dtype: Any,
        compression: str,
        messages: int,
        rank_group: RankGroup | None = None,
        parts: int = 1,
        memory: ReusedBlocks | None = None,
        plain: int = 0,
    ) -> None:
        super().__init__(elements, np.dtype(dtype), compression, messages, rank_group, parts, plain)
        self._memory = ReusedBlocks(most=0) if memory is None else memory
        self._nothing, self._zeros = np.zeros((self.rows, self._stride), np.uint8), np.zeros(elements, self._kind)

    def decode(self, data: Array) -> Array:
        if self._compression == "int8":
            vector = dequantize(data, self._part)
        elif self._compression == "bf16":
            vector = from_bf16(data.view(np.uint16))
        else:
            vector = data.view(np.float16 if self._compression == "fp16" else self._kind)
        return vector.astype(self._kind, copy=False)

    def as_bytes(self, vector: Array) -> Array:
        return np.ascontiguousarray(vector, self._kind).view(np.uint8)

    def unpack(self, row: Array) -> tuple[Array, bytes]:
        return row[: self.nbytes], row[-HEADER.size :].tobytes()

    def add(self, x: Array, y: Array, a: float) -> Array:
        if a == 1.0:
            x += y
            return x
        for run in _runs(len(x)):
            x[run] += y[run] * self._kind.type(a)
        return x

    def times(self, x: Array, a: float) -> Array:
        own = len(x) == self._elements
        product = vector_with_room(self._elements, self._kind, self._memory) if own else np.empty_like(x)
        np.multiply(x, self._kind.type(a), out=product)
        return product

    def split(self, vector: Array) -> list[Array]:
        return list(np.pad(vector, (0, self._part * self._parts - self._elements)).reshape(self._parts, self._part))

    def concatenate(self, pieces: Sequence[Array]) -> Array:
        return np.concatenate(pieces)

    def join(self, pieces: Sequence[Array]) -> Array:
        return np.concatenate(pieces)[: self._elements]

    def zeros(self) -> Array:
        return self._zeros

    def scalar(self, value: float) -> Array:
        return np.array([value], np.float64)

    def _bytes(self, nbytes: int) -> Array:
        return self._memory.take(nbytes)

    def _quantize(self, vector: Array, data: Array) -> None:
        data[:] = quantize(vector)

    def _halve(self, vector: Array, data: Array) -> None:
        bf16, largest = self._compression == "bf16", LARGEST[self._compression]
        halves = data.view(np.uint16 if bf16 else np.float16)
        for run in _runs(len(vector)):
            clipped = np.clip(vector[run], -largest, largest)
            halves[run] = to_bf16(clipped) if bf16 else clipped

    def _row_of(self, data: Array) -> Array | None:
        block, stride = data.base, self._stride
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8:
            return None
        whole = block.shape == (stride,) and block.flags.writeable and block.ctypes.data == data.ctypes.data
        return block.reshape(1, stride) if whole else None

    def _write_headers(self, ends: Array, headers: bytes) -> None:
        ends[:] = np.frombuffer(headers, np.uint8).reshape(ends.shape)
