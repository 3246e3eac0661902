"""Collectives that a program calls, in the same order on all ranks of a process set.

Before each of them the ranks compare what they call. So a mismatch is an error on all ranks instead of a hang or
garbage, ranks know how much each of them sends, and a rank that has joined takes part with zeros.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from hvd_async.errors import ranks_text
from hvd_async.runtime import time_limits
from hvd_async.runtime.log import warn
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.world import HorovodInternalError

ALLREDUCE, JOIN = "allreduce", "join"
"""Kinds of calls that a joined rank knows."""
OPERATIONS = "Average", "Sum", "Adasum", "Min", "Max", "Product"
Average, Sum, Adasum, Min, Max, Product = range(6)
REDUCTIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
RECORD = 1024
"""Bytes of a call that travel in one message; a longer one takes a second."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

Steps: TypeAlias = Generator[Any, None, Any]
"""A collective: it yields each work of the process group that it waits for, and returns its result."""
LOOK = timedelta(seconds=0.5)
"""Time after which a wait looks whether a rank is lost."""


def check() -> None:
    """Raise if this process knows of a lost rank; ``hvd_async.torch.collectives`` replaces it."""


class Call(msgspec.Struct):
    """A rank's part of a collective, as the other ranks see it.

    Attributes:
        kind: "allreduce", "allgather", ...
        name: as the user gave it, or empty.
        dtype: of the tensors, by name.
        shapes: of the tensors.
        options: arguments that must be equal on all ranks, such as the operation or the root.
        splits: numbers of rows to send to each rank, of an alltoall.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    shapes: list[list[int]] = []
    options: dict[str, str | int | float] = {}
    splits: list[int] = []

    def __str__(self) -> str:
        """For messages."""
        name = f" {self.name!r}" if self.name else ""
        of = f" of {self.dtype} {', '.join(map(str, self.shapes[:4]))}" if self.shapes else ""
        options = ", ".join(f"{option}={value}" for option, value in self.options.items())
        return f"{self.kind}{name}{of}{f' ({options})' if options else ''}"

    def common(self) -> tuple[Any, ...]:
        """Return what must be equal on all ranks."""
        ragged = int(self.kind in ("allgather", "alltoall"))
        shapes = [(len(shape), shape[ragged:]) for shape in self.shapes]
        return self.kind, self.name, self.dtype, shapes, self.options


class Handle:
    """A collective under way, for ``poll`` and ``synchronize``.

    Args:
        calls: of its process set.
        call: what it is.
        steps: the collective.

    Attributes:
        ended: whether it has a result or an error.
        result: what its steps have returned.
        error: by which it has failed, or None.
    """

    def __init__(self, calls: Calls, call: Call, steps: Steps) -> None:
        self._calls, self.call, self.steps = calls, call, steps
        self.ended, self.result = False, None
        self.error: Exception | None = None
        self._changes: list[Callable[[Any], Any]] = []
        """Functions that make ``synchronize``'s value of the result, one after the other."""

    def mapped(self, change: Callable[[Any], Any]) -> Handle:
        """Let ``synchronize`` return ``change`` of what it would return; return the handle."""
        self._changes.append(change)
        return self

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        """Note its result, or its error."""
        self.ended, self.result, self.error = True, result, error

    def done(self) -> bool:
        """Return whether ``wait`` would return at once."""
        self._calls.proceed()
        return self.ended

    def wait(self) -> Any:
        """Return ``synchronize``'s value when it is there.

        Raises:
            HorovodInternalError: the collective has failed.
        """
        self._calls.wait(self)
        return self._value

    @functools.cached_property
    def _value(self) -> Any:  # (some change their result in place)
        return functools.reduce(lambda value, change: change(value), self._changes, self.result)


