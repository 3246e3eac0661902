"""Collectives that a program calls, carried out in order by a thread of this process.

Ranks first tell each other what they are about to do. So a mismatch is an error on all ranks instead of a hang or
garbage, ranks know how much each of them sends, and a rank that has joined takes part with zeros.
"""

from __future__ import annotations

import functools
import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvd_async.errors import ranks_text
from hvd_async.runtime import time_limits
from hvd_async.runtime.log import warn
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.errors import HorovodInternalError

JOIN = "join"
RECORD = 1024
"""Bytes of a request that travel in one message; a longer one takes a second."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass
class Request:
    """A rank's part of a collective, as the others are told of it.

    Attributes:
        kind: "allreduce", "allgather", ...
        name: as the user gave it; empty for none.
        dtype: of the tensors, by name.
        shapes: of the tensors.
        options: what all ranks must give alike, such as the operation or the root.
        splits: numbers of rows to send to each rank, of an alltoall.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    shapes: list[list[int]] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)
    splits: list[int] | None = None

    def __str__(self) -> str:
        of = f" of {self.dtype} {', '.join(map(str, self.shapes[:4]))}" if self.shapes else ""
        return f"{self.kind} {self.name!r}{of} {self.options or ''}".strip()


class Handle:
    """A collective under way, for ``poll`` and ``synchronize``."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._done.is_set()

    def wait(self) -> Any:
        """Return the result when it is there.

        Raises:
            HorovodInternalError: the collective has failed.
        """
        while not self._done.wait(1.0):  # (a limit, so that signals are noticed on all systems)
            pass
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, run: Callable[[], Any]) -> None:
        """Run the collective (on the thread of the queue)."""
        try:
            self._result = run()
        except (RuntimeError, ValueError, TypeError) as error:
            known = isinstance(error, HorovodInternalError)
            self._error = error if known else HorovodInternalError(str(error))
        finally:
            self._done.set()

    def fail(self, error: Exception) -> None:
        """Have ``wait`` raise an error."""
        self._error = error
        self._done.set()


Run = Callable[["Queue", list[Request]], Any]
"""Carries out a collective, once all ranks' requests are known to match."""


