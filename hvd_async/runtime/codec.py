"""The wire format of the control plane's messages: MessagePack, checked against their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, Union

import msgspec

from hvd_async.runtime.family import Family
from hvd_async.runtime.messages import (
    JOB_COMMANDS,
    JOB_EVENTS,
    OPTIMIZER_COMMANDS,
    OPTIMIZER_EVENTS,
    Command,
    Drained,
    Event,
    Registered,
)

DecodeError = msgspec.DecodeError
_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode(message: Event | Command) -> bytes:
    """Return one event's or command's wire form."""
    return _encoder.encode(message)


def packed(encoded: Sequence[msgspec.Raw]) -> bytes:
    """Return the message that carries these events or commands, each in its wire form."""
    return _encoder.encode(encoded)


class Codec:
    """Reads the messages of the runtime and of these families, and no others.

    Attributes:
        events: the union of all that a rank may send.
        commands: the union of all that the coordinator may.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        configs: Any = Union[tuple(family.config for family in families)]  # noqa: UP007  (made when it runs)
        details: Any = Union[(None, *(family.details for family in families if family.details is not None))]
        own_events = [event for family in families for event in family.events]
        own_commands = [command for family in families for command in family.commands]
        self.events: Any = Union[(*JOB_EVENTS, *OPTIMIZER_EVENTS, Registered[configs], *own_events)]
        self.commands: Any = Union[(*JOB_COMMANDS, *OPTIMIZER_COMMANDS, Drained[details], *own_commands)]
        several: Any = list  # (made when it runs)
        self._event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(self.events)
        self._command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(self.commands)
        self._events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(several[self.events])
        self._commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(several[self.commands])

    def decode_event(self, data: bytes) -> Event:
        """Return the event in ``data``.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._event, data)

    def decode_command(self, data: bytes) -> Command:
        """Return the command in ``data``.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._command, data)

    def decode_events(self, data: bytes) -> list[Event]:
        """Return the events that a rank's message carries.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._events, data)

    def decode_commands(self, data: bytes) -> list[Command]:
        """Return the commands that a message of the coordinator carries.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._commands, data)


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    try:
        return decoder.decode(data)
    except DecodeError:
        raise
    except Exception as error:  # text that is not UTF-8, nesting without end, a key that cannot be one
        raise DecodeError(f"{type(error).__name__}: {error}") from error
