"""A relay: passes on what the ranks below it send, those of many in one message, and fans commands out to them.

It looks into nothing and decides nothing. Each rank's messages, and the commands to it, stay in their order.
"""

from __future__ import annotations

import time

from hvd_async.runtime.relayed import DecodeError, Upward, decode_ranks, encode_upward, merged
from hvd_async.runtime.router import Router
from hvd_async.runtime.sockets import LARGEST, Sleeper
from hvd_async.runtime.transport import Uplink

GATHER = 0.001
"""Seconds between two messages upward: what comes meanwhile goes in one."""
SIBLINGS = 0.0002
"""Seconds that a message waits at the least for those of other ranks, which often come together."""


class Relay:
    """Runs until the connection upward ends.

    Args:
        router: of the connections from below, with their keys.
        uplink: to the coordinator, or to the relay above.
    """

    def __init__(self, router: Router, uplink: Uplink) -> None:
        self._router, self._uplink = router, uplink
        self._sleeper = Sleeper(router, uplink)
        self._waiting: list[Upward] = []
        self._next = 0.0

    def run(self) -> None:
        """Pass messages on; then close."""
        try:
            self._uplink.send(encode_upward([]))  # so that those above know where it is
            while not self._is_over():
                now = time.monotonic()
                timeout = max(0.0, self._next - now) if self._waiting else None
                self._sleeper.wait(0.0 if self._router.owes else timeout)
                if (heard := self._router.read()) and not self._waiting:
                    self._next = max(self._next, time.monotonic() + SIBLINGS)
                self._waiting += heard
                self._pass_down()
                if self._waiting and time.monotonic() >= self._next:
                    self._pass_up()
        finally:
            self._router.close()
            self._uplink.close(0)
            self._sleeper.close()

    def _is_over(self) -> bool:
        """Whether the connection upward has ended, after all that came by it was passed on."""
        if self._uplink.refused() is None:
            return False
        self._pass_down()
        return True

    def _pass_down(self) -> None:
        while (frames := self._uplink.read()) is not None:
            try:
                header, payload = frames
                ranks = decode_ranks(header)
            except (ValueError, DecodeError):
                continue  # (from those above, whom nothing below can mend: they will miss an answer, and say so)
            self._router.deliver(ranks, payload)

    def _pass_up(self) -> None:
        messages, self._waiting = merged(self._waiting), []
        self._next = time.monotonic() + GATHER
        some: list[Upward] = []
        size = 0
        for message in messages:
            if size + len(message.data) > LARGEST // 2:
                self._uplink.send(encode_upward(some))
                some, size = [], 0
            some.append(message)
            size += len(message.data) + 9 * len(message.ranks)
        self._uplink.send(encode_upward(some))
