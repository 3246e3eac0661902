"""Many ranks of one process that only have a connection to the coordinator: the lower ends in ``connections``.

``python -m benchmarks.support.connected_ranks`` reads one JSON object a line: first who it is, then what to do, and
answers each with another.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from hvd_async.algorithms.eager.config import EagerConfig, StartRound, StepEntered
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.descriptors import shortage
from hvd_async.runtime.protocol import (
    Accepted,
    Close,
    Codec,
    Command,
    Event,
    Finished,
    Hello,
    Leaving,
    Registered,
    Welcome,
    encode,
    packed,
)
from hvd_async.runtime.transport import Uplink

LIMIT = 120.0
"""Seconds to wait for the coordinator."""
LOOK = 0.05
"""Seconds after which all connections are looked at, whatever the poll says."""
HYPER = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}]


class Ranks:
    """The connections.

    Args:
        told: the first line: ``ranks``, and of each ``above`` (address, port, key) and ``keys``.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._ranks: list[int] = told["ranks"]
        if problem := shortage(3 * len(self._ranks)):
            raise OSError(problem)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * len(self._ranks) + 16)  # each has monitors
        self._codec = Codec(FAMILIES)
        self._uplinks = [
            Uplink(address, port, server.encode(), (public.encode(), secret.encode()), context)
            for (address, port, server), (public, secret) in zip(told["above"], told["keys"], strict=True)
        ]
        self._poll = select.epoll()
        self._by_descriptor = {uplink.descriptors[0]: place for place, uplink in enumerate(self._uplinks)}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def send(self, events: Callable[[int], list[Event]]) -> float:
        """Send each rank's events, for which there may be none; returns when the first were sent."""
        began = time.monotonic()
        for rank, uplink in zip(self._ranks, self._uplinks, strict=True):
            own = events(rank)
            if own:
                uplink.send(packed([msgspec.Raw(encode(event)) for event in own]))
        return began

    def wait(self, wanted: Callable[[Command], bool]) -> float:
        """Wait until all have received such a command; returns when the last had.

        Raises:
            TimeoutError: they have not.
        """
        missing = {*range(len(self._uplinks))}
        raw: dict[bytes, bool] = {}  # most messages are the same for all
        last, deadline = time.monotonic(), time.monotonic() + LIMIT
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} ranks still wait")
            ready = [self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(LOOK)] or [*missing]
            for place in ready:
                while (frames := self._uplinks[place].read()) is not None:
                    at = time.monotonic()
                    data = frames[0]
                    if data not in raw:
                        raw[data] = any(wanted(command) for command in self._codec.decode_commands(data))
                    if raw[data] and place in missing:
                        missing.discard(place)
                        last = max(last, at)
        return last

    def act(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what a line says; returns the answer."""
        optimizer, step = order.get("optimizer", 0), order.get("step", 0)
        match order["do"]:
            case "hello":
                sent = self.send(lambda rank: [Hello("host", rank)])
                return {"sent": sent, "received": self.wait(lambda command: isinstance(command, Welcome))}
            case "register":
                config = EagerConfig(order["quorum"], 16, 0.0, 0, order["buckets"])
                sent = self.send(lambda rank: [Registered(optimizer, config, ["w"], [1], hyper=HYPER)])
                return {"sent": sent, "received": self.wait(lambda command: command == Accepted(optimizer))}
            case "step":
                entered = StepEntered(optimizer, step, buckets=[*range(order["buckets"])], landed=step - 1)
                some = {*order["ranks"]}
                chosen = (lambda rank: rank in some) if some else (lambda rank: order["others"])
                sent = self.send(lambda rank: [entered] if chosen(rank) else [])
                if not order["wait"]:
                    return {"sent": sent}

                def starts(command: Command) -> bool:
                    return isinstance(command, StartRound) and (command.optimizer, command.round) == (optimizer, step)

                return {"sent": sent, "received": self.wait(starts)}
            case _:
                produced = [step] * order["buckets"]
                ends = [Finished(number, produced) for number in range(order["optimizers"])]
                sent = self.send(lambda rank: [*ends, Leaving()])
                return {"sent": sent, "received": self.wait(lambda command: isinstance(command, Close))}


def main() -> None:
    """Answer line by line."""
    ranks: Ranks | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if ranks is None:
            ranks, answer = Ranks(order), {"pid": 0}
        else:
            answer = ranks.act(order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
