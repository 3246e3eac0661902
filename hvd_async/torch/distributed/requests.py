"""Collectives that a program calls, matched by their names as in Horovod, and carried out by a thread of this process.

Ranks first announce their calls to each other. So they may call collectives in different orders, a mismatch is an
error on all ranks instead of a hang or garbage, ranks know how much each of them sends, and a rank that has joined
takes part with zeros.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_async.errors import ranks_text
from hvd_async.runtime import time_limits
from hvd_async.runtime.log import warn
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.world import HorovodInternalError

ALLREDUCE, JOIN = "allreduce", "join"
"""Kinds of requests that a joined rank knows."""
Average, Sum, Adasum, Min, Max, Product = range(6)
REDUCTIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
RECORD = 1024
"""Bytes of a request that travel in one message; a longer one takes a second."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass
class Request:
    """A rank's part of a collective, as it is announced to the others.

    Attributes:
        kind: "allreduce", "allgather", ...
        name: as the user gave it; empty for none until it is submitted.
        dtype: of the tensors, by name.
        shapes: of the tensors.
        options: arguments that must be equal on all ranks, such as the operation or the root.
        splits: numbers of rows to send to each rank, of an alltoall.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    shapes: list[list[int]] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)
    splits: list[int] | None = None

    def __str__(self) -> str:
        """For messages."""
        of = f" of {self.dtype} {', '.join(map(str, self.shapes[:4]))}" if self.shapes else ""
        return f"{self.kind} {self.name!r}{of} {self.options or ''}".strip()


class Handle(Future[Any]):
    """A collective under way, for ``poll`` and ``synchronize``.

    Attributes:
        then: makes ``synchronize``'s value of the result, in the thread that calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[Any], Any] = lambda result: result

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


Run = Callable[["Queue", list[Request]], Any]
"""Carries out a collective, once all ranks' requests are known to match."""


class _Item(NamedTuple):
    """A collective that this rank has called."""

    request: Request
    run: Run
    handle: Handle


