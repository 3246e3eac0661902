"""Encoding of vectors of weights as bytes, in NumPy: uncompressed, in half precision, or in 8 bits."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvd_async.runtime.interfaces import Rows, Vector
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.runtime.process_sets import RankGroup

# -- interface that a binding implements -------------------------------------------------------------------------------


HEADER = struct.Struct("<qd")
"""The header of a message: its key, the sender's push-sum weight."""


class OutgoingMessage(NamedTuple):
    """A message to the place ``to``: its bytes, and its push-sum weight if that is not the sender's."""

    to: int
    data: Vector
    weight: float | None = None


@dataclass(frozen=True)
class MessageFormat:
    """A binding's message format and vector operations.

    Attributes:
        encode: returns a vector as bytes (uint8, flat), which may share its memory.
        decode: returns the vector of encoded bytes.
        as_bytes: as ``encode``, without compression.
        from_bytes: inverse of ``as_bytes``; further bytes may follow.
        pack: returns ``rows`` rows that hold these data, of at most ``nbytes`` bytes each, and their headers.
        unpack: returns the data and the header of a row.
        nbytes: bytes of an encoded vector.
        rows: number of rows that a rank submits to each exchange.
        plain_rows: rows per uncompressed message.
        lossless: whether ``decode(encode(x))`` is x.
        differences: whether messages are differences from the receiver's estimate (CHOCO-SGD).
        add: ``add(x, y, a)`` returns x + a y; may change x.
        times: ``times(x, a)`` returns a x as a new vector.
        split: returns a vector as parts of equal length, one per rank of a host, the last padded with zeros.
        concatenate: returns one flat array of several.
        join: inverse of ``split``.
        room: returns memory for the rows that an exchange receives at most; None: the collective allocates it.
        zeros: returns a vector of zeros, which must not be changed; may return the same vector each time.
        scalar: returns a vector of one float64.
        process_set: the ranks that share the optimizer, as known to the binding's collectives; None: all.
        members: those ranks; empty: all.
        process_set_id: number of the process set; 0: all ranks.
    """

    encode: Callable[[Vector], Vector]
    decode: Callable[[Vector], Vector]
    as_bytes: Callable[[Vector], Vector]
    from_bytes: Callable[[Vector], Vector]
    pack: Callable[[Sequence[tuple[Vector, bytes]]], Rows]
    unpack: Callable[[Any], tuple[Vector, bytes]]
    nbytes: int
    rows: int
    plain_rows: int
    lossless: bool
    differences: bool
    add: Callable[[Vector, Vector, float], Vector]
    split: Callable[[Vector], list[Vector]]
    concatenate: Callable[[Sequence[Vector]], Vector]
    join: Callable[[Sequence[Vector]], Vector]
    zeros: Callable[[], Vector]
    scalar: Callable[[float], Vector]
    times: Callable[[Vector, float], Vector] = operator.mul
    room: Callable[[], Rows | None] = lambda: None
    process_set: Any = None
    members: tuple[int, ...] = ()
    process_set_id: int = 0


# -- NumPy's format ----------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]
CHUNK = 2048
"""Elements that share a scale in 8 bits."""
LEVELS = 127
LARGEST = {"fp16": np.float32(65504), "bf16": np.uint32(0x7F7F0000).view(np.float32)}
"""The largest finite number of each half precision."""
ALIGNMENT = 16
"""Alignment of rows in bytes, so that each can be read as numbers in place."""
CACHED = 32768
"""Number of elements that stay in a core's cache between two passes."""


