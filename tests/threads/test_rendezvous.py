"""How ranks meet: addresses tried side by side, IPv6, one machine or several, versions that differ."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.errors import EngineError, RankLostError
from hvd_async.runtime import addresses, time_limits, transport
from hvd_async.runtime import rendezvous as meeting
from hvd_async.runtime.addresses import reachable
from hvd_async.runtime.interfaces import Channel
from hvd_async.runtime.protocol import Hello
from hvd_async.runtime.rendezvous import rendezvous
from hvd_async.runtime.transport import ZmqChannel
from hvd_async.testing import CODEC
from tests.threads.prompt_ends import PromptChannel, PromptHub
from tests.threads.test_control import WAIT, on_ranks, until

SILENT = [f"192.0.2.{number}" for number in range(1, 11)]
"""Addresses that belong to no host (RFC 5737)."""


@contextlib.contextmanager
def listener(family: socket.AddressFamily = socket.AF_INET, address: str = "127.0.0.1") -> Iterator[int]:
    with socket.create_server((address, 0), family=family) as made:
        yield made.getsockname()[1]


@contextlib.contextmanager
def deaf() -> Iterator[tuple[str, int]]:
    """An address where connections are neither taken nor refused: its queue is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(full.getsockname())
        yield full.getsockname()


def test_silent_addresses_do_not_use_up_the_time(monkeypatch):
    monkeypatch.setattr(addresses, "FIRST_PATIENCE", 0.02)
    with listener() as port:
        assert reachable([*SILENT, "127.0.0.1"], port, 20.0) == "127.0.0.1"


def test_the_best_address_is_taken_where_several_answer():
    with socket.create_server(("0.0.0.0", 0)) as made:
        port = made.getsockname()[1]
        assert reachable(["127.0.0.2", "127.0.0.1"], port, WAIT) == "127.0.0.2"


def test_a_port_that_opens_late_is_found():
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        connect, begun = socket.create_connection, list[Any]()

        def begin(where: Any, timeout: float) -> socket.socket:
            begun.append(where)
            if len(begun) == 5:
                late.listen()
            return connect(where, timeout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "create_connection", begin)
            assert reachable(["127.0.0.1"], late.getsockname()[1], WAIT) == "127.0.0.1"
        assert len(begun) >= 5


def test_an_address_that_says_nothing_is_given_up_in_time():
    with deaf() as (address, port):
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"within 0.5 s .*HVD_ASYNC_CONNECT_TIMEOUT"):
            reachable([address], port, 0.5)
        assert time.monotonic() - began < WAIT


def test_names_and_what_is_no_address():
    with listener() as port:
        assert reachable(["no-such-host.invalid", "localhost"], port, WAIT) == "127.0.0.1"


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


def has_ipv6_loopback() -> bool:
    return any(a.address == "::1" for found in psutil.net_if_addrs().values() for a in found)


@needs_ipv6
def test_a_hub_is_reached_by_ipv6_and_by_ipv4():
    if not has_ipv6_loopback():
        pytest.skip("no ::1")
    hub, keys = PromptHub(CODEC), [zmq.curve_keypair() for _ in range(2)]
    channels: list[ZmqChannel] = []
    try:
        hub.allow([public for public, _ in keys])
        for rank, address in enumerate(("::1", "127.0.0.1")):
            assert reachable([address], hub.port, WAIT) == address
            channels.append(PromptChannel(CODEC, address, hub.port, hub.public, keys[rank]))
            channels[-1].send(Hello(address, rank))
            assert until(lambda: hub.hear(WAIT)) == (rank, Hello(address, rank))
    finally:
        for channel in channels:
            channel.close()
        hub.close()


@pytest.mark.parametrize("local", [True, False])
def test_where_all_ranks_are_on_one_machine_no_other_can_knock(local):
    hub, keys = PromptHub(CODEC), zmq.curve_keypair()
    try:
        hub.allow([keys[0]], local=local)
        bound = {c.laddr.ip for c in psutil.Process().net_connections("tcp")
                 if c.status == psutil.CONN_LISTEN and c.laddr.port == hub.port}  # fmt: skip
        assert bound <= ({"127.0.0.1"} if local else {"::", "0.0.0.0"})
        assert bound
    finally:
        hub.close()


def test_no_rank_is_listened_to_before_the_keys_are_known():
    hub = PromptHub(CODEC)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", hub.port), WAIT)
    finally:
        hub.close()


