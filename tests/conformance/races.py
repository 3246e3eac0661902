"""A fake GPU that checks its kernels: torch's CUDA sanitizer on CPU tensors, fake streams and events.

Ranks are threads (``Cluster``), each with streams of its own, and an NCCL whose collectives wait for what the stream
that submitted them holds. The detector finds two kernels on one storage that no stream, event or completed collective
orders; storage that its own stream may reuse while another one works on it; and pinned memory that the host touches too
early. It also counts the host's waits by thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.cuda import _sanitizer as sanitizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hvd_async.algorithms.gossip.message_format import HEADER
from hvd_async.testing import Cluster, MemoryCollectives
from hvd_async.torch import horovod_collectives as collectives
from hvd_async.torch import streams
from tests.conformance import fake_gpu

CPU = torch.device("cpu")
OURS = str(Path(streams.__file__).parents[1])
MADE_BY_SIZE = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn, torch.randint}
MADE_OF_NUMBERS = {torch.tensor, torch.as_tensor}
TO_HOST = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.cpu: "cpu"}
EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::detach"}
"""Operators without a kernel that are no views."""
COPIES = {"aten::copy_", "aten::_to_copy"}
ANSWERS = {"aten::equal", "aten::nonzero", "aten::masked_select"}
"""Operators that wait for their kernel, because the host needs its result."""


def _innermost(frame: FrameType | None, lookup_lines: bool) -> list[str]:
    """Return where the library's innermost frame is, as a list of one; an empty list if there is none."""
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return [] if frame is None else [f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"]


INNERMOST_ONLY = SimpleNamespace(walk_stack=lambda frame: frame, StackSummary=SimpleNamespace(extract=_innermost))
"""Replaces the sanitizer's ``traceback``, which summarizes the whole stack at each kernel: a third of a test's time."""


class Stream(fake_gpu.Stream):
    """A stream of one rank, known to the sanitizer by a number."""

    def __init__(self, gpu: RacyGpu, name: str) -> None:
        super().__init__(gpu, CPU)
        self.name, self.rank, self.number = f"{name} stream of rank {gpu.rank}", gpu.rank, next(gpu.numbers)
        gpu.known[self.number] = self
        gpu.handler._handle_stream_creation(self.number)

    def record_event(self) -> Event:
        return Event(self._gpu, self)

    def wait_event(self, event: Any) -> None:
        with self._gpu.judging():
            self._gpu.handler._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: Any) -> None:
        self._gpu.waits_for_all += self is self._gpu.engine_stream(CPU)
        super().wait_stream(other)


class Event(fake_gpu.Event):
    """An event, known to the sanitizer by a number. It is complete when the host looks at it."""

    def __init__(self, gpu: RacyGpu, stream: Stream) -> None:
        super().__init__(gpu)
        self.number = next(gpu.numbers)
        with gpu.judging():
            gpu.handler._handle_event_creation(self.number)
            gpu.handler._handle_event_record(self.number, stream.number)

    def query(self) -> bool:
        """Every kernel that is queued from now on comes after it."""
        with self._gpu.judging():
            self._gpu.handler._handle_event_synchronization(self.number)
        return True

    def synchronize(self) -> None:
        super().synchronize()
        self.host_has_waited()

    def host_has_waited(self) -> None:
        """Order this thread's later kernels after the event. A wait of the engine also orders the training thread's
        streams; a wait of the training thread orders no kernels, since such waits are to be removed."""
        if self._gpu.thread == "engine":
            self.query()
            return
        with self._gpu.judging():
            syncs = self._gpu.handler.syncs
            syncs._state_wait_for_other(syncs.host_sync_state, syncs.recorded_sync_states[self.number])


@dataclass(eq=False)
class Block:
    """The memory of a storage.

    Attributes:
        where: "gpu", "pinned" or "host".
        stream: the stream it was allocated on, which may reuse it as soon as it is freed.
        recorded: numbers of the other streams that the allocator waits for.
    """

    number: int
    where: str
    stream: Stream
    recorded: set[int] = field(default_factory=set)