def encoded_bytes(elements: int, itemsize: int, compression: str) -> int:
    """Return the size of an encoded vector in bytes."""
    if compression == "int8":
        return -(-elements // CHUNK) * (CHUNK + 4)
    return elements * (itemsize if compression == "none" else 2)


def plain_rows(elements: int, itemsize: int, compression: str) -> int:
    """Return the number of rows, of ``encoded_bytes`` each, that an uncompressed message takes."""
    nbytes = encoded_bytes(elements, itemsize, compression)
    return max(1, -(-elements * itemsize // max(1, nbytes)))


def row_bytes(nbytes: int) -> int:
    """Return the size of a row, which holds an encoded vector and its header, in bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT + HEADER.size


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


class Codec:
    """Encoder and decoder of vectors of one length; methods as in ``MessageFormat``.

    Args:
        elements: number of elements of a vector.
        kind: float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        memory: memory of encoded vectors, with room for a header.

    Attributes:
        nbytes: bytes of an encoded vector.
    """

    def __init__(self, elements: int, kind: np.dtype[Any], compression: str, memory: ReusedBlocks) -> None:
        self._elements, self._kind, self._compression, self._memory = elements, kind, compression, memory
        self.nbytes = encoded_bytes(elements, kind.itemsize, compression)

    def encode(self, vector: Array) -> Array:
        if self._compression == "int8":
            return quantize(vector)
        if self._compression == "none":
            return self.as_bytes(vector)
        data, largest = self._memory.take(row_bytes(self.nbytes))[: self.nbytes], LARGEST[self._compression]
        bf16 = self._compression == "bf16"
        halves = data.view(np.uint16 if bf16 else np.float16)
        for run in _runs(self._elements):  # the sender keeps the error of clipping and rounding
            clipped = np.clip(vector[run], -largest, largest)
            halves[run] = to_bf16(clipped) if bf16 else clipped
        return data

    def decode(self, data: Array) -> Array:
        if self._compression == "int8":
            return dequantize(data, self._elements).astype(self._kind, copy=False)
        if self._compression == "bf16":
            return from_bf16(data.view(np.uint16)).astype(self._kind, copy=False)
        return data.view(np.float16 if self._compression == "fp16" else self._kind).astype(self._kind, copy=False)

    def as_bytes(self, vector: Array) -> Array:
        return np.ascontiguousarray(vector, self._kind).view(np.uint8)

    def from_bytes(self, data: Array) -> Array:
        return data[: self._elements * self._kind.itemsize].view(self._kind)


class RowFormat:
    """Layout of an exchange's rows, each an encoded vector with a header at its end; methods as in ``MessageFormat``.

    Args:
        nbytes: bytes of an encoded vector.
        rows: number of rows per exchange.
        alone: whether the memory behind an encoded vector belongs to it, so that a single row needs no copy.
        memory: memory of rows.
    """

    def __init__(self, nbytes: int, rows: int, alone: bool, memory: ReusedBlocks) -> None:
        self._nbytes, self._rows, self._alone, self._memory = nbytes, rows, alone, memory
        self._stride = row_bytes(nbytes)
        self._nothing = np.zeros((rows, self._stride), np.uint8)

    def pack(self, messages: Sequence[tuple[Array, bytes]]) -> Array:
        if not messages:
            return self._nothing
        packed = self._row_of(messages[0][0])
        if packed is None:
            packed = self._memory.take(self._rows * self._stride).reshape(self._rows, self._stride)
            for row, (data, _) in zip(packed, messages, strict=False):
                row[: len(data)] = data
        for row, (_, header) in zip(packed, messages, strict=False):
            row[-HEADER.size :] = np.frombuffer(header, np.uint8)
        return packed

    def unpack(self, row: Array) -> tuple[Array, bytes]:
        return row[: self._nbytes], row[-HEADER.size :].tobytes()

    def _row_of(self, data: Array) -> Array | None:
        """Return the row that begins with these bytes, if the memory behind them is free for the header."""
        block, stride = data.base, self._stride
        if not self._alone or self._rows > 1 or not isinstance(block, np.ndarray) or block.dtype != np.uint8:
            return None
        whole = block.shape == (stride,) and block.flags.writeable and block.ctypes.data == data.ctypes.data
        return block.reshape(1, stride) if whole else None


class Arithmetic:
    """Operations on vectors and their parts; methods as in ``MessageFormat``.

    Args:
        elements: number of elements of a vector.
        kind: float32 or float64.
        parts: number of parts of a vector.
        memory: memory of vectors, with room for a header.
    """

    def __init__(self, elements: int, kind: np.dtype[Any], parts: int, memory: ReusedBlocks) -> None:
        self._elements, self._kind, self._parts, self._memory = elements, kind, parts, memory
        self.zeros = np.zeros(elements, kind)

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
        part = -(-self._elements // self._parts)
        return list(np.pad(vector, (0, part * self._parts - self._elements)).reshape(self._parts, part))

    def join(self, pieces: Sequence[Array]) -> Array:
        return np.concatenate(pieces)[: self._elements]


def make_message_format(
    elements: int,
    dtype: Any,
    compression: str,
    messages: int,
    rank_group: RankGroup | None = None,
    parts: int = 1,
    memory: ReusedBlocks | None = None,
    plain: int = 0,
) -> MessageFormat:
    """Return the message format of NumPy vectors of weights.

    Args:
        elements: number of elements of a vector.
        dtype: float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        messages: maximum number of messages per exchange.
        rank_group: the ranks that share the optimizer; None: all.
        parts: number of parts of a vector; a message holds one part.
        memory: memory of vectors and messages; None: new memory each time.
        plain: maximum number of uncompressed messages per exchange.
    """
    kind, part = np.dtype(dtype), -(-elements // parts)
    blocks = ReusedBlocks(most=0) if memory is None else memory
    codec, vectors = Codec(part, kind, compression, blocks), Arithmetic(elements, kind, parts, blocks)
    rows_of_plain = plain_rows(part, kind.itemsize, compression)
    rows = max(messages, plain * rows_of_plain)
    layout = RowFormat(codec.nbytes, rows, parts == 1, blocks)  # (behind one of several parts is the next part)
    return MessageFormat(
        encode=codec.encode,
        decode=codec.decode,
        as_bytes=codec.as_bytes,
        from_bytes=codec.from_bytes,
        pack=layout.pack,
        unpack=layout.unpack,
        nbytes=codec.nbytes,
        rows=rows,
        plain_rows=rows_of_plain,
        lossless=compression == "none",
        differences=compression == "int8",
        add=vectors.add,
        times=vectors.times,
        split=vectors.split,
        concatenate=np.concatenate,
        join=vectors.join,
        zeros=lambda: vectors.zeros,
        scalar=lambda value: np.array([value], np.float64),
        process_set=None if rank_group is None else rank_group.process_set,
        members=() if rank_group is None else rank_group.members,
        process_set_id=0 if rank_group is None else rank_group.id,
    )