class Calls:
    """The collectives of a process set on this rank. They run one at a time, in the order in which they are called.

    Only threads that call or await collectives run them: process groups' threads must not run Python
    code, since the process may end meanwhile.

    Args:
        name: unique among the groups of these ranks.
        ranks: of the process set, this one among them.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.ranks, self.size = list(ranks), len(ranks)
        self._world = world.current()
        self.place = self.ranks.index(self._world.rank)
        self.group = self._world.group(name, self.ranks)
        self._has_failed = False
        self._lock = threading.RLock()
        self._outstanding: deque[Handle] = deque()
        self._work: Any = None
        """Work that the first outstanding collective waits for; None if it has not begun."""
        self._warn_after = time_limits.warn_after()

    def place_of(self, root: int) -> int:
        """Return the place of a rank of the job among these ranks.

        Raises:
            ValueError: it is not one of them.
        """
        if root not in self.ranks:
            raise ValueError(f"root_rank must be one of the ranks {self.ranks}, got {root!r}.")
        return self.ranks.index(root)

    def begin(self, call: Call, run: Callable[[list[Call]], Iterable[Any]]) -> Handle:
        """Begin a collective, after all that were called before.

        Args:
            call: what it is.
            run: returns its ``Steps``, by all ranks' calls, which match, in the order of the ranks.
        """
        return self._begin(call, self._compared(call, run))

    def join(self) -> int:
        """Take part in the other ranks' allreduces with zeros until all ranks have joined; return the last to join."""
        return int(self._begin(Call(JOIN), self._joined()).wait())

    def wait(self, handle: Handle) -> None:
        """Wait for a collective, with a warning from time to time.

        Raises:
            HorovodInternalError: it has failed, or a rank is lost.
        """
        warn_at = time.monotonic() + self._warn_after
        while not handle.done():
            check()
            work = self._work  # (another thread may have continued)
            with contextlib.suppress(RuntimeError):  # (nothing yet, or an error that the steps raise)
                if work is not None:
                    work.wait(LOOK)
            if time.monotonic() > warn_at:
                warn_at += self._warn_after
                warn(
                    f"rank {self._world.rank} has waited {self._warn_after:.0f} s more for other ranks of "
                    f"{ranks_text(self.ranks)} to call {handle.call}. Waiting on."
                )
        error = handle.error
        if isinstance(error, HorovodInternalError):
            raise error
        if error is not None:
            self._has_failed = True
            raise world.cause_of(error, handle.call, check)

    def close(self) -> None:
        """End collectives that other ranks have not called by an error. Then, and after a failure, connections stay
        open: to close them would wait for what is in flight."""
        with self._lock:
            outstanding, self._outstanding = self._outstanding, deque()
        for one in outstanding:
            one.end(error=HorovodInternalError(f"hvd.shutdown() has ended {one.call}, which not all ranks called"))
        if not outstanding and not self._has_failed:
            self._world.close([self.group])

    def proceed(self) -> None:
        """Continue what is outstanding, as far as this need not wait."""
        with self._lock:
            while self._outstanding and (self._work is None or self._work.is_completed()):
                one, self._work = self._outstanding[0], None
                try:
                    self._work = next(one.steps)
                    continue
                except StopIteration as end:
                    one.end(end.value)
                except Exception as error:  # noqa: BLE001  raised by ``wait``
                    one.end(error=error)
                self._outstanding.popleft()

    # -- the steps of collectives -----------------------------------------------------------------------------------

    def _begin(self, call: Call, steps: Steps) -> Handle:
        handle = Handle(self, call, steps)
        with self._lock:
            self._outstanding.append(handle)
            self.proceed()
        return handle

    def _compared(self, call: Call, run: Callable[[list[Call]], Iterable[Any]]) -> Steps:
        everyones = yield from self._exchange(call)
        if problem := self._mismatch(everyones):
            raise HorovodInternalError(problem)
        return (yield from run([call if one.kind == JOIN else one for one in everyones]))

    def _joined(self) -> Steps:
        for seen in itertools.count():
            everyones = yield from self._exchange(Call(JOIN, options={"seen": seen}))
            others = [one for one in everyones if one.kind != JOIN]
            if not others:  # (the last to join has seen the fewest calls)
                return max(zip((-int(one.options["seen"]) for one in everyones), self.ranks, strict=True))[1]
            if not self._mismatch(everyones):  # (an error is raised by the ranks that have called it)
                dtype = DTYPES[others[0].dtype]
                zeros = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in others[0].shapes]
                yield from self.reduced(zeros, OPERATIONS.index(str(others[0].options["op"])))

    def _exchange(self, call: Call) -> Generator[Any, None, list[Call]]:
        """Return all ranks' calls."""
        own, room = msgspec.msgpack.encode(call), RECORD
        while True:
            sent = bytearray(len(own).to_bytes(8, "little") + own[:room].ljust(room))
            everyones = torch.empty(self.size * len(sent), dtype=torch.uint8, device="cpu")
            yield from until_done(self.group._allgather_base(everyones, torch.frombuffer(sent, dtype=torch.uint8)))
            rows = [row.tobytes() for row in everyones.view(self.size, -1).numpy()]
            lengths = [int.from_bytes(row[:8], "little") for row in rows]
            if max(lengths) <= room:
                pairs = zip(rows, lengths, strict=True)
                return [msgspec.msgpack.decode(row[8 : 8 + length], type=Call) for row, length in pairs]
            room = max(lengths)

    def _mismatch(self, everyones: Sequence[Call]) -> str:
        """Return the error, the same on all ranks, if these are not one collective."""
        called = [(rank, one) for rank, one in zip(self.ranks, everyones, strict=True) if one.kind != JOIN]
        rank, one = called[0]
        if len(called) < self.size and one.kind != ALLREDUCE:
            return f"a rank has joined and takes part in allreduces only, not in {one}"
        for other_rank, other in called:
            if one.common() != other.common():
                return (
                    f"the ranks call different collectives: rank {rank} calls {one}, rank {other_rank} calls {other}. "
                    "All ranks must call the same ones, in the same order."
                )
        return ""

    def reduced(self, tensors: Sequence[torch.Tensor], op: int) -> Steps:
        """Reduce tensors on the CPU in place over the ranks, an average as a sum; ``op`` is of ``REDUCTIONS``."""
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[op]  # type: ignore[assignment]
        wide = [one.to(torch.int32) if one.dtype == torch.int16 else one for one in tensors]  # (Gloo knows no int16)
        for work in [self.group.allreduce([one], options) for one in wide]:
            yield from until_done(work)
        return wide

    def broadcast(self, data: torch.Tensor, place: int) -> Steps:
        """Overwrite bytes on the CPU by those of the rank at this place."""
        options = dist.BroadcastOptions()
        options.rootRank = place
        yield from until_done(self.group.broadcast([data], options))


def until_done(work: Any) -> Steps:
    """Wait for a work of a process group.

    Raises:
        RuntimeError: it has failed.
    """
    yield work
    work.wait()