class Queue:
    """The collectives of a process set on this rank, carried out by a thread.

    The ranks meet in cycles, in which each announces the collectives that it has called since its last one. A rank that
    has called nothing, and has nothing outstanding, does not take part, and the others wait for it there.

    Args:
        number: of the process set.
        ranks: of the process set, this one among them.
    """

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.ranks, self.size = list(ranks), len(ranks)
        self._world, self._name = world.current(), f"requests.{number}"
        self.place = self.ranks.index(self._world.rank)
        self.group = self._world.group(self._name, self.ranks)
        self._suspects = ""
        """Ranks that have probably ended, as a clause for errors; empty while none is suspected."""
        self._failures = 0
        """Number of collectives that have failed, the same on all ranks until one has ended."""
        self._called: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._names: set[str] = set()
        """Names of the collectives that are outstanding here."""
        self._outstanding: dict[str, _Item] = {}
        """The collectives that the thread has announced, by name."""
        self._unnamed: Counter[str] = Counter()
        self._warn_after = time_limits.warn_after()
        self._thread = threading.Thread(target=self._serve, name=f"hvd_async-requests-{number}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, run: Run) -> Handle:
        """Begin a collective.

        Raises:
            ValueError: one of this name is outstanding.
        """
        if not request.name:
            request.name = f"{request.kind}.noname.{self._unnamed[request.kind]}"
            self._unnamed[request.kind] += 1
        if request.name in self._names:
            raise ValueError(
                f"a collective named {request.name!r} is outstanding: synchronize it, or pass another name."
            )
        self._names.add(request.name)
        handle = Handle()
        self._called.put(_Item(request, run, handle))
        return handle

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, and collectives that other ranks have not called by an error; connections of these stay
        open."""
        self._called.put(None)
        self._thread.join(timeout)
        for item in list(self._outstanding.values()):
            item.handle.fail(
                HorovodInternalError(f"hvd.shutdown() has ended {item.request}, which not all ranks called")
            )
        if not self._thread.is_alive():
            self._world.close([self.group])

    # -- the queue's thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        torch.set_num_threads(1)  # (of this thread)
        outstanding = self._outstanding
        announced: dict[str, dict[int, Request]] = {}
        joined: dict[int, int] = {}
        try:
            for cycle in itertools.count():
                called = self._take(block=not outstanding)
                items = [item for item in called if item is not None]
                outstanding.update({item.request.name: item for item in items})
                if None in called:
                    return
                for place, requests in enumerate(self._exchange([item.request for item in items], [*outstanding])):
                    for request in requests:
                        if request.kind == JOIN:
                            joined[place] = cycle
                        else:
                            announced.setdefault(request.name, {})[place] = request
                # (in the same order on all ranks: that of their announcements)
                for name in [name for name, one in announced.items() if len({*one, *joined}) == self.size]:
                    self._carry_out(announced.pop(name), outstanding.pop(name, None))
                if len(joined) == self.size:
                    last = self.ranks[max((when, place) for place, when in joined.items())[1]]
                    joined.clear()
                    self._unnamed.clear()
                    self._finish(outstanding.pop(JOIN), functools.partial(int, last))
        except HorovodInternalError as error:
            self._fail(outstanding, error)

    def _take(self, block: bool) -> list[_Item | None]:
        """Return what has been called; wait for something if ``block``."""
        called = [self._called.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                called.append(self._called.get_nowait())
        return called

    def _finish(self, item: _Item, run: Callable[[], Any]) -> None:
        self._names.discard(item.request.name)
        try:
            result = run()
        except HorovodInternalError as error:
            item.handle.fail(error)
        except Exception as error:  # noqa: BLE001  raised by ``synchronize``
            item.handle.fail(HorovodInternalError(str(error)))
        else:
            with contextlib.suppress(InvalidStateError):  # (``close`` has ended it)
                item.handle.set_result(result)

    def _fail(self, outstanding: dict[str, _Item], error: Exception) -> None:
        """Fail all collectives, later ones too."""
        for item in outstanding.values():
            item.handle.fail(error)
        while (later := self._called.get()) is not None:
            later.handle.fail(error)

    def _carry_out(self, requests: dict[int, Request], item: _Item | None) -> None:
        """Run a collective that all ranks have announced; without ``item`` this rank has joined."""
        first = min(requests.items())[1]
        everyones = [requests.get(place, first) for place in range(self.size)]

        def run() -> Any:
            self._check(requests)
            if item is not None:
                return item.run(self, everyones)
            return [self.reduce(torch.zeros(each, dtype=DTYPES[first.dtype]), *first.options) for each in first.shapes]

        if item is not None:
            self._finish(item, run)
        else:
            with contextlib.suppress(HorovodInternalError):  # (a rank that has called it raises the error)
                run()

    def wait(self, work: Any, what: object) -> None:
        """Wait for a collective of ``group``, with a warning from time to time.

        Raises:
            HorovodInternalError: it has failed.
        """
        # (Not ``work.wait``: a process that ends while a thread of it waits in C++ is aborted.)
        future, done = work.get_future(), threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(min(self._warn_after, 1e6)):
            warn(
                f"rank {self._world.rank} has waited {self._warn_after:.0f} s more for other ranks of "
                f"{ranks_text(self.ranks)} to call {what}. Waiting on."
            )
        try:
            future.wait()
        except RuntimeError as error:
            self._failures += 1
            failure = f"{self._name}.{self._failures}"
            self._suspects = self._suspects or self._world.suspects(failure, self.ranks)
            raise HorovodInternalError(f"{what} has failed{self._suspects}: {error}") from error

    def _exchange(self, called: list[Request], outstanding: list[str]) -> list[list[Request]]:
        """Return what each rank announces, in the order of the ranks; ``outstanding`` is for messages."""
        own = json.dumps([asdict(request) for request in called]).encode()
        what = ", ".join(outstanding[:4])
        records = self._gather(own[:RECORD], RECORD, len(own), what)
        longest = max(length for _, length in records)
        if longest > RECORD:
            records = self._gather(own, longest, len(own), what)
        return [[Request(**one) for one in json.loads(data)] for data, _ in records]

    def _gather(self, data: bytes, room: int, length: int, what: object) -> list[tuple[bytes, int]]:
        own = torch.frombuffer(bytearray(length.to_bytes(8, "little") + data.ljust(room)), dtype=torch.uint8)
        everyones = torch.empty(self.size * (room + 8), dtype=torch.uint8)
        self.wait(self.group._allgather_base(everyones, own), what)
        found = [row.tobytes() for row in everyones.view(self.size, room + 8).numpy()]
        return [(row[8 : 8 + min(room, size)], size) for row in found for size in [int.from_bytes(row[:8], "little")]]

    def _check(self, requests: dict[int, Request]) -> None:
        """Raise, on all ranks alike, if these are not one collective.

        Raises:
            HorovodInternalError: they are not.
        """
        (place, one), *others = sorted(requests.items())
        if len(requests) < self.size and one.kind != ALLREDUCE:
            raise HorovodInternalError(f"a rank has joined and takes part in allreduces only, not in {one}")
        ragged = int(one.kind in ("allgather", "alltoall"))
        for other_place, other in others:
            same = (one.kind, one.dtype, one.options) == (other.kind, other.dtype, other.options)
            if not same or [(len(s), s[ragged:]) for s in one.shapes] != [(len(s), s[ragged:]) for s in other.shapes]:
                raise HorovodInternalError(
                    f"the ranks call different collectives by one name: rank {self.ranks[place]} calls {one}, "
                    f"rank {self.ranks[other_place]} calls {other}"
                )

    def reduce(self, tensor: torch.Tensor, op: int, prescale: float, postscale: float) -> torch.Tensor:
        """Reduce a tensor on the CPU in place over the ranks, and return it; ``op`` is of ``REDUCTIONS``."""
        scale(tensor, prescale)
        wide = tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor  # (Gloo knows no int16)
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[op]  # type: ignore[assignment]
        self.wait(self.group.allreduce([wide], options), "allreduce")
        if wide is not tensor:
            tensor.copy_(wide)
        return scale(tensor, postscale / self.size if op == Average else postscale)


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor in place, integers with rounding towards zero; return it."""
    if factor != 1.0:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).trunc_())
    return tensor
