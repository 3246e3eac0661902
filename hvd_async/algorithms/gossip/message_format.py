"""Vectors of weights as bytes, in NumPy: as they are, in half precision, or in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvd_async.algorithms.gossip.message_exchange import HEADER, MessageFormat
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.runtime.process_sets import RankGroup

Array = np.ndarray[Any, Any]
CHUNK = 2048
"""Elements that share a scale in 8 bits."""
LEVELS = 127
LARGEST = {"fp16": np.float32(65504), "bf16": np.uint32(0x7F7F0000).view(np.float32)}
"""The largest number of each half precision."""
ALIGNMENT = 16
"""Bytes to which rows are filled up, so that each can be read as numbers in place."""
CACHED = 32768
"""Elements that stay in a core's cache between two passes."""


def encoded_bytes(elements: int, itemsize: int, compression: str) -> int:
    """Return the bytes of an encoded vector."""
    if compression == "int8":
        return -(-elements // CHUNK) * (CHUNK + 4)
    return elements * (itemsize if compression == "none" else 2)


def rows_of(elements: int, itemsize: int, compression: str) -> int:
    """Return the rows of ``encoded_bytes`` each that the same vector takes as it is."""
    return max(1, -(-elements * itemsize // max(1, encoded_bytes(elements, itemsize, compression))))


def row_bytes(nbytes: int) -> int:
    """Return the bytes of a row that holds an encoded vector and its header."""
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
    """Encode 8 bits an element, with a float32 scale for each chunk: max |v| / 127. As bytes, scales first."""
    chunks = np.zeros((-(-len(vector) // CHUNK), CHUNK), np.float32)
    chunks.reshape(-1)[: len(vector)] = vector
    scales = np.abs(chunks).max(axis=1, keepdims=True) / np.float32(LEVELS)
    levels = np.rint(chunks / np.where(scales > 0, scales, 1)).astype(np.int8)
    return np.concatenate([scales.reshape(-1).view(np.uint8), levels.reshape(-1).view(np.uint8)])


def dequantize(data: Array, elements: int) -> Array:
    """Return the float32 vector of so many elements that ``quantize`` encoded."""
    count = -(-elements // CHUNK)
    scales = data[: 4 * count].view(np.float32).reshape(count, 1)
    levels = data[4 * count :].view(np.int8).reshape(count, CHUNK)
    return (levels * scales).reshape(-1)[:elements]


def vector_with_room(elements: int, dtype: Any, memory: ReusedBlocks) -> Array:
    """Return an empty vector with memory behind it for a message's header: its message is sent without a copy."""
    nbytes = elements * np.dtype(dtype).itemsize
    return memory.take(row_bytes(nbytes))[:nbytes].view(dtype)


def _runs(elements: int) -> Iterator[slice]:
    """Yield a vector's elements in runs that a core's cache holds."""
    for start in range(0, elements, CACHED):
        yield slice(start, start + CACHED)


def make_message_format(
    elements: int,
    dtype: Any,
    compression: str,
    rows: int,
    rank_group: RankGroup | None = None,
    parts: int = 1,
    memory: ReusedBlocks | None = None,
) -> MessageFormat:
    """Return the message format of NumPy vectors of weights.

    Args:
        elements: of a vector.
        dtype: float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        rows: most messages in one exchange.
        rank_group: the ranks that share the optimizer; None: all.
        parts: a message holds one of so many parts of a vector; ``parts - 1`` of them may go as they are at once.
        memory: of vectors and messages; None: new memory each time.
    """
    kind, part = np.dtype(dtype), -(-elements // parts)
    blocks = ReusedBlocks(most=0) if memory is None else memory
    nbytes = encoded_bytes(part, kind.itemsize, compression)
    stride = row_bytes(nbytes)
    rows = max(rows, (parts - 1) * rows_of(part, kind.itemsize, compression))
    nothing, zeros = np.zeros((rows, stride), np.uint8), np.zeros(elements, kind)

    def encode(vector: Array) -> Array:
        if compression == "int8":
            return quantize(vector)
        if compression == "none":
            return as_bytes(vector)
        data, largest = blocks.take(stride)[:nbytes], LARGEST[compression]
        halves = data.view(np.uint16 if compression == "bf16" else np.float16)
        for run in _runs(part):  # the sender keeps what clipping and rounding leave out
            clipped = np.clip(vector[run], -largest, largest)
            halves[run] = to_bf16(clipped) if compression == "bf16" else clipped
        return data

    def as_bytes(vector: Array) -> Array:
        return np.ascontiguousarray(vector, kind).view(np.uint8)

    def from_bytes(data: Array) -> Array:
        return data[: part * kind.itemsize].view(kind)

    def decode(data: Array) -> Array:
        if compression == "int8":
            return dequantize(data, part).astype(kind, copy=False)
        if compression == "bf16":
            return from_bf16(data.view(np.uint16)).astype(kind, copy=False)
        return data.view(np.float16 if compression == "fp16" else kind).astype(kind, copy=False)

    def room_of(data: Array) -> Array | None:
        """Return the row that begins with these bytes, if its header's are nobody else's."""
        block = data.base  # (not so with several parts: behind one lies the next)
        if parts > 1 or rows > 1 or not isinstance(block, np.ndarray) or block.dtype != np.uint8:
            return None
        whole = block.shape == (stride,) and block.flags.writeable and block.ctypes.data == data.ctypes.data
        return block.reshape(1, stride) if whole else None

    def pack(messages: Sequence[tuple[Array, bytes]]) -> Array:
        if not messages:
            return nothing
        packed = room_of(messages[0][0])
        if packed is None:
            packed = blocks.take(rows * stride).reshape(rows, stride)
            for row, (data, _) in zip(packed, messages, strict=False):
                row[: len(data)] = data
        for row, (_, header) in zip(packed, messages, strict=False):
            row[-HEADER.size :] = np.frombuffer(header, np.uint8)
        return packed

    def split(vector: Array) -> list[Array]:
        return list(np.pad(vector, (0, part * parts - elements)).reshape(parts, part))

    def add(x: Array, y: Array, a: float) -> Array:
        if a == 1.0:
            x += y
            return x
        for run in _runs(len(x)):
            x[run] += y[run] * kind.type(a)
        return x

    def times(x: Array, a: float) -> Array:
        product = vector_with_room(elements, kind, blocks) if len(x) == elements else np.empty_like(x)
        np.multiply(x, kind.type(a), out=product)
        return product

    return MessageFormat(
        encode=encode,
        decode=decode,
        as_bytes=as_bytes,
        from_bytes=from_bytes,
        pack=pack,
        unpack=lambda row: (row[:nbytes], row[-HEADER.size :].tobytes()),
        nbytes=nbytes,
        rows=rows,
        lossless=compression == "none",
        differences=compression == "int8",
        add=add,
        times=times,
        split=split,
        concatenate=np.concatenate,
        join=lambda pieces: np.concatenate(pieces)[:elements],
        zeros=lambda: zeros,
        scalar=lambda value: np.array([value], np.float64),
        process_set=None if rank_group is None else rank_group.process_set,
        members=() if rank_group is None else rank_group.members,
        process_set_id=0 if rank_group is None else rank_group.id,
    )
