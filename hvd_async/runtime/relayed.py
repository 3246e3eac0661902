"""Wire format between the coordinator and its relays: messages of several ranks in one, and commands for several.

A rank's own message is a MessagePack array of events; what comes down to it is an array of commands. A relay looks into
neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

DecodeError = msgspec.DecodeError


class Upward(msgspec.Struct, array_like=True):
    """A message that ranks have sent.

    Attributes:
        ranks: that have all sent the same, after what they sent before.
        data: as each sent it; empty if it sent nothing and its connection has ended.
        gone: why that was; empty while it goes on.
    """

    ranks: list[int]
    data: bytes
    gone: str = ""


_encoder = msgspec.msgpack.Encoder()
_upward = msgspec.msgpack.Decoder(list[Upward])
_ranks = msgspec.msgpack.Decoder(list[int])


def encode_upward(messages: Sequence[Upward]) -> bytes:
    """Return the wire form of what ranks have sent."""
    return _encoder.encode(messages)


def decode_upward(data: bytes) -> list[Upward]:
    """Return what ranks have sent.

    Raises:
        DecodeError: it is nothing of the kind.
    """
    return _upward.decode(data)


def encode_ranks(ranks: Sequence[int] | None) -> bytes:
    """Return the wire form of the ranks that a command is for; empty: all."""
    return b"" if ranks is None else _encoder.encode(list(ranks))


def decode_ranks(data: bytes) -> list[int] | None:
    """Return the ranks that a command is for; None: all.

    Raises:
        DecodeError: it is nothing of the kind.
    """
    return _ranks.decode(data) if data else None


def merged(messages: Iterable[Upward]) -> list[Upward]:
    """Return the messages with those of several ranks in one that say the same; each rank's stay in their order."""
    found: list[Upward] = []
    same: dict[bytes, int] = {}
    last: dict[int, int] = {}
    for message in messages:
        place = same.get(message.data) if message.data and not message.gone else None
        if place is not None and all(last.get(rank, -1) < place for rank in message.ranks):
            found[place].ranks.extend(message.ranks)
        else:
            place = len(found)
            found.append(Upward(list(message.ranks), message.data, message.gone))
            same[message.data] = place
        last.update(dict.fromkeys(message.ranks, place))
    return found
