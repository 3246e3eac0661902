"""A virtual GPU: predicts each mode's images/s over plain torch's by running the library's own code in virtual time.

No GPU and no Horovod are needed, and a run gives the same numbers each time and on every machine:

    python -m tests.conformance.virtual_gpu                            # all modes, one rank
    python -m tests.conformance.virtual_gpu all sgp --ranks 2 --slow-host 5
    python -m tests.conformance.virtual_gpu all --prices all --json FILE
    python -m tests.conformance.virtual_gpu all --spent                # what each thread does, ms a step
    python -m tests.conformance.virtual_gpu all --floor                # a device that takes no time
    python -m tests.conformance.virtual_gpu all --item                 # a script that reads its loss in each step

What runs is the production engine, coordinator and optimizers, each thread with a clock of its own
(``virtual_machine``). What is modelled:

- *Model.* ResNet-50 as a table of 53 convolutions with their batch norms: device time from FLOPs and bytes, scaled to
  ``Price.forward_device`` and ``backward_device``; host time spread evenly over launches. In the model's place 161
  small tensors bring the real hooks in the real order, in the buckets that ResNet-50 has.
- *Host time* is counted: Python calls, C calls and operators, each with a price, by ``sys.setprofile`` and a dispatch
  mode. The engine's loop has one price for each time that it wakes up; the coordinator's process is a round trip.
- *Device.* A kernel of the library takes 2 us and the time of its bytes, as if tensors were as large as ResNet-50's.
  What waits for the device in the code (``.item()``, ``torch.equal``, events, copies to the host) moves the clock of
  the thread that waits.
- *Interpreter lock.* While the engine works, the training thread loses ``Price.lock`` of that time.

Not modelled: the allocator, clocks of the GPU, noise, bandwidth shared by collectives and kernels. In the first
``FREE_STEPS`` steps Python costs nothing, so that what is cached for later ones does not matter. A prediction is no
measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import hvd_async
import hvd_async.torch as hvd
from hvd_async import testing as memory
from hvd_async.algorithms.eager import rank as rank_module
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime import engine as engine_module
from hvd_async.runtime import in_memory
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.in_memory import Combine, InMemoryCollectives, Sent
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.lifecycle import use_engine
from hvd_async.runtime.protocol import Codec, Command, Event, Hello, encode
from hvd_async.torch import arrival, gradient_replica, streams
from hvd_async.torch.tensor_collectives import POLLS_OF_GPU, TensorCollectives
from tests.conformance import fake_gpu, virtual_machine
from tests.conformance.host_counts import VIEWS, WAITS
from tests.conformance.virtual_machine import (
    PRICE_SETS,
    Actor,
    Machine,
    Meeting,
    Price,
    Stream,
    Waiting,
    World,
    on_stream,
)

MODES = ("all", "solo", "sgp", "adpsgd", "lsgd")
RECORDED = {"all": 0.804, "solo": 0.749, "sgp": 0.939, "adpsgd": 0.940, "lsgd": 0.910}
"""Ratios of an H100 with one rank (scripts/benchmarks/figures.md), for which prices were fitted."""
EAGER = ("all", "solo", "majority")
SETTLE = 9
"""Steps before the first one that counts."""
COUNTED = 10
FIRST = 2
"""Steps in which the library checks more than in later ones, and after which it announces steps: ten outside."""
FREE_STEPS = 3
CODEC = Codec(FAMILIES)
ELEMENTS = 8
"""Elements of each of the small tensors."""
BANDWIDTH = 2.4e9
"""Bytes that the device reads or writes in a millisecond."""
PARAMETERS = 25_557_032
"""ResNet-50's."""
BUCKET_BYTES = 25 * 2**20
FREE_NAMES = (*VIEWS, "aten::split", "aten::detach", "aten::reshape", "aten::lift")
"""Prefixes of the names of operators that launch no kernel, in addition to torch's views."""
PACKAGE = str(Path(hvd_async.__file__).parent)
FREE_FILES = {__file__, *(one.__file__ for one in (virtual_machine, memory, in_memory, fake_gpu, contextlib))}
"""Files whose code is the instrument's. (``contextlib`` is the library's too: its calls are cheap, and counted by what
they call.)"""
FREE_CODE = ("Engine._run", "Engine._next_look", "Engine._complete_collectives")
"""The engine's loop, whose price is ``look``."""