def test_addresses_of_both_kinds_are_known_the_better_ones_first(monkeypatch):
    monkeypatch.delenv("HVD_ASYNC_ADDRESS", raising=False)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)

    def at(*addresses: str) -> list[Any]:
        return [SimpleNamespace(address=a, family=socket.AF_INET6 if ":" in a else socket.AF_INET) for a in addresses]

    interfaces = {
        "lo": at("127.0.0.1", "::1"),
        "eth0": at("10.0.0.1", "fd00::1", "fe80::1%eth0"),
        "ib0": at("10.1.0.1"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert addresses.own_addresses() == ["10.0.0.1", "10.1.0.1", "fd00::1", "127.0.1.1", "127.0.0.1", "::1"]
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "ib0")
    assert addresses.own_addresses()[0] == "10.1.0.1"


# -- versions and settings ------------------------------------------------------------------------------------


class OldCard(msgspec.Struct):
    """What version 0.1.0 reported."""

    public: bytes
    host: str
    server: bytes
    port: int
    addresses: list[str]


def meet_with(other: bytes) -> list[Any]:
    """Two ranks meet by the rules, and a third that sends something else to the allgather."""

    def meet(collectives: Any) -> Channel | None:
        if collectives.rank == 2:
            collectives.allgather_bytes(other, "hvd_async.rendezvous")
            return None
        return rendezvous(collectives, FAMILIES)[0]

    return on_ranks(3, meet)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (msgspec.msgpack.encode(OldCard(b"", "old", b"", 0, [])), "an early one on rank 2"),
        (msgspec.msgpack.encode({"version": 7}), "another on rank 2"),
        (b"", "another on rank 2"),
        (b"\xc1", "another on rank 2"),
    ],
)
def test_versions_that_differ_are_reported_on_every_rank(monkeypatch, other, said):
    monkeypatch.setattr("hvd_async.__version__", "9.9.9")
    for outcome in meet_with(other)[:2]:
        assert isinstance(outcome, EngineError)
        assert f"the ranks have different versions of hvd_async: 9.9.9 on ranks 0, 1, {said}. " in str(outcome)
        assert "Install the same one on every host" in str(outcome)


def test_an_older_version_reads_a_newer_card():
    """So that it ends too: it finds nothing at the port, and says so."""
    card = meeting.Card(b"k", "h", b"s", 5, ["a"], "place", "9.9.9")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=OldCard).port == 5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
@pytest.mark.parametrize("name", ["dead_after", "connect_timeout", "warn_after", "timeout"])
def test_a_setting_that_is_not_a_number_of_seconds_is_refused(monkeypatch, name, text):
    variable = f"HVD_ASYNC_{name.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} must be a positive number of seconds, got '{text}'"):
        getattr(time_limits, name)()


def test_settings_that_are_left_out(monkeypatch):
    for name in ("HVD_ASYNC_DEAD_AFTER", "HVD_ASYNC_CONNECT_TIMEOUT", "HVD_ASYNC_WARN_AFTER", "HVD_ASYNC_TIMEOUT"):
        monkeypatch.setenv(name, "")
    assert time_limits.timeout() == float("inf")
    assert (time_limits.dead_after(), time_limits.connect_timeout(), time_limits.warn_after()) == (25.0, 60.0, 60.0)


def test_the_limit_of_the_start_can_be_chosen(monkeypatch):
    monkeypatch.setenv("HVD_ASYNC_CONNECT_TIMEOUT", "0.3")
    monkeypatch.setattr(meeting, "MARGIN", WAIT)

    def meet(collectives: Any) -> Any:
        if collectives.rank == 1:  # it tells its card, and never comes
            collectives.allgather_bytes(msgspec.msgpack.encode(meeting.Card(
                zmq.curve_keypair()[0], "away", b"", 0, [], meeting.machine(), meeting.hvd_async.__version__)),
                "hvd_async.rendezvous")  # fmt: skip
            return None
        return rendezvous(collectives, FAMILIES)

    outcome = on_ranks(2, meet)[0]
    assert "rank 1 on host away did not connect within 0.3 s" in str(outcome)


def test_a_coordinator_that_has_died_since_the_ranks_met_is_lost_in_an_elastic_job(monkeypatch):
    """The others continue without it, as without any lost rank. In other jobs the address may be wrong, and the
    error says how to name another."""
    monkeypatch.setenv("HVD_ASYNC_CONNECT_TIMEOUT", "0.3")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]

    def meet(collectives: Any) -> Any:
        if collectives.rank == 0:  # it tells its card, and dies
            card = meeting.Card(b"k", "away", b"s", port, ["127.0.0.1"], "p", meeting.hvd_async.__version__)
            return collectives.allgather_bytes(msgspec.msgpack.encode(card), "hvd_async.rendezvous")
        return rendezvous(collectives, FAMILIES)

    assert isinstance(on_ranks(2, meet)[1], EngineError)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    lost = on_ranks(2, meet)[1]
    assert isinstance(lost, RankLostError)
    assert (lost.rank, lost.host) == (0, "away")
    assert "HVD_ASYNC_ADDRESS" in str(lost)


def test_a_host_without_a_loopback_interface_listens_on_all_that_it_has(monkeypatch):
    bound = transport._bound

    def without_loopback(address, port):
        if address == transport.LOOPBACK:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return bound(address, port)

    monkeypatch.setattr(transport, "_bound", without_loopback)
    door = transport.ListeningSocket()
    with socket.socket(fileno=door.open(local=True)), socket.create_connection(("127.0.0.1", door.port), timeout=30):
        door.close()
