"""The control plane's hub next to strangers: descriptors of closed connections come back as those of ranks."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
import zmq

from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import Hello
from hvd_async.runtime.transport import ZmqChannel, ZmqHub
from hvd_async.testing import CODEC

pytestmark = pytest.mark.multiproc

PROBES = 40
"""Closed connections whose descriptors the rank's may get; the client's own sockets take some of them."""
WAIT = 5.0


def hear(hub: ZmqHub, seconds: float) -> tuple[int, object] | None:
    """The next event, None if there is none for so long (``receive`` also returns when only strangers came or went)."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if (item := hub.receive(left)) is not None:
            (rank,), event = item
            return rank, event
    return None


def test_a_rank_that_got_a_probes_descriptor_is_not_taken_for_dead_until_it_is() -> None:
    # Every rank probes the coordinator's port before it connects. Seen on MPI in 1 start of 5: that the probe
    # had ended was read after the rank's first message on the same descriptor, and the rank was declared dead.
    keys = zmq.curve_keypair()
    with contextlib.ExitStack() as stack:
        hub = ZmqHub(CODEC)
        stack.callback(hub.close)
        hub.allow([keys[0]])
        probes = [socket.create_connection(("127.0.0.1", hub.port), WAIT) for _ in range(PROBES)]
        for probe in probes:
            probe.recv(1)  # ZeroMQ has greeted: it has accepted this one
            probe.close()
        channel = ZmqChannel(CODEC, "127.0.0.1", hub.port, hub.public, keys)
        stack.callback(channel.close)
        channel.send(Hello("here", 1))
        channel.flush()
        assert hub.router._socket.poll(WAIT * 1000), "so the hub finds the message and the probes' ends at once"
        assert hear(hub, WAIT) == (0, Hello("here", 1))
        assert hear(hub, 0.2) is None, "the rank is alive"
        channel.close()
        lost = hear(hub, WAIT)
        assert lost is not None
        assert isinstance(lost[1], Gone)