# -- the model ---------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """A convolution with its batch norm and what follows.

    Attributes:
        sizes: of its parameters, in elements.
        forward, backward: milliseconds of both passes on the device.
    """

    sizes: tuple[int, ...]
    forward: float
    backward: float


def resnet50(forward_ms: float, backward_ms: float, batch: int = 128, flops: float = 3.5e14) -> list[Group]:
    """Return ResNet-50's groups in the order of the forward pass, scaled to these times of the passes."""
    found: list[Group] = []

    def conv(cin: int, cout: int, k: int, out: int, stride: int = 1, relu: bool = True, add: bool = False) -> None:
        into = (out * stride) ** 2 * cin * batch * 2.0
        outof = out * out * cout * batch * 2.0
        work = 2.0 * k * k * cin * cout * out * out * batch
        one = max(work / flops, (into + outof) / (BANDWIDTH * 1e3))
        # The batch norm reads twice and writes once; backward, it reads four times.
        more, more_backward = 3 + 2 * relu + 2 * add, 5 + 3 * relu + add
        forward = one + more * outof / (BANDWIDTH * 1e3) + 12e-6
        backward = 2 * one + more_backward * outof / (BANDWIDTH * 1e3) + 20e-6
        found.append(Group((cout * cin * k * k, cout, cout), forward, backward))

    conv(3, 64, 7, 112, 2)
    cin = 64
    for planes, blocks, out in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            stride = 2 if block == 0 and planes > 64 else 1
            conv(cin, planes, 1, out * stride)
            conv(planes, planes, 3, out, stride)
            conv(planes, 4 * planes, 1, out, add=True)
            if block == 0:
                conv(cin, 4 * planes, 1, out, stride, relu=False)
            cin = 4 * planes
    found.append(Group((2048 * 1000, 1000), 30e-6, 60e-6))
    forward, backward = sum(group.forward for group in found), sum(group.backward for group in found)
    return [Group(g.sizes, g.forward * forward_ms / forward, g.backward * backward_ms / backward) for g in found]


def buckets_of(groups: Sequence[Group]) -> list[int]:
    """Return the number of each parameter's bucket, in backward's order, as ``Layout`` cuts them."""
    numbers, filled, number = [], 0, 0
    for size in (size for group in reversed(groups) for size in reversed(group.sizes)):
        if filled and (filled + size) * 4 > BUCKET_BYTES:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    return numbers


