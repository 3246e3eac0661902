"""Weights as bytes, in torch: as ``algorithms.gossip.message_format``, on the device where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_async.algorithms.gossip.message_format import (
    CHUNK,
    HEADER,
    LEVELS,
    MessageFormat,
    encoded_bytes,
    plain_rows,
    row_bytes,
)
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch import streams
from hvd_async.torch.memory import ReusedMemory

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def quantize(vector: torch.Tensor, data: torch.Tensor) -> None:
    """Encode 8 bits an element, with a float32 scale for each chunk: max |v| / 127. As bytes, scales first.

    Args:
        vector: shape (n,).
        data: filled with them, uint8, 4 and ``CHUNK`` bytes a chunk.
    """
    padded = torch.nn.functional.pad(vector.float(), (0, -vector.numel() % CHUNK)).view(-1, CHUNK)
    count = padded.shape[0]
    scales, levels = data[: 4 * count].view(torch.float32), data[4 * count :].view(torch.int8)
    torch.amax(padded.abs(), dim=1, out=scales)
    scales.div_(LEVELS)
    levels.view(-1, CHUNK).copy_((padded / torch.where(scales > 0, scales, 1.0).view(-1, 1)).round_())


def dequantize(data: torch.Tensor, elements: int) -> torch.Tensor:
    """Return as float32 what ``quantize`` has made of so many elements."""
    count = -(-elements // CHUNK)
    scales = data[: 4 * count].view(torch.float32).view(count, 1)
    return (data[4 * count :].view(torch.int8).view(count, CHUNK) * scales).view(-1)[:elements]


class Codec:
    """Vectors of one length as bytes, and back; methods as in ``MessageFormat``.

    Args:
        like: a vector, shape (n,), float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        memory: of encoded vectors, with room for a header.

    Attributes:
        nbytes: of an encoded vector.
    """

    def __init__(self, like: torch.Tensor, compression: str, memory: ReusedMemory) -> None:
        self._elements, self._kind, self._device = like.numel(), like.dtype, like.device
        self._compression, self._memory = compression, memory
        self.nbytes = encoded_bytes(self._elements, self._kind.itemsize, compression)

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        if self._compression == "none":
            return self.as_bytes(vector)
        data = self._memory.empty(row_bytes(self.nbytes), self._device)[: self.nbytes]
        if self._compression == "int8":
            quantize(vector, data)
        else:  # (what is too large to be sent stays with the sender, as all that rounding leaves)
            half = HALVES[self._compression]
            largest = torch.finfo(half).max
            data.view(half).copy_(vector).clamp_(-largest, largest)
        return data

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        if self._compression == "int8":
            return dequantize(data, self._elements).to(self._kind)
        return data.view(HALVES.get(self._compression, self._kind)).to(self._kind)

    def as_bytes(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.view(torch.uint8)

    def from_bytes(self, data: torch.Tensor) -> torch.Tensor:
        return data[: self._elements * self._kind.itemsize].view(self._kind)


class RowFormat:
    """Rows of an exchange: of each an encoded vector, and a header at its end; methods as in ``MessageFormat``.

    Args:
        nbytes: of an encoded vector.
        rows: of an exchange.
        received: the most rows that an exchange brings; 0 where nobody knows.
        alone: whether the memory behind an encoded vector is its own, if there is one row.
        device: of vectors.
        memory: of what is received.
    """

    def __init__(
        self, nbytes: int, rows: int, received: int, alone: bool, device: torch.device, memory: ReusedMemory
    ) -> None:
        self._nbytes, self._stride, self._rows, self._received = nbytes, row_bytes(nbytes), rows, received
        self._alone, self._device, self._memory = alone, device, memory
        self._nothing = torch.zeros(rows, self._stride, dtype=torch.uint8, device=device)

    def pack(self, messages: Sequence[tuple[torch.Tensor, bytes]]) -> torch.Tensor:
        if not messages:
            return self._nothing
        if self._rows == 1 and self._has_room(messages[0][0]):
            packed = messages[0][0].as_strided((1, self._stride), (self._stride, 1))
        else:
            packed = torch.empty(self._rows, self._stride, dtype=torch.uint8, device=self._device)
            for row, (data, _) in zip(packed[: len(messages)], messages, strict=True):
                row[: len(data)].copy_(data)
        headers = torch.frombuffer(bytearray(b"".join(header for _, header in messages)), dtype=torch.uint8)
        if streams.gpu.holds(packed):  # (a copy from other memory would wait for all that the stream has to do)
            headers = streams.gpu.pin(headers)
        packed[: len(messages), -HEADER.size :].copy_(headers.view(-1, HEADER.size), non_blocking=True)
        return packed

    def unpack(self, row: torch.Tensor) -> tuple[torch.Tensor, bytes]:
        return row[: self._nbytes], streams.copy_to_host(row[-HEADER.size :]).numpy().tobytes()

    def room(self) -> torch.Tensor | None:
        if not self._received or streams.gpu.has_allocator(self._device):
            return None
        return self._memory.empty(self._received * self._stride, self._device).view(self._received, self._stride)

    def _has_room(self, data: torch.Tensor) -> bool:
        """Return whether a row begins with these bytes, and its header's are nobody else's."""
        return self._alone and data.storage_offset() == 0 and data.untyped_storage().nbytes() == self._stride


def make_message_format(
    like: torch.Tensor,
    compression: str,
    messages: int,
    rank_group: RankGroup,
    parts: int,
    memory: ReusedMemory,
    received: int = 0,
    plain: int = 0,
    empty: Callable[[], torch.Tensor] | None = None,
) -> MessageFormat:
    """Return the message format of torch vectors of weights.

    Args:
        like: a vector of weights, shape (n,), float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        messages: the most in one exchange.
        rank_group: the ranks that gossip.
        parts: a message holds one of so many parts of a vector.
        memory: for messages.
        received: the most rows that an exchange brings; 0 where nobody knows.
        plain: messages that may go as they are in one exchange.
        empty: returns an empty vector of weights, with room for a header behind it; None: there is no such room.
    """
    elements, kind, device = like.numel(), like.dtype, like.device
    part = -(-elements // parts)
    codec = Codec(like[:part], compression, memory)
    rows_of_plain = plain_rows(part, kind.itemsize, compression)
    rows = max(messages, plain * rows_of_plain)
    # (behind one of several parts lies the next)
    layout = RowFormat(codec.nbytes, rows, received, parts == 1, device, memory)

    def times(x: torch.Tensor, a: float) -> torch.Tensor:
        if empty is None or x.numel() != elements:
            return x * a
        return torch.mul(x, a, out=empty())  # (its message is sent without a copy)

    def split(vector: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.nn.functional.pad(vector, (0, part * parts - elements)).view(parts, part))

    def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        kept = [piece[: max(0, elements - part * number)] for number, piece in enumerate(pieces)]
        return torch.cat(kept) if empty is None else torch.cat(kept, out=empty())

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
        add=lambda x, y, a: x.add_(y, alpha=a),
        times=times,
        room=layout.room,
        split=split,
        concatenate=lambda pieces: torch.cat(list(pieces)),
        join=join,
        zeros=lambda: torch.zeros(elements, dtype=kind, device=device),
        scalar=lambda value: torch.tensor([value], dtype=torch.float64),
        process_set=rank_group.process_set,
        members=rank_group.members,
        process_set_id=rank_group.id,
    )
