"""The wire format: every message comes back as it was, and what is no message is refused, never guessed at."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager import config as eager
from hvd_async.algorithms.gossip import config as gossip
from hvd_async.algorithms.leader import config as leader
from hvd_async.runtime import protocol
from hvd_async.runtime.protocol import DecodeError, encode
from hvd_async.testing import CODEC

KINDS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**40),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=9),
    type(None): st.none(),
}


def values(kind: Any, known: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Any value of a type: ``known`` has those of simple types, from which others are made up."""
    if isinstance(kind, typing.TypeVar):  # (each family has its own)
        own = eager.EagerConfig | gossip.GossipConfig | leader.LeaderConfig
        kind = own if kind is protocol.C else leader.PullProgress
    if kind in known:
        return known[kind]
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(part, known) for part in parts])
    if origin in (list, dict):
        make = st.lists if origin is list else st.dictionaries
        return make(*[values(part, known) for part in parts], max_size=3)
    if origin is tuple:
        return st.tuples(*[values(part, known) for part in parts])
    struct = origin or kind
    hints = typing.get_type_hints(struct)
    return st.builds(struct, **{field: values(hints[field], known) for field in struct.__struct_fields__})


def any_message(union: object, kinds: Mapping[Any, st.SearchStrategy[Any]] = KINDS) -> st.SearchStrategy[Any]:
    """Any message of a union."""
    return values(union, kinds)


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 3)))
def test_senders_in_runs_are_the_messages(keys):
    messages = sorted(keys.items())
    exchange = gossip.StartExchange(0, 1, gossip.senders_of(messages))
    assert exchange.messages == messages
    assert [exchange.keys_of(rank) for rank in range(42)] == [[keys[r]] if r in keys else [] for r in range(42)]
    assert gossip.StartAverage(0, 1, gossip.spans_of(sorted(keys)), [1.0]).ranks == sorted(keys)


def test_an_exchange_of_all_ranks_is_reported_in_a_few_bytes():
    messages = [(rank, 70_000) for rank in range(10_000)]
    assert len(encode(gossip.StartExchange(0, 70_000, gossip.senders_of(messages)))) < 100


@given(any_message(CODEC.events))
def test_every_event_comes_back(event):
    again = CODEC.decode_event(encode(event))
    assert again == event
    assert type(again) is type(event)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite_come_back(loss):
    event = CODEC.decode_event(encode(leader.StepTaken(3, loss)))
    assert isinstance(event, leader.StepTaken)
    assert repr(event.loss) == repr(loss)


@given(any_message(CODEC.commands))
def test_every_command_comes_back(command):
    again = CODEC.decode_command(encode(command))
    assert again == command
    assert type(again) is type(command)


def test_quorum_keeps_its_type():
    for quorum in ("solo", 1, 1.0, 0.5):
        config = eager.EagerConfig(quorum, 1, 0.0, 0, 1)
        opened = CODEC.decode_event(encode(protocol.Registered(0, config, [], [])))
        assert isinstance(opened, protocol.Registered)
        assert type(opened.config.quorum) is type(quorum)


def _refused(decode: typing.Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


@pytest.mark.parametrize("decode", [CODEC.decode_event, CODEC.decode_command])
@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1", b"garbage", b"\x80", b"\x90", b'{"type": "Hello"}',
                                  msgspec.msgpack.encode({"type": "Nonsense"}),
                                  msgspec.msgpack.encode({"type": "StartRound", "round": "one"}),
                                  msgspec.msgpack.encode({"type": "Hello", "host": 3, "pid": "x"}),
                                  msgspec.msgpack.encode([1, 2, 3])])  # fmt: skip
def test_garbage_is_refused(decode, data):
    _refused(decode, data)


@given(any_message(CODEC.events), st.data())
def test_cut_messages_are_refused(event, data):
    whole = encode(event)
    _refused(CODEC.decode_event, whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(any_message(CODEC.events | CODEC.commands).map(encode) | st.binary(min_size=1, max_size=60), st.data())
def test_mutated_messages_decode_or_are_refused(message, data):
    """Whatever msgspec raises: invalid UTF-8, keys that are none, lengths that cannot be."""
    mutated = bytearray(message)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(mutated) - 1))
        mutated[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        mutated = mutated or bytearray(1)
    for decode in (CODEC.decode_event, CODEC.decode_command):
        try:
            decoded = decode(bytes(mutated))
        except DecodeError:
            continue
        encode(decoded)  # (what a rank says may be sent on to the others)


STEP_ENTERED = b"\x84\xa4type\xabStepEntered\xa9optimizer\x00\xa4step\x01\xa5hyper"
HELLO = b"\x83\xa4type\xa5Hello\xa3pid\x01"


@pytest.mark.parametrize("data", [HELLO + b"\xa4host\xa2\xff\xfe",  # no UTF-8
                                  HELLO + b"\xa4host" + b"\x91" * 100_000 + b"\x01",
                                  STEP_ENTERED + b"\x91\x81\xa1a" + b"\x91" * 100_000 + b"\x01",
                                  STEP_ENTERED + b"\x91\x81\x80\x01",  # a key that is a dictionary
                                  STEP_ENTERED + b"\x91\x81\xa2lr\xd4\x05x",  # an extension type
                                  STEP_ENTERED + b"\xdd\xff\xff\xff\xff",  # 2^32 entries, of which none comes
                                  HELLO + b"\xa4host\xdb\xff\xff\xff\xff"])  # fmt: skip
def test_hostile_bytes_are_refused(data):
    _refused(CODEC.decode_event, data)


@given(any_message(CODEC.commands))
def test_a_command_is_no_event(command):
    _refused(CODEC.decode_event, encode(command))


@given(any_message(CODEC.events))
def test_an_event_is_no_command(event):
    _refused(CODEC.decode_command, encode(event))


@given(any_message(CODEC.events))
def test_messages_are_frozen(event):
    fields = type(event).__struct_fields__
    if fields:
        with pytest.raises(AttributeError):
            setattr(event, fields[0], None)