class _Arguments(sanitizer.ArgumentHandler):
    """The storages that a kernel reads and writes. (Not addresses: a view may begin elsewhere in its storage.)"""

    def __init__(self, gpu: RacyGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, torch.Tensor) or (value.dtype == torch.uint8 and value.shape[-1:] == (HEADER.size,)):
            return  # (a header's bytes lie behind a vector that others may read meanwhile)
        if (block := self._gpu.block(value)) is not None:
            if is_write:
                self.dataptrs_written.add(block.number)
            elif not metadata_only:
                self.dataptrs_read.add(block.number)
            self.tensor_aliases.setdefault(block.number, []).append(name or "output")
            if is_output:
                self.outputs.add(block.number)


class RacyGpu(fake_gpu.FakeGpu):
    """A fake GPU with a race detector.

    Tensors are on it if they come from ``adopt``, from a factory that was given a device, or from kernels there.

    Attributes:
        errors: one line for each error found.
        waits_for_all: how often an engine's own stream waited for all work of another stream, or a collective was
            submitted from another stream, which has the same effect. Neither is an error; both reduce overlap.
        behind_training: number of an engine's kernels, by operator, behind work that the training thread has queued.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.known = itertools.count(1), dict[int, Stream]()
        self.handler = sanitizer.EventHandler()
        self.errors: list[str] = []
        self.waits_for_all = 0
        self.behind_training = Counter[str]()
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}
        self._freed: deque[Block] = deque()
        self._thread = threading.local()
        self._streams: dict[tuple[int, str], Stream] = {}
        self.holds = lambda tensor: (block := self.block(tensor)) is not None and block.where == "gpu"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with mock.patch.object(sanitizer, "traceback", INNERMOST_ONLY), super().installed():
            yield

    # -- ranks and their streams ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank that this thread belongs to."""
        rank: int = self._thread.rank
        return rank

    @property
    def thread(self) -> str:
        """This thread's role: "engine", "training" or, inside backward(), "autograd"."""
        if "engine" in threading.current_thread().name:
            return "engine"
        return "training" if torch._C._current_graph_task_id() == -1 else "autograd"

    @contextlib.contextmanager
    def streams_of(self, rank: int) -> Iterator[None]:
        """Use a rank's streams in this thread."""
        before = vars(self._thread).get("rank")
        self._thread.rank = rank
        try:
            yield
        finally:
            self._thread.rank = before

    @contextlib.contextmanager
    def thread_of(self, rank: int) -> Iterator[None]:
        """Make this thread one of a rank's, and check its kernels."""
        with self.streams_of(rank), _Functions(self), _Kernels(self):
            yield

    def stream(self, name: str) -> Stream:
        """Return this rank's stream of a name."""
        with self._lock:
            if (self.rank, name) not in self._streams:
                self._streams[self.rank, name] = Stream(self, name)
            return self._streams[self.rank, name]

    def engine_stream(self, device: torch.device) -> Stream:
        return self.stream("engine's")

    def default_stream(self, device: torch.device) -> Stream:
        return self.stream("default")

    # -- memory ---------------------------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor, where: str = "host") -> Block | None:
        """Return a tensor's memory, which is ``where`` if it is new; None for tensors without strided CPU memory."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        with self._lock:
            block = self._blocks.get(storage._cdata)
            if block is None:
                stream = self.current_stream(CPU)
                block = self._blocks[storage._cdata] = Block(next(self.numbers), where, stream)
                weakref.finalize(storage, self._forget, storage._cdata).atexit = False
            return block

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's memory."""
        block = self.block(tensor)
        assert block is not None
        return block.number

    def _forget(self, key: int) -> None:
        """Note that a storage is gone. (Garbage collection may call this anywhere, so the next kernel checks it.)"""
        self._freed.append(self._blocks.pop(key))

    def put(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """Set where a new tensor is; return the tensor."""
        block = self.block(tensor, where)
        if block is not None:
            block.where = where
        return tensor

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Treat tensors as on the GPU from now on."""
        for tensor in tensors:
            self.put(tensor, "gpu")

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        block = self.block(tensor)
        assert block is not None
        block.recorded.add(stream.number)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            return self.put(torch.empty(shape, dtype=dtype), "pinned")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return self.put(tensor.clone(), "pinned")

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._host_waits_for(tensor, "to_host")
        with _disable_current_modes():
            return self.put(tensor.clone(), "host")

    # -- judging --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Hold the lock that all calls of the sanitizer's handler need, after checking freed blocks."""
        with self._lock:
            while self._freed:
                self._check_free(self._freed.popleft())
            yield

    def collect(self) -> None:
        """Check the blocks freed since the last kernel."""
        with self.judging():
            pass

    def _check_free(self, block: Block) -> None:
        """Complain if a freed block may be reused by its own stream while another one works on it."""
        accessed = self.handler.tensors_accessed.accesses.pop(block.number, None)
        if accessed is None or block.where != "gpu":
            return
        for access in [*accessed.reads, *([accessed.write] if accessed.write else [])]:
            waited_for = (block.stream.number, *block.recorded)
            after = self.handler.syncs.is_ordered_after
            if self.known[access.stream].rank != block.stream.rank:
                continue
            if not any(after(stream, access.seq_num, access.stream) for stream in waited_for):
                self._complain(f"memory of the {block.stream.name} freed too early", access)

    def launch(
        self, stream: Stream, what: str, reads: set[int], writes: set[int], aliases: dict[int, list[str]]
    ) -> None:
        """Check a kernel.

        Args:
            reads, writes: numbers of the blocks.
        """
        with self.judging():
            errors = self.handler._handle_kernel_launch(stream.number, reads - writes, writes, set(), what, aliases)
            for error in errors:
                assert isinstance(error, sanitizer.UnsynchronizedAccessError)
                other = self.known[error.previous_access.stream]
                if other.rank == stream.rank:  # (otherwise it is a cache, which only ranks in one process share)
                    self._complain("race", error.current_access, error.previous_access)

    def _complain(self, what: str, *accesses: sanitizer.Access) -> None:
        self.errors.append(f"{what}: " + ", after ".join(self._described(access) for access in accesses))

    def _described(self, access: sanitizer.Access) -> str:
        at = next(iter(access.stack_trace), "the user's code")
        what = str(access.operator).partition("(")[0]
        return f"{access.type} memory by {what} ({at}) on the {self.known[access.stream].name}"

    def _host_waits_for(self, tensor: torch.Tensor, what: str) -> None:
        """Record that the host waits for this thread's stream, on which the tensor is read."""
        self.host_waits(what)
        block, stream = self.block(tensor), self.current_stream(CPU)
        assert block is not None
        self.launch(stream, what, {block.number}, set(), {block.number: ["self"]})
        stream.record_event().host_has_waited()

    def host_waits(self, what: str) -> None:
        with self._lock:
            self.waits[f"rank {self.rank}'s {self.thread} thread", what] += 1

    def host_touches(self, tensor: torch.Tensor, writes: bool) -> None:
        """Complain if the host reads or writes pinned memory while a copy is under way."""
        block = self.block(tensor)
        if block is None or block.where != "pinned":
            return
        with self.judging():
            accessed = self.handler.tensors_accessed.accesses.get(block.number, sanitizer.TensorInfo(None))
            for access in [*(accessed.reads if writes else []), *([accessed.write] if accessed.write else [])]:
                if access.seq_num > self.handler.syncs.host_sync_state.get(access.stream, -1):
                    self._complain("the host touches pinned memory too early", access)


class _Kernels(TorchDispatchMode):
    """Checks a thread's kernels."""

    def __init__(self, gpu: RacyGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, schema, kwargs = self._gpu, func._schema, kwargs or {}
        taken = [block for t in tree_leaves((args, kwargs)) if torch.is_tensor(t) and (block := gpu.block(t))]
        if schema.name == "aten::_local_scalar_dense" and taken[0].where == "gpu":
            gpu._host_waits_for(args[0], "item")
            return func(*args, **kwargs)
        is_factory = bool(sanitizer.FACTORY_FUNCTION_REGEX.match(schema.name.removeprefix("aten::")))
        arguments = _Arguments(gpu)
        arguments.parse_inputs(schema, args, kwargs, is_factory=is_factory)
        given = gpu.current_stream(CPU)
        if gpu.thread == "engine" and given is not gpu.engine_stream(CPU):
            gpu.behind_training[schema.name] += not (func.is_view or schema.name in EMPTY)
        out = func(*args, **kwargs)
        on_gpu = not taken or any(block.where == "gpu" for block in taken)
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                gpu.block(tensor, "gpu" if on_gpu else "host")
        if not on_gpu:
            for tensor in tree_leaves((args, kwargs)):
                if torch.is_tensor(tensor):
                    gpu.host_touches(tensor, gpu.number(tensor) in arguments.dataptrs_written)
            return out
        arguments.parse_outputs(schema, out, is_factory=False)  # (what was freed there may still be in use)
        gpu.launch(given, schema.name, arguments.dataptrs_read, arguments.dataptrs_written, arguments.tensor_aliases)
        if schema.name in ANSWERS:
            gpu.host_waits(schema.name)
            given.record_event().host_has_waited()
        if schema.name in COPIES and {block.where for block in taken} > {"gpu"}:
            other = next(block for block in taken if block.where != "gpu")
            if other.where == "host" or not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                gpu._host_waits_for(args[0], f"copy, {other.where}")
        return out


class _Functions(TorchFunctionMode):
    """Tracks in one thread what kernels do not show: tensors that are created on the host or copied there."""

    def __init__(self, gpu: RacyGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, kwargs or {}
        if func in TO_HOST and gpu.holds(args[0]):
            if func is torch.Tensor.cpu:
                return gpu.to_host(args[0])
            if func is torch.Tensor.numpy:
                raise TypeError("numpy() of a tensor on a GPU")
            gpu._host_waits_for(args[0], TO_HOST[func])
        out = func(*args, **kwargs)
        on_gpu = isinstance(kwargs.get("device"), torch.device)
        if func in MADE_BY_SIZE and not on_gpu:
            gpu.put(out, "host")
        if (func in MADE_OF_NUMBERS and on_gpu) or (func is torch.Tensor.new_tensor and gpu.holds(args[0])):
            gpu.put(out, "gpu")
            gpu._host_waits_for(out, "tensor of numbers")
        return out


# -- Horovod ------------------------------------------------------------------------------------------------------


class ProcessSet:
    """Horovod's process set."""

    def __init__(self, ranks: Sequence[int], number: int = 0) -> None:
        self.ranks, self.process_set_id = list(ranks), number

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


class _Part:
    """A rank's part of a collective: its input and, when all ranks have submitted theirs, its result.

    Args:
        out: memory for the result; None: Horovod allocates it on the default stream.
        splits: number of rows for each rank, in an alltoall.
    """

    def __init__(
        self, gpu: RacyGpu, tensor: torch.Tensor, out: torch.Tensor | None, splits: Sequence[int] = ()
    ) -> None:
        self.rank, self.tensor, self.out, self.splits = gpu.rank, tensor, out, splits
        self.ready = gpu.current_stream(CPU).record_event() if gpu.holds(tensor) else None
        gpu.waits_for_all += self.ready is not None and gpu.current_stream(CPU) is not gpu.engine_stream(CPU)
        gpu.host_touches(tensor, writes=True)
        self.done: Event | None = None
        self.result: Any = None
        self.complete = False


Combine = Callable[[list[_Part]], list[torch.Tensor]]


class FakeHorovod:
    """``horovod.torch`` and its ``mpi_ops``, as ``HorovodCollectives`` uses them, for ranks that are threads. What a
    collective does with a rank's tensors is a kernel on that rank's NCCL stream."""

    Sum, Max, Min = "sum", "max", "min"

    def __init__(self, gpu: RacyGpu, size: int) -> None:
        self._gpu, self._size = gpu, size
        self.global_process_set = ProcessSet(range(size))
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._open: dict[str, dict[int, _Part]] = {}
        self._parts: dict[int, _Part] = {}

    def is_initialized(self) -> bool:
        return True

    def rank(self) -> int:
        return self._gpu.rank

    def size(self) -> int:
        return self._size

    def allreduce_async_(self, tensor: torch.Tensor, **how: Any) -> int:
        return self._allreduce(tensor, tensor, **how)

    def allreduce_async(self, tensor: torch.Tensor, **how: Any) -> int:
        return self._allreduce(tensor, torch.empty_like(tensor), **how)

    def _allreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        op: str,
        name: str,
        process_set: ProcessSet | None = None,
        postscale_factor: float = 1.0,
    ) -> int:
        def combine(parts: list[_Part]) -> list[torch.Tensor]:
            stacked = torch.stack([part.tensor for part in parts])
            total = stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0)
            return [total if postscale_factor == 1.0 else total * postscale_factor] * len(parts)

        return self._join(name, process_set, _Part(self._gpu, tensor, out), combine)

    def broadcast_async_(self, tensor: torch.Tensor, root: int, name: str, process_set: ProcessSet) -> int:
        place = process_set.ranks.index(root)
        part = _Part(self._gpu, tensor, tensor)
        return self._join(name, process_set, part, lambda parts: [parts[place].tensor.clone()] * len(parts))

    def allgather_async(self, tensor: torch.Tensor, name: str, process_set: ProcessSet | None = None) -> int:
        part = _Part(self._gpu, tensor, None)
        return self._join(name, process_set, part, lambda parts: [torch.cat([p.tensor for p in parts])] * len(parts))

    def alltoall_async(self, tensor: torch.Tensor, name: str, process_set: ProcessSet) -> int:
        splits = [len(tensor) // process_set.size()] * process_set.size()
        return self._join(name, process_set, _Part(self._gpu, tensor, None, splits), _deal)

    def _alltoall_async(
        self, tensor: torch.Tensor, counts: torch.Tensor, result: Any, received: Any, name: str, ranks: ProcessSet
    ) -> int:
        return self._join(name, ranks, _Part(self._gpu, tensor, None, counts.tolist()), _deal)

    def poll(self, number: int) -> bool:
        part = self._parts[number]
        if part.complete and part.done is not None and not streams.EARLY:
            part.done.query()
        return part.complete

    def synchronize(self, number: int) -> Any:
        return self._parts.pop(number).result

    def _join(self, name: str, process_set: ProcessSet | None, part: _Part, combine: Combine) -> int:
        """Submit a rank's part; the last one completes all."""
        ranks = (process_set or self.global_process_set).ranks
        with self._lock:
            meeting = self._open.setdefault(name, {})
            assert part.rank not in meeting, f"rank {part.rank} submitted {name} twice"
            meeting[part.rank] = part
            self._parts[number := next(self._numbers)] = part
            if len(meeting) == len(ranks):
                del self._open[name]
                parts = [meeting[rank] for rank in ranks]
                with _disable_current_modes():
                    for one, result in zip(parts, combine(parts), strict=True):
                        self._deliver(one, result, name, [p.splits[ranks.index(one.rank)] for p in parts if p.splits])
        return number

    def _deliver(self, part: _Part, result: torch.Tensor, name: str, counts: list[int]) -> None:
        gpu = self._gpu
        with gpu.streams_of(part.rank):
            nccl, default = gpu.stream("NCCL's"), gpu.default_stream(CPU)
            if part.out is None:
                with gpu.on(default):
                    out = gpu.put(result.clone(), "host" if part.ready is None else "gpu")
            else:
                out = part.out
                out.data.copy_(result)
            if part.ready is not None:
                nccl.wait_event(part.ready)
                sent, received = gpu.number(part.tensor), gpu.number(out)
                gpu.launch(nccl, name, {sent}, {received}, {sent: ["sent"], received: ["received"]})
                part.done = nccl.record_event()
                if streams.EARLY:
                    default.wait_event(part.done)
            part.result = (out, torch.tensor(counts, dtype=torch.int32)) if counts else out
            part.complete = True


def _deal(parts: list[_Part]) -> list[torch.Tensor]:
    """Return the rows for each rank."""
    rows = [part.tensor[: sum(part.splits)].split(list(part.splits)) for part in parts]
    return [torch.cat([sent[place] for sent in rows]) for place in range(len(parts))]


class FakeCollectives(collectives.HorovodCollectives):
    """``HorovodCollectives`` of a rank that is a thread."""

    def __init__(self, gpu: RacyGpu, memory: MemoryCollectives) -> None:
        with gpu.streams_of(memory.rank):
            super().__init__()
        self.host, self._gpu = memory.host, gpu
        self._thread = contextlib.ExitStack()

    def start(self, wake: Callable[[], None]) -> None:
        self._thread.enter_context(self._gpu.thread_of(self.rank))
        super().start(wake)

    def stop(self) -> None:
        super().stop()
        self._thread.close()


@contextlib.contextmanager
def racy_cluster(size: int, patch: Any) -> Iterator[tuple[RacyGpu, Cluster]]:
    """Yield a fake GPU that is installed, and ranks that use it; ``patch`` is pytest's monkeypatch."""
    gpu = RacyGpu()
    horovod = FakeHorovod(gpu, size)
    patch.setattr(collectives, "hvd", horovod)
    patch.setattr(collectives, "mpi_ops", horovod)
    with gpu.installed():
        yield gpu, Cluster(size, wrap=lambda memory: FakeCollectives(gpu, memory))