class Model:
    """Tables of what the model costs a rank.

    Args:
        machine: of the rank.
        slow_device: factor of the device's times.
        slow_host: more milliseconds of the host in each forward pass.
    """

    def __init__(self, machine: Machine, slow_device: float, slow_host: float) -> None:
        price, self._machine = machine.price, machine
        self.groups = resnet50(price.forward_device * slow_device, price.backward_device * slow_device)
        self._forward_us = (price.forward_host + slow_host) * 1e3 / len(self.groups)
        self._backward_us = price.backward_host * 1e3 / len(self.groups)
        self._forward_kernels = round(0.4 * price.kernels / len(self.groups))
        self._backward_kernels = round(0.57 * price.kernels / len(self.groups))
        self.parameters = [torch.nn.Parameter(torch.ones(ELEMENTS)) for group in self.groups for _ in group.sizes]
        self._shares: list[tuple[int, float]] = []
        """Kernels until each gradient is there, and milliseconds of each, in backward's order."""
        for group in reversed(self.groups):
            share, count = max(1, self._backward_kernels // len(group.sizes)), len(group.sizes)
            last = self._backward_kernels - share * (count - 1)
            self._shares += [(n, group.backward / self._backward_kernels) for n in [share] * (count - 1) + [last]]

    def forward(self, actor: Actor) -> torch.Tensor:
        """Return the loss."""
        product = torch.ones(ELEMENTS)
        for parameter in self.parameters:
            product = product * parameter
        stream, kernels = self._machine.stream("training"), self._forward_kernels
        for number, group in enumerate(self.groups):
            self._machine.phase = "forward" if number else "step"  # (the first kernels end the gap between steps)
            stream.launch(actor, group.forward, kernels, self._forward_us / kernels, "forward")
            self._machine.world.breathe(actor)
        return product.sum()

    def backward(self, actor: Actor, place: int) -> None:
        """Launch what comes before the gradient at this place of the backward pass."""
        count, each = self._shares[place]
        host = self._backward_us / self._backward_kernels
        self._machine.stream("training").launch(actor, count * each, count, host, "backward")


# -- what is counted ---------------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Charges a thread for its Python and C calls and its operators.

    Args:
        actor: the calling thread.

    Attributes:
        hooks: whether autograd runs: the library is then charged for what it does in its hooks, and nothing else is.
    """

    scale = PARAMETERS / (161 * ELEMENTS) * 4 / BANDWIDTH
    """Milliseconds of the device for each element that a kernel reads or writes."""
    _free: dict[CodeType, bool] = {}  # noqa: RUF012  a cache for all

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        assert actor.machine is not None
        self._actor, self._machine = actor, actor.machine
        self.hooks = self._inside = False
        self._outer: FrameType | None = None

    def on_event(self, frame: FrameType, event: str, called: Any) -> None:
        """Charge a call: the function for ``sys.setprofile``."""
        actor = self._actor
        if self._inside:
            return
        if event == "call":
            if self.hooks and self._outer is None and frame.f_code.co_filename.startswith(PACKAGE):
                self._outer, actor.charged = frame, True
            if self._charges(frame):
                actor.host(self._machine.price.python, "Python")
                actor.counts["Python calls"] += 1
        elif event == "return":
            if frame is self._outer:
                self._outer, actor.charged = None, False
        elif event == "c_call" and self._charges(frame):
            actor.host(self._machine.price.c, "Python")
            actor.counts["C calls"] += 1

    def _charges(self, frame: FrameType) -> bool:
        """Return whether a call costs time: not in the instrument's code, nor in code that has another price."""
        if not (self._actor.charged and self._machine.metered):
            return False
        code = frame.f_code
        free = self._free.get(code)
        if free is None:
            free = code.co_filename in FREE_FILES or code.co_qualname.startswith(FREE_CODE)
            self._free[code] = free
        return not free

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and charge it."""
        self._inside = True
        try:
            out = func(*args, **(kwargs or {}))
            if self._actor.charged and self._machine.metered and not func.is_view:
                self._charge(func._schema.name, (args, kwargs, out))
            return out
        finally:
            self._inside = False

    def _charge(self, name: str, values: Any) -> None:
        actor, price, stream = self._actor, self._machine.price, self._actor.current
        assert stream is not None
        if name.startswith(FREE_NAMES):
            return
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        actor.host(price.aten + price.tensor * len(tensors) * ("foreach" in name), "operators")
        actor.counts["operators"] += 1
        stream.launch(actor, 0.002 + self.scale * 0.75 * sum(tensor.numel() for tensor in tensors))
        if name in WAITS:
            self._machine.await_stream(f"device: {name.removeprefix('aten::')}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Charge in this context."""
        with self:
            sys.setprofile(self.on_event)
            try:
                yield
            finally:
                sys.setprofile(None)


@contextlib.contextmanager
def charging(actor: Actor, charged: bool = True) -> Iterator[None]:
    """Charge what is called in this context, or do not."""
    before, actor.charged = actor.charged, charged
    try:
        yield
    finally:
        actor.charged = before


# -- the library's GPU, its collectives and its control plane ----------------------------------------------------------


class VirtualGpu(fake_gpu.FakeGpu):
    """``streams.gpu`` whose streams and events are those of the calling thread's machine."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.holds = lambda tensor: not hasattr(tensor if tensor._base is None else tensor._base, "copied_to_host")

    def _machine(self) -> Machine:
        machine = self._world.me.machine
        assert machine is not None
        return machine

    def engine_stream(self, device: torch.device) -> Stream:
        return self._machine().stream("engine")

    def new_stream(self, device: torch.device) -> Stream:
        return self._machine().stream("new")

    def current_stream(self, device: torch.device) -> Any:
        return self._world.me.current

    def default_stream(self, device: torch.device) -> Stream:
        return self._machine().stream("training")

    def seconds(self, first: virtual_machine.Event, last: virtual_machine.Event) -> float:
        assert first.when is not None
        assert last.when is not None
        return (last.when - first.when) / 1e3

    def when_done(self, event: virtual_machine.Event, action: Callable[[], None]) -> None:
        self._machine().watched.append((self._world.me.clock, event, action))

    def set_stream(self, stream: Any) -> None:
        self._world.me.current = stream

    def on(self, stream: Any) -> Any:
        return on_stream(self._world.me, stream)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        machine = self._machine()
        self._world.me.host(machine.price.copy, "copies")
        machine.await_stream("device: copy to the host")
        with _disable_current_modes():
            copy: Any = tensor.clone()
        copy.copied_to_host = True
        return copy


def watch(world: World, machine: Machine) -> None:
    """Be the rank's watcher (``streams.Watcher``)."""
    actor, price = world.enter(f"W{machine.rank}", machine), machine.price

    def ready() -> float | None:
        if not machine.watched:
            return None
        begun, event, _ = machine.watched[0]
        known = event.known()
        return None if known is None else max(begun + price.wake / 1e3, known + price.block / 1e3)

    with contextlib.suppress(SystemExit), Meter(actor).running():
        while True:
            world.pause(actor, ready)
            actor.host(price.glance, "looks")
            actor.counts["wake-ups"] += 1
            with charging(actor):
                while machine.watched and machine.watched[0][1].query():
                    machine.watched.popleft()[2]()


class Handle:
    """A rank's part of a collective, as of a process group of NCCL: usable once it is submitted.

    Args:
        machine: of the rank.
        event: its end on the device.
        tensor: its result, multiplied by ``scale`` when it is taken.
    """

    in_stages = False

    def __init__(self, machine: Machine, event: virtual_machine.Event, tensor: torch.Tensor, scale: float) -> None:
        self._machine, self._event, self._tensor, self._scale = machine, event, tensor, scale

    def done(self) -> bool:
        """See ``interfaces.Handle``."""
        return self._event.query()

    def result(self) -> torch.Tensor:
        """See ``interfaces.Handle``."""
        self._machine.world.me.landed = True
        return self.take()

    def take(self) -> torch.Tensor:
        """Let the calling thread's current stream wait; return the result."""
        actor = self._machine.world.me
        actor.host(self._machine.price.take, "takes")
        assert actor.current is not None
        actor.current.wait_event(self._event)
        result = self._tensor if self._scale == 1.0 else self._tensor.mul_(self._scale)
        return streams.record_received(result)

    def seconds_to_poll(self) -> float:
        """See ``interfaces.Handle``."""
        return POLLS_OF_GPU[0]


class Board:
    """Collective that not all ranks have joined yet.

    Attributes:
        open: what ranks have sent and where their results go, and their meeting on the device, by name and ranks.
        gathered: payloads by name and rank.
    """

    def __init__(self) -> None:
        self.open: dict[tuple[str, Sequence[int]], tuple[dict[int, tuple[Sent, torch.Tensor]], Meeting]] = {}
        self.gathered: dict[str, dict[int, bytes]] = {}


class VirtualCollectives(TensorCollectives, InMemoryCollectives):
    """The data plane of a rank. Results are there when all ranks have joined; until then they are as they were.

    Args:
        world: the threads.
        machine: of the rank.
        size: number of ranks.
        board: that all ranks share.
    """

    in_order = True
    on_gpu = True

    def __init__(self, world: World, machine: Machine, size: int, board: Board) -> None:
        TensorCollectives.__init__(self)
        InMemoryCollectives.__init__(self, machine.rank, size)
        self._world, self._machine, self._board = world, machine, board
        self._thread = contextlib.ExitStack()

    def start(self, wake: Callable[[], None]) -> None:
        """Begin the engine's thread."""
        actor = self._world.enter(f"E{self.rank}", self._machine)
        self._thread.enter_context(Meter(actor).running())
        actor.charged = True

    def stop(self) -> None:
        """End the engine's thread."""
        self._thread.close()
        self._world.leave(self._world.me)

    def _join(
        self,
        name: str,
        members: Sequence[int],
        sent: Sent,
        kind: str,
        combine: Combine,
        out: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> Handle:
        """See ``InMemoryCollectives``.

        Args:
            out: memory of the result; None: that of the vector.
            scale: factor of the result, see ``Handle``.
        """
        machine, price, me = self._machine, self._machine.price, self._world.me
        me.host(price.submit, "submits")
        with streams.on_engine_stream_after(sent.vector):
            nccl, current = machine.stream("nccl"), me.current
            assert current is not None
            ms = (price.collective + price.transfer * (len(members) > 1)) / 1e3
            parts, meeting = self._board.open.setdefault((name, members), ({}, Meeting(members, ms)))
            assert machine.rank not in parts, f"rank {machine.rank} has submitted {name} twice"
            parts[machine.rank] = sent, sent.vector if out is None else out
            done = nccl.meet(meeting, current, me.clock)
        if len(parts) == len(members):
            del self._board.open[name, members]
            with _disable_current_modes():
                results = combine([parts[rank][0] for rank in members])
                for rank, result in zip(members, results, strict=True):
                    parts[rank][1].copy_(result)
        return Handle(machine, done, parts[machine.rank][1], scale)

    def allreduce_sum(
        self, vector: torch.Tensor, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        """See ``Collectives``."""
        sent = Sent(vector.clone() if keep else vector)

        def add(parts: Sequence[Sent]) -> Sequence[torch.Tensor]:
            return [torch.stack([part.vector for part in parts]).sum(0)] * len(parts)

        return self._join(name, self._members(process_set), sent, "sum", add, scale=scale)

    def alltoall(
        self,
        rows: torch.Tensor,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: torch.Tensor | None = None,
    ) -> Handle:
        """See ``Collectives``."""
        out = rows.new_zeros((sum(coming), rows.shape[1])) if into is None else into[: sum(coming)]

        def deal(parts: Sequence[Sent]) -> Sequence[torch.Tensor]:
            sent = [part.vector[: sum(part.splits)].split(part.splits) for part in parts]
            return [torch.cat([rows[place] for rows in sent]) for place in range(len(parts))]

        return self._join(name, self._members(process_set), Sent(rows, splits, coming), "exchange", deal, out)

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """Return the payloads of all ranks; the training thread pauses until they are there."""
        payloads, world = self._board.gathered.setdefault(name, {}), self._world
        payloads[self.rank] = payload
        if len(payloads) == self.size:
            del self._board.gathered[name]
        since = world.me.clock
        world.pause(world.me, lambda: since if len(payloads) == self.size else None)
        return [payloads[rank] for rank in range(self.size)]


class _Inbox:
    """Messages, each with the time at which it arrives."""

    def __init__(self) -> None:
        self._messages: deque[tuple[float, Any]] = deque()

    def put(self, when: float, message: Any) -> None:
        """Add a message, in the order of their times."""
        self._messages.append((when, message))
        self._messages = deque(sorted(self._messages, key=lambda one: one[0]))

    @property
    def next(self) -> float | None:
        """The time at which the first one arrives."""
        return self._messages[0][0] if self._messages else None

    def get(self, now: float) -> Any:
        """Return the first message that has arrived; None if there is none."""
        return self._messages.popleft()[1] if self._messages and self._messages[0][0] <= now else None


class Hub:
    """The coordinator's end of the control plane. What it does takes no time of its own: ``Price.trip`` has it.

    Attributes:
        stop: called when the run is over.
    """

    has_more = False

    def __init__(self, world: World, price: Price, size: int) -> None:
        self._world, self._half = world, price.trip / 2e3
        self.inbox, self.outboxes = _Inbox(), [_Inbox() for _ in range(size)]
        self.stop: Callable[[], None] = lambda: None

    def send(self, ranks: Sequence[int], command: Command) -> None:
        """See ``interfaces.Hub``."""
        data = encode(command)
        for rank in ranks:
            self.outboxes[rank].put(self._world.me.clock + self._half, data)

    def flush(self) -> None:
        """Do nothing: messages are on their way."""

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        """See ``interfaces.Hub``."""
        me = self._world.found or self._world.enter("C")
        deadline = None if timeout is None else me.clock + timeout * 1e3
        try:
            self._world.pause(me, lambda: min((t for t in (self.inbox.next, deadline) if t is not None), default=None))
        except SystemExit:
            self.stop()
            return None
        item = self.inbox.get(me.clock)
        return None if item is None else ((item[0],), CODEC.decode_event(item[1]))

    def wake(self) -> None:
        """Do nothing: the run ends."""

    def close(self) -> None:
        """Do nothing."""


class Channel:
    """A rank's end of the control plane: where its engine sleeps.

    Args:
        hub: the other end.
        stop: called when the run is over.
    """

    port: int | None = None

    def __init__(self, world: World, machine: Machine, hub: Hub, stop: Callable[[], None]) -> None:
        self._world, self._machine, self._hub, self._stop = world, machine, hub, stop
        self._half = machine.price.trip / 2e3
        self._queued: list[bytes] = []
        self._called: float | None = None
        """When it was last woken, if the engine has not seen that yet."""
        self._glanced = False
        self.send(Hello(f"host{machine.rank}", machine.rank))

    def send(self, event: Event) -> None:
        """See ``interfaces.Channel``."""
        with charging(self._world.me, False):
            self._queued.append(encode(event))

    def flush(self) -> None:
        """See ``interfaces.Channel``. The engine calls it each time that it has found work."""
        me, price = self._world.me, self._machine.price
        if self._glanced:
            self._glanced = False
            me.counts["wake-ups"] += 1
            me.counts["polls"] -= 1
            me.host(price.look - price.glance, "looks")
        self._send_queued(me)

    def _send_queued(self, me: Actor) -> None:
        for data in self._queued:
            self._hub.inbox.put(me.clock + self._half, (self._machine.rank, data))
        self._queued.clear()

    def receive(self, timeout: float | None) -> Command | Gone | None:
        """See ``interfaces.Channel``."""
        me, inbox = self._world.me, self._hub.outboxes[self._machine.rank]
        self._send_queued(me)
        me.landed = False
        since, wake = me.clock, self._machine.price.wake / 1e3
        deadline = None if timeout is None else since + timeout * 1e3

        def ready() -> float | None:
            called = None if self._called is None else self._called + wake
            return min((max(since, t) for t in (called, inbox.next, deadline) if t is not None), default=None)

        try:
            self._world.pause(me, ready)
        except SystemExit:
            self._stop()
            return None
        self._glanced = me.clock > since
        if self._called is not None and self._called <= me.clock:
            self._called = None
        if self._glanced:
            me.counts["polls"] += 1
            me.host(self._machine.price.glance, "looks")
        data = inbox.get(me.clock)
        if data is None:
            return None
        with charging(me, False):
            return CODEC.decode_command(data)

    def wake(self) -> None:
        """See ``interfaces.Channel``."""
        me = self._world.found
        if me is not None and self._called is None:
            self._called = me.clock

    def close(self) -> None:
        """Do nothing."""


class Posts:
    """Actions for an engine, instead of ``Engine._posts``: it sees none before the time at which it was posted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._actions: deque[tuple[float, Callable[[], None]]] = deque()

    def append(self, action: Callable[[], None]) -> None:
        """Post an action."""
        me = self._world.found
        self._actions.append((0.0 if me is None else me.clock, action))

    def popleft(self) -> Callable[[], None]:
        """Return the first one."""
        return self._actions.popleft()[1]

    def __bool__(self) -> bool:
        me = self._world.found
        return bool(self._actions) and (me is None or self._actions[0][0] <= me.clock)


# -- a run -------------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """Setup of a run.

    Attributes:
        mode: "plain", a quorum or the name of an algorithm.
        price: of everything.
        ranks: number of ranks.
        item: whether the script reads its loss in each step.
        scaler: whether it uses a ``GradScaler``.
        fused: whether its optimizer is a fused one, whose kernels skip a step that overflows.
        slow_device: factor of the device's times on the last of several ranks.
        slow_host: more milliseconds of the host in each of its steps.
        lead: ``arrival_lead`` of quorums.
    """

    mode: str
    price: Price = PRICE_SETS["fitted"]
    ranks: int = 1
    item: bool = False
    scaler: bool = False
    fused: bool = False
    slow_device: float = 1.0
    slow_host: float = 0.0
    lead: float | str = "auto"


class Cost(NamedTuple):
    """Mean cost of a step on a rank.

    Attributes:
        steps: number of steps that are counted.
        step_ms: milliseconds from a step's end to the next one's on the device.
        training_ms: of the training thread, its waits excluded.
        lock_ms: part of it that is lost to the engine.
        waits: number of times that the training thread waited for the device, or for a collective to complete.
        engine_waits: number of times that it waited for its engine, for a message of another rank.
        wakeups: number of times that the engine woke up and found work.
        polls: number of times that it found none.
        idle: milliseconds that the device is idle, by phase of the step.
        spent: milliseconds by thread and what.
        counts: numbers by thread and what.
    """

    steps: int
    step_ms: float
    training_ms: float
    lock_ms: float
    waits: float
    engine_waits: float
    wakeups: float
    polls: float
    idle: dict[str, float]
    spent: dict[str, float]
    counts: dict[str, float]


NOT_WORK = ("device: ", "collectives: ", "engine: ", "queue is full")
"""Beginnings of the names of what a training thread spends without working."""


class _Snapshot(NamedTuple):
    step: int
    end: virtual_machine.Event
    spent: dict[str, float]
    counts: dict[str, float]
    idle: dict[str, float]


class Rank:
    """A rank of a run.

    Args:
        setup: what is run.
        world: its threads.
        number: of the rank.
        engine: of the rank; None for plain torch.
    """

    def __init__(self, setup: Setup, world: World, number: int, machine: Machine, engine: Engine | None) -> None:
        self._setup, self._world, self.machine, self._engine = setup, world, machine, engine
        slow = setup.ranks > 1 and number == setup.ranks - 1
        self._model = Model(self.machine, setup.slow_device if slow else 1.0, setup.slow_host if slow else 0.0)
        self._snapshots: list[_Snapshot] = []

    def train(self) -> None:
        """Train in a thread of the rank."""
        try:
            actor = self._world.enter(f"T{self.machine.rank}", self.machine)
            self.machine.training = actor
            if self._engine is None:
                self._train(actor)
            else:
                with use_engine(self._engine):
                    self._train(actor)
        except SystemExit:
            pass  # (another rank has taken all of its steps, which ends the run)
        except Exception as error:  # noqa: BLE001  raised in the main thread
            self._world.end(error)
        else:
            self._world.end()

    def _train(self, actor: Actor) -> None:
        model, meter, setup = self._model, Meter(actor), self._setup
        place = {id(parameter): i for i, parameter in enumerate(reversed(model.parameters))}
        enters_python = setup.mode in EAGER

        def computed(parameter: torch.Tensor) -> None:
            with charging(actor, False):
                model.backward(actor, place[id(parameter)])
                if enters_python:
                    actor.host(self.machine.price.hook, "hooks")
                self._world.breathe(actor)

        for parameter in model.parameters:
            parameter.register_post_accumulate_grad_hook(computed)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if setup.scaler else None
        optimizer = self._wrapped(scaler)
        with meter.running():
            for step in range(SETTLE + COUNTED):
                self.machine.metered = step >= FREE_STEPS
                if step == SETTLE - 7:  # (how far the host gets ahead of the device from now on is its own work)
                    self._level(actor)
                with charging(actor):
                    optimizer.zero_grad()
                loss = model.forward(actor)
                if setup.mode == "lsgd":
                    with charging(actor):
                        optimizer.record_loss(loss)
                if scaler is not None:
                    with charging(actor):
                        loss = scaler.scale(loss)
                meter.hooks, self.machine.phase = True, "backward"
                loss.backward()
                meter.hooks, self.machine.phase = False, "step"
                actor.host(40, "step")
                with charging(actor):
                    if scaler is None:
                        optimizer.step()
                    else:
                        scaler.step(optimizer)
                        scaler.update()
                self._world.breathe(actor)
                if setup.item:
                    with charging(actor):
                        loss.item()
                self._snapshots.append(self._snapshot(step, actor))

    def _wrapped(self, scaler: Any) -> Any:
        """Return the optimizer."""
        parameters, mode, fused = self._model.parameters, self._setup.mode, self._setup.fused
        optimizer: Any = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, foreach=not fused, fused=fused)
        if mode in EAGER:
            numbers = buckets_of(self._model.groups)
            buckets: list[list[torch.Tensor]] = [[] for _ in range(numbers[-1] + 1)]
            for parameter, number in zip(reversed(parameters), numbers, strict=True):
                buckets[number].append(parameter)
            groups = [bucket[::-1] for bucket in reversed(buckets)]
            lead = self._setup.lead
            return hvd.EagerOptimizer(optimizer, quorum=mode, groups=groups, scaler=scaler, arrival_lead=lead)
        if mode in ("lsgd", "easgd"):
            own: dict[str, Any] = {"group": [list(range(self._setup.ranks))]} if mode == "lsgd" else {}
            return hvd.LeaderOptimizer(optimizer, algorithm=mode, **own)
        return optimizer if mode == "plain" else hvd.GossipOptimizer(optimizer, algorithm=mode)

    def _level(self, actor: Actor) -> None:
        """Let the host wait for the device, without counting it."""
        mark = self.machine.stream("training").mark()
        self._world.pause(actor, mark.known)

    def _snapshot(self, step: int, actor: Actor) -> _Snapshot:
        stream = self.machine.stream("training")
        threads = {"T": actor, **{name: self._world.actor(f"{name}{self.machine.rank}") for name in "EW"}}
        spent = {f"{name} {what}": ms for name, one in threads.items() if one for what, ms in one.spent.items()}
        counts = {f"{name} {what}": float(n) for name, one in threads.items() if one for what, n in one.counts.items()}
        stream.advance()
        return _Snapshot(step, stream.mark(), spent, counts, dict(stream.idle))

    def cost(self) -> Cost:
        """Return what a step took, from the step before ``SETTLE`` to the last one."""
        if len(self._snapshots) <= SETTLE:
            raise RuntimeError(f"rank {self.machine.rank} has taken {len(self._snapshots)} steps only")
        first = self._snapshots[SETTLE - 1]  # (the device may not have come to the last steps yet)
        last = next(one for one in reversed(self._snapshots) if one.end.known() is not None)
        begun, ended = first.end.known(), last.end.known()
        assert begun is not None
        assert ended is not None
        steps = last.step - first.step

        def per_step(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
            return {what: (after[what] - before.get(what, 0.0)) / steps for what in sorted(after)}

        spent, counts = per_step(first.spent, last.spent), per_step(first.counts, last.counts)
        work = {
            what[2:]: ms for what, ms in spent.items() if what.startswith("T ") and not what[2:].startswith(NOT_WORK)
        }

        def of(*beginnings: str) -> float:
            return sum(n for what, n in counts.items() if what.startswith(beginnings))

        return Cost(
            steps=steps,
            step_ms=(ended - begun) / steps,
            training_ms=sum(work.values()),
            lock_ms=work.get("lock", 0.0),
            waits=of("T device: ", "T collectives: "),
            engine_waits=of("T engine: "),
            wakeups=of("E wake-ups"),
            polls=of("E polls"),
            idle=per_step(first.idle, last.idle),
            spent=spent,
            counts=counts,
        )


def run(setup: Setup) -> list[Cost]:
    """Train and return what a step costs each rank."""
    torch.set_num_threads(1)
    plain = setup.mode == "plain"
    ranks = range(1 if plain else setup.ranks)
    names = [f"T{rank}" for rank in ranks]
    watchers = [] if plain else [f"W{rank}" for rank in ranks]
    world = World(names if plain else ["C", *(f"E{rank}" for rank in ranks), *watchers, *names])
    machines = [Machine(world, rank, setup.price) for rank in ranks]
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # (finalizers may post to engines)
    try:
        with (
            VirtualGpu(world).installed(),
            mock.patch.object(rank_module, "STEADY", FIRST),
            mock.patch.object(gradient_replica, "FIRST_STEPS", FIRST),
            mock.patch.object(arrival, "FIRST", FIRST + 2),
            mock.patch.object(engine_module, "time", SimpleNamespace(monotonic=world.seconds)),
        ):
            engines = [] if plain else _engines(setup, world, machines)
            workers = [Rank(setup, world, rank, machines[rank], None if plain else engines[rank]) for rank in ranks]
            threads = [threading.Thread(target=worker.train, name=f"rank-{i}") for i, worker in enumerate(workers)]
            watched = [] if plain else machines
            threads += [threading.Thread(target=watch, args=(world, one), name="watcher") for one in watched]
            for thread in threads:
                thread.start()
            world.run()
            for thread in threads:
                thread.join(10 * virtual_machine.PATIENCE)
            for engine in engines:
                engine.join()
        if world.failure is not None:
            raise world.failure
        return [worker.cost() for worker in workers]
    finally:
        if collects:
            gc.enable()


def _engines(setup: Setup, world: World, machines: Sequence[Machine]) -> list[VirtualEngine]:
    """Return the engines of all ranks, started, as is their coordinator."""
    hub, board = Hub(world, setup.price, len(machines)), Board()
    hosts = [f"host{machine.rank}" for machine in machines]
    coordinator = Coordinator(hub, FAMILIES, hosts, warn_after=1e6, connect_timeout=1e6, clock=world.seconds)
    hub.stop = coordinator._stopping.set
    coordinator.start()
    engines: list[VirtualEngine] = []
    for machine in machines:
        engines.append(VirtualEngine(world, machine, hub, VirtualCollectives(world, machine, len(machines), board)))
        engines[-1].start()
    return engines


class VirtualEngine(Engine):
    """The engine of a rank in virtual time; it notes how long the training thread waits, and for what."""

    def __init__(self, world: World, machine: Machine, hub: Hub, collectives: VirtualCollectives) -> None:
        super().__init__(collectives, lambda: Channel(world, machine, hub, self._stop_now))
        self._world = world
        self.clock = world.seconds
        self._condition = self.changed = Waiting(world, machine.price)  # type: ignore[assignment]
        self._posts = Posts(world)  # type: ignore[assignment]

    def join(self) -> None:
        """Wait for the end of its thread."""
        self._thread.join(virtual_machine.PATIENCE)

    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """See ``Engine.wait``."""
        me, before = self._world.me, self._world.me.waited
        super().wait(ready, waiting_for)
        passed = me.waited - before
        if passed > 0:
            what = "collectives: completion" if self._condition.landed else "engine: message"
            me.counts[what] += 1
            me.spent[what] += passed


# -- the command line --------------------------------------------------------------------------------------------------


def row(setup: Setup, base: Cost, prices: str = "fitted") -> dict[str, Any]:
    """Run a mode; return its figures over those of plain torch on the same machine."""
    first, *others = run(setup)
    return {
        "mode": setup.mode,
        "prices": prices,
        "ranks": setup.ranks,
        "ratio": base.step_ms / first.step_ms,
        **first._asdict(),
        "others": [cost._asdict() for cost in others],
    }


def _price(base: Price, changes: Sequence[str], floor: bool) -> Price:
    price = base._replace(**{name: float(value) for name, value in (change.split("=") for change in changes)})
    return price._replace(forward_device=0.01, backward_device=0.01) if floor else price


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description="Predicted images/s over plain torch's, and what a step costs.")
    parser.add_argument("modes", nargs="*", default=MODES, metavar="MODE", help=f"default: {' '.join(MODES)}")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--prices", default="fitted", choices=(*PRICE_SETS, "all"), help="a set of prices, or all")
    parser.add_argument("--price", nargs="*", default=[], metavar="NAME=VALUE", help="change prices")
    parser.add_argument("--item", action="store_true", help="the script reads its loss in each step, plain torch's too")
    parser.add_argument("--scaler", action="store_true", help="the script uses a GradScaler, plain torch's too")
    parser.add_argument("--fused", action="store_true", help="the optimizer is a fused one, plain torch's too")
    parser.add_argument("--floor", action="store_true", help="a device that takes no time: a step is the host's")
    parser.add_argument("--slow-device", type=float, default=1.0, metavar="FACTOR", help="rank 1's device is slower")
    parser.add_argument("--slow-host", type=float, default=0.0, metavar="MS", help="rank 1's host is slower")
    parser.add_argument("--lead", type=float, metavar="S", help="arrival_lead in seconds, instead of auto")
    parser.add_argument("--spent", action="store_true", help="also what the threads do, ms a step, and the counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("prices    mode      ranks  ratio  step ms  T ms  lock  T waits  for E  wake-ups  polls  idle ms")
    for prices in PRICE_SETS if args.prices == "all" else [args.prices]:
        price = _price(PRICE_SETS[prices], args.price, args.floor)
        lead = "auto" if args.lead is None else args.lead
        own = {name: getattr(args, name) for name in ("ranks", "item", "scaler", "fused", "slow_device", "slow_host")}
        setup = Setup("plain", price, **own, lead=lead)
        (base,) = run(setup)
        for mode in ("plain", *args.modes):
            one = row(setup._replace(mode=mode), base, prices)
            rows.append(one)
            _show(one, args.spent)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _show(row: dict[str, Any], spent: bool) -> None:
    recorded = RECORDED.get(row["mode"]) if row["ranks"] == 1 else None
    for number, cost in enumerate([row, *row["others"]]):
        ratio = f"{row['ratio']:6.3f}" if number == 0 else f"rank {number}"
        shown = f"{row['prices']:9} {row['mode']:9} {row['ranks']:5} {ratio}"
        shown += f" {cost['step_ms']:8.2f} {cost['training_ms']:5.1f} {cost['lock_ms']:5.2f} {cost['waits']:8.2f}"
        shown += f" {cost['engine_waits']:6.2f} {cost['wakeups']:9.2f} {cost['polls']:6.1f}"
        shown += f" {sum(cost['idle'].values()):8.2f}"
        print(shown + (f"  (H100: {recorded})" if recorded and number == 0 else ""), flush=True)
        if spent:
            for what, ms in sorted(cost["spent"].items(), key=lambda item: -item[1]):
                if ms > 0.02:
                    print(f"    {ms:7.2f} ms  {what}")
            print("   ", {what: round(n, 1) for what, n in cost["counts"].items()})
            print("    the device is idle in", {what: round(ms, 2) for what, ms in cost["idle"].items()})


if __name__ == "__main__":
    main()
