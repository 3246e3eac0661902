"""Weights as bytes, in torch: as ``algorithms.gossip.message_format``, on the device where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_async.algorithms.gossip.message_exchange import HEADER, MessageFormat
from hvd_async.algorithms.gossip.message_format import CHUNK, LEVELS, encoded_bytes, row_bytes, rows_of
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch.memory import ReusedMemory
from hvd_async.torch.streams import copy_to_host

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def vector_with_room(elements: int, dtype: torch.dtype, device: torch.device, memory: ReusedMemory) -> torch.Tensor:
    """Return an empty vector with memory behind it for a message's header: its message is sent without a copy."""
    nbytes = elements * dtype.itemsize
    return memory.empty(row_bytes(nbytes), device)[:nbytes].view(dtype)


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


def make_message_format(
    like: torch.Tensor,
    compression: str,
    rows: int,
    rank_group: RankGroup,
    parts: int,
    memory: ReusedMemory,
    received: int = 0,
) -> MessageFormat:
    """How torch vectors of weights travel.

    Args:
        like: a vector of weights, shape (n,), float32 or float64.
        compression: "none", "fp16", "bf16" or "int8".
        rows: most messages in one exchange.
        rank_group: the ranks that gossip.
        parts: a message holds one of so many parts of a vector; ``parts - 1`` of them may go as they are at once.
        memory: for messages.
        received: the most rows that an exchange brings; 0 where nobody knows.
    """
    elements, kind, device = like.numel(), like.dtype, like.device
    part = -(-elements // parts)
    nbytes = encoded_bytes(part, kind.itemsize, compression)
    stride = row_bytes(nbytes)
    rows = max(rows, (parts - 1) * rows_of(part, kind.itemsize, compression))
    nothing = torch.zeros(rows, stride, dtype=torch.uint8, device=device)

    def encode(vector: torch.Tensor) -> torch.Tensor:
        if compression == "none":
            return vector.view(torch.uint8)
        data = memory.empty(stride, device)[:nbytes]
        if compression == "int8":
            quantize(vector, data)
        else:  # (what is too large to be sent stays with the sender, as all that rounding leaves)
            half = HALVES[compression]
            largest = torch.finfo(half).max
            data.view(half).copy_(vector).clamp_(-largest, largest)
        return data

    def decode(data: torch.Tensor) -> torch.Tensor:
        if compression == "int8":
            return dequantize(data, part).to(kind)
        return data.view(HALVES.get(compression, kind)).to(kind)

    def from_bytes(data: torch.Tensor) -> torch.Tensor:
        return data[: part * kind.itemsize].view(kind)

    def has_room(data: torch.Tensor) -> bool:
        """Whether a row begins with these bytes, and its header's are nobody else's."""
        # (not so with several parts: behind one lies the next)
        return parts == 1 and data.storage_offset() == 0 and data.untyped_storage().nbytes() == stride

    def pack(messages: Sequence[tuple[torch.Tensor, bytes]]) -> torch.Tensor:
        if not messages:
            return nothing
        if rows == 1 and has_room(messages[0][0]):
            packed = messages[0][0].as_strided((1, stride), (stride, 1))
        else:
            packed = torch.empty(rows, stride, dtype=torch.uint8, device=device)
            for row, (data, _) in zip(packed[: len(messages)], messages, strict=True):
                row[: len(data)].copy_(data)
        headers = torch.frombuffer(bytearray(b"".join(header for _, header in messages)), dtype=torch.uint8)
        if device.type == "cuda":  # (a copy from other memory would wait for all that the stream has to do)
            headers = headers.pin_memory()
        packed[: len(messages), -HEADER.size :].copy_(headers.view(-1, HEADER.size), non_blocking=True)
        return packed

    def room() -> torch.Tensor | None:
        if not received or device.type != "cpu":
            return None
        return memory.empty(received * stride, device).view(received, stride)

    def unpack(row: torch.Tensor) -> tuple[torch.Tensor, bytes]:
        return row[:nbytes], copy_to_host(row[-HEADER.size :]).numpy().tobytes()

    def times(x: torch.Tensor, a: float) -> torch.Tensor:
        if x.numel() != elements:
            return x * a
        return torch.mul(x, a, out=vector_with_room(elements, kind, device, memory))

    def split(vector: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.nn.functional.pad(vector, (0, part * parts - elements)).view(parts, part))

    return MessageFormat(
        encode=encode,
        decode=decode,
        as_bytes=lambda vector: vector.view(torch.uint8),
        from_bytes=from_bytes,
        pack=pack,
        unpack=unpack,
        nbytes=nbytes,
        rows=rows,
        lossless=compression == "none",
        differences=compression == "int8",
        add=lambda x, y, a: x.add_(y, alpha=a),
        times=times,
        room=room,
        split=split,
        concatenate=lambda pieces: torch.cat(list(pieces)),
        join=lambda pieces: torch.cat(list(pieces))[:elements],
        zeros=lambda: torch.zeros(elements, dtype=kind, device=device),
        scalar=lambda value: torch.tensor([value], dtype=torch.float64),
        process_set=rank_group.process_set,
        members=rank_group.members,
        process_set_id=rank_group.id,
    )