class Queue:
    """The collectives of a process set on this rank.

    Args:
        number: of the process set.
        ranks: of the process set, this one among them.
    """

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.ranks, self.size = list(ranks), len(ranks)
        self.place = self.ranks.index(world.current().rank)
        self.group = world.current().group(f"requests.{number}", self.ranks)
        self._items: queue.SimpleQueue[tuple[Request, Run, Handle] | None] = queue.SimpleQueue()
        self._warn_after = time_limits.warn_after()
        self._busy = False
        self._thread = threading.Thread(target=self._serve, name=f"hvd_async-requests-{number}", daemon=True)
        self._thread.start()

    def submit(self, request: Request, run: Run) -> Handle:
        """Begin a collective, after all begun before."""
        handle = Handle()
        self._items.put((request, run, handle))
        return handle

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after what was begun; connections of a collective that does not end stay open."""
        self._items.put(None)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            world.current().close([self.group])

    def _serve(self) -> None:
        torch.set_num_threads(1)  # (of this thread)
        while (item := self._items.get()) is not None:
            request, run, handle = item
            handle.finish(functools.partial(self._run, request, run))

    def _run(self, request: Request, run: Run) -> Any:
        if request.kind == JOIN:
            return self._join()
        return run(self, self.check(request, self.exchange(request)))

    def wait(self, work: Any, what: object) -> None:
        """Wait for a collective of ``group``, with a warning from time to time.

        Raises:
            HorovodInternalError: it has failed.
        """
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(self._warn_after):
            warn(
                f"rank {world.current().rank} has waited {self._warn_after:.0f} s more for other ranks of "
                f"{ranks_text(self.ranks)} to call {what}. Waiting on."
            )
        try:
            work.wait()
        except RuntimeError as error:
            raise HorovodInternalError(
                f"{what} has failed; a rank has probably ended, see its output. {error}"
            ) from error

    def exchange(self, request: Request) -> list[Request]:
        """Return what all ranks are about to do, in the order of the ranks."""
        own = json.dumps(asdict(request)).encode()
        records = self._gather(own[:RECORD], RECORD, len(own), request)
        longest = max(length for _, length in records)
        if longest > RECORD:
            records = self._gather(own, longest, len(own), request)
        return [Request(**json.loads(data)) for data, _ in records]

    def _gather(self, data: bytes, room: int, length: int, what: Request) -> list[tuple[bytes, int]]:
        own = torch.frombuffer(bytearray(length.to_bytes(8, "little") + data.ljust(room, b" ")), dtype=torch.uint8)
        everyones = torch.empty(self.size * (room + 8), dtype=torch.uint8)
        self.wait(self.group._allgather_base(everyones, own), what)
        found = [row.tobytes() for row in everyones.view(self.size, room + 8).numpy()]
        return [(row[8 : 8 + min(room, size)], size) for row in found for size in [int.from_bytes(row[:8], "little")]]

    def check(self, own: Request, requests: list[Request]) -> list[Request]:
        """Return the requests of all ranks, with zeros for ranks that have joined, if they are one collective.

        Raises:
            HorovodInternalError: they are not.
        """
        for place, other in enumerate(requests):
            if other.kind == JOIN:
                requests[place] = own
                if own.kind != "allreduce":
                    raise HorovodInternalError(
                        f"rank {self.ranks[place]} has joined and takes part in allreduces only, not in {own}"
                    )
        for place, other in enumerate(requests):
            same = (own.kind, own.name, own.dtype, own.options) == (other.kind, other.name, other.dtype, other.options)
            ragged = int(own.kind in ("allgather", "alltoall"))
            alike = len(own.shapes) == len(other.shapes) and all(
                len(one) == len(another) and one[ragged:] == another[ragged:]
                for one, another in zip(own.shapes, other.shapes, strict=True)
            )
            if not same or not alike:
                raise HorovodInternalError(
                    f"rank {self.ranks[self.place]} calls {own}, rank {self.ranks[place]} calls {other}. All ranks "
                    f"must call the same collectives in the same order."
                )
        return requests

    def _join(self) -> int:
        """Take part in the others' allreduces with zeros until all have joined; return the last rank to join."""
        rounds = 0
        while True:
            requests = self.exchange(Request(JOIN, options=[rounds]))
            others = [one for one in requests if one.kind != JOIN]
            if not others:
                waited = [(-one.options[0], rank) for rank, one in zip(self.ranks, requests, strict=True)]
                return max(waited)[1]
            rounds += 1
            own = others[0]
            self.check(own, requests)
            for shape in own.shapes:
                self.reduce(torch.zeros(shape, dtype=DTYPES[own.dtype]), *own.options)

    def reduce(self, tensor: torch.Tensor, op: int, prescale: float, postscale: float) -> torch.Tensor:
        """Reduce a tensor on the CPU in place over the ranks, and return it; ``op`` is of ``REDUCTIONS``, or 0 for the
        average."""
        scale(tensor, prescale)
        wide = tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor  # (Gloo knows no int16)
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[op]  # type: ignore[assignment]
        self.wait(self.group.allreduce([wide], options), "allreduce")
        if wide is not tensor:
            tensor.copy_(wide)
        return scale(tensor, postscale / self.size if op == AVERAGE else postscale)


AVERAGE = 0
REDUCTIONS = {
    AVERAGE: dist.ReduceOp.SUM,
    1: dist.ReduceOp.SUM,
    3: dist.ReduceOp.MIN,
    4: dist.ReduceOp.MAX,
    5: dist.ReduceOp.PRODUCT,
}
"""By Horovod's numbers of operations."""


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor in place, integers with rounding towards zero; return it."""
    if factor != 1.0:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).trunc_())
    return tensor


_queues: dict[int, Queue] = {}


def open_queue(number: int, ranks: Sequence[int]) -> None:
    """Begin to serve the collectives of a process set; its ranks call it, and nothing happens on others."""
    if world.current().rank in ranks:
        _queues[number] = Queue(number, ranks)


def close_queue(number: int) -> None:
    """End what ``open_queue`` has begun."""
    if number in _queues:
        _queues.pop(number).close()


def close_all() -> None:
    """End all queues."""
    for number in list(_queues):
        close_queue(number)


def queue_of(process_set: Any) -> Queue:
    """Return the queue of a process set's collectives.

    Raises:
        ValueError: the process set is not known, or this rank is outside.
    """
    number = process_set.process_set_id
    own = world.current().rank
    if number is None:
        raise ValueError(
            f"{process_set} is not known. Pass it to hvd.init(process_sets=[...]) or hvd.add_process_set()."
        )
    if number not in _queues:
        raise ValueError(f"rank {own} is not in {process_set}: only its ranks may call its collectives.")
    return _queues[number]
