"""The wire format of the control plane's messages: MessagePack, checked against their types."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from hvd_async.events import Command, Event

DecodeError = msgspec.DecodeError
_encoder = msgspec.msgpack.Encoder()
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
M = TypeVar("M")


def encode(message: Event | Command) -> bytes:
    """The message's wire form."""
    return _encoder.encode(message)


def decode_event(data: bytes) -> Event:
    """The event in ``data``.

    Raises:
        DecodeError: it is none.
    """
    return _decode(_events, data)


def decode_command(data: bytes) -> Command:
    """The command in ``data``.

    Raises:
        DecodeError: it is none.
    """
    return _decode(_commands, data)


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    try:
        return decoder.decode(data)
    except DecodeError:
        raise
    except Exception as error:  # text that is not UTF-8, nesting without end, a key that cannot be one
        raise DecodeError(f"{type(error).__name__}: {error}") from error
