"""torch on a GPU, without one: CPU tensors on fake streams, checked by torch's CUDA sanitizer (``races``)."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.eager.gradient_format import Tail
from hvd_async.algorithms.gossip.adpsgd import ADPSGDWorker, State
from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.testing import Cluster, MemoryCollectives
from hvd_async.torch import gradient_format, streams, tensor_collectives
from hvd_async.torch import horovod_collectives as collectives
from hvd_async.torch.gradient_replica import FIRST_STEPS
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.weight_replica import TorchMessageFormat
from tests.conformance import fake_gpu
from tests.conformance.fake_gpu import LateCollectives
from tests.conformance.leader_drive import wait_for_pulls
from tests.conformance.races import CPU, RacyGpu, racy_cluster
from tests.conformance.torch_ranks import TINY, batch, conv_model
from tests.conftest import LONG_RUN

STEPS = 4
LATER_STEPS = FIRST_STEPS + 4
"""Enough for steps in which gradients are not compared any more."""


class Mode(NamedTuple):
    """An optimizer of this library around SGD with momentum, whose learning rate may be a tensor on the GPU."""

    wrapper: Callable[..., Any]
    options: dict[str, Any]
    rate_on_gpu: bool = False

    def train(self, gpu: RacyGpu, rank: int, steps: int = STEPS) -> list[Counter[tuple[str, str]]]:
        """Train a small model and drain; return the waits of each step."""
        model = conv_model()
        gpu.adopt(*model.parameters())
        rate = torch.tensor(0.05, device=CPU) if self.rate_on_gpu else 0.05
        optimizer = self.wrapper(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), **self.options)
        waits = []
        for step in range(steps):
            images, labels = batch(rank, step)
            gpu.adopt(images, labels)
            before = Counter(gpu.waits)
            optimizer.zero_grad()
            if self.options.get("weighting"):
                optimizer.record_samples(len(images))
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            if self.wrapper is hvd.LeaderOptimizer:
                optimizer.record_loss(loss)
            loss.backward()
            optimizer.step()
            waits.append(gpu.waits - before)
        optimizer.drain()
        return waits


def eager(**options: Any) -> Mode:
    return Mode(hvd.EagerOptimizer, {"bucket_cap_mb": TINY, **options})


def gossip(**options: Any) -> Mode:
    return Mode(hvd.GossipOptimizer, options)


def leader(**options: Any) -> Mode:
    return Mode(hvd.LeaderOptimizer, options)


FP16, BF16, INT8 = hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8
MODES = {
    "all": eager(quorum="all"),
    "solo": eager(quorum="solo"),
    "majority": eager(quorum="majority"),
    "all, fp16": eager(quorum="all", compression=FP16),
    "all, bf16": eager(quorum="all", compression=BF16),
    "solo, fp16, samples": eager(quorum="solo", compression=FP16, weighting="samples"),
    "solo, bf16": eager(quorum="solo", compression=BF16),
    "sgp": gossip(algorithm="sgp"),
    "osgp": gossip(algorithm="osgp"),
    "dpsgd": gossip(algorithm="dpsgd"),
    "adpsgd": gossip(algorithm="adpsgd"),
    "local": gossip(algorithm="local", average_every=2),
    "slowmo": gossip(algorithm="slowmo", average_every=2),
    "diloco": gossip(algorithm="diloco", average_every=2),
    "sgp, fp16": gossip(algorithm="sgp", compression=FP16),
    "dpsgd, int8": gossip(algorithm="dpsgd", compression=INT8),
    "adpsgd, bf16": gossip(algorithm="adpsgd", compression=BF16),
    "local, bf16": gossip(algorithm="local", average_every=2, compression=BF16),
    "diloco, int8": gossip(algorithm="diloco", average_every=2, compression=INT8),
    "lsgd": leader(algorithm="lsgd", group=1, global_period=2),
    "easgd": leader(algorithm="easgd", global_period=2),
}


class Setting(NamedTuple):
    """How a GPU is used.

    Attributes:
        queued: Horovod calls a collective done when it is queued.
        staged: tensors travel by way of the CPU.
        own_stream: the training thread uses another stream than the default one.
    """

    queued: bool = False
    staged: bool = False
    own_stream: bool = False


SETTINGS = {
    "plain": Setting(),
    "queued": Setting(queued=True, own_stream=True),
    "queued, default stream": Setting(queued=True),
    "staged": Setting(staged=True),
    "own stream": Setting(own_stream=True),
}


def run(
    mode: Mode, ranks: int, patch: pytest.MonkeyPatch, setting: Setting = SETTINGS["plain"], steps: int = STEPS
) -> tuple[RacyGpu, Any]:
    """Train on ``ranks`` ranks; return the GPU with what it found, and the results of ``train``."""
    patch.setattr(streams, "EARLY", setting.queued)
    patch.setenv("HVD_ASYNC_STAGE", str(int(setting.staged)))

    def train(rank: int) -> Any:
        with gpu.thread_of(rank):
            own = gpu.on(gpu.stream("user's")) if setting.own_stream else contextlib.nullcontext()
            with own:
                return mode.train(gpu, rank, steps)

    with racy_cluster(ranks, patch) as (gpu, cluster):
        waits = cluster.run(train)
        gpu.collect()
    return gpu, waits


# -- the modes ----------------------------------------------------------------------------------------------------

CASES = [f"{mode}: queued" for mode in MODES]
CASES += [f"{mode}: plain" for mode in MODES if LONG_RUN or ", " not in mode or "samples" in mode]
CASES += [f"{mode}: staged" for mode in ("all, fp16", "solo, bf16", "sgp", "adpsgd", "lsgd")]
CASES += [f"{mode}: own stream" for mode in ("solo, fp16, samples", "sgp")]
CASES += [f"{mode}: queued, default stream" for mode in ("solo, fp16, samples", "sgp")]


@pytest.mark.parametrize("case", CASES)
def test_kernels_on_shared_memory_are_in_order(case, monkeypatch):
    mode, setting = case.split(": ")
    gpu, _ = run(MODES[mode], 2, monkeypatch, SETTINGS[setting])
    assert not gpu.errors


BEHIND = dict.fromkeys(["all", "all, fp16", "sgp", "osgp", "dpsgd", "lsgd"], "")
BEHIND |= {"solo": "zeros", "adpsgd": "mul", "local": "mul", "diloco": "mul"}
"""By mode, an engine's operators behind work that the training thread has queued: an empty gradient, once; AD-PSGD's
before its first step; averages, for which the training thread waits."""


@pytest.mark.parametrize("mode", BEHIND)
def test_what_an_engine_sends_waits_for_nothing_but_its_own_vectors(mode, monkeypatch):
    gpu, _ = run(MODES[mode], 2, monkeypatch)
    assert {name.partition("::")[2] for name in +gpu.behind_training} <= {*BEHIND[mode].split()}
    # (How many exchanges of AD-PSGD a drain needs depends on who is quicker.)
    assert gpu.waits_for_all <= (0 if "quorum" in MODES[mode].options else 2 * STEPS), "more than at the drain"


# -- the host's waits ---------------------------------------------------------------------------------------------

BUCKETS = PARAMETERS = 4
"""Number of parameters of the model, each in a bucket of its own."""


def waited(waits: Counter[tuple[str, str]], rank: int, thread: str) -> int:
    return sum(n for (name, _), n in waits.items() if name == f"rank {rank}'s {thread} thread")


@pytest.mark.parametrize("mode", [mode for mode in MODES if ", " not in mode])
def test_the_host_waits_as_often_as_docs_gpu_says(mode, monkeypatch):
    """With one rank, which gets no messages: the engine alone waits, once for each bucket."""
    gpu, ((*_, before, last),) = run(MODES[mode], 1, monkeypatch, steps=LATER_STEPS)
    assert not gpu.errors
    assert waited(before + last, 0, "training") == waited(before + last, 0, "autograd") == 0
    assert waited(gpu.waits, 0, "engine") == (BUCKETS * LATER_STEPS if "quorum" in MODES[mode].options else 0)


@pytest.mark.parametrize("mode", ["all", "solo"])
def test_the_host_waits_for_fingerprints_in_the_first_steps_alone(mode, monkeypatch):
    _, ((first, *waits),) = run(MODES[mode], 1, monkeypatch, steps=LATER_STEPS)
    assert not [what for _, what in first if what == "aten::equal"], "gradients leave early from the second step on"
    compared = [sum(n for (_, what), n in each.items() if what == "aten::equal") for each in waits]
    assert compared == [BUCKETS] * FIRST_STEPS + [0] * (LATER_STEPS - 1 - FIRST_STEPS)


@pytest.mark.parametrize("mode", ["all", "solo", "sgp", "lsgd"])
def test_a_learning_rate_on_the_gpu_is_not_read_in_a_step(mode, monkeypatch):
    _, ((*_, before, last),) = run(MODES[mode]._replace(rate_on_gpu=True), 1, monkeypatch, steps=LATER_STEPS)
    assert waited(before + last, 0, "training") == 2 * PARAMETERS, "SGD reads it for each, with or without us"


@pytest.mark.parametrize("mode", ["sgp", "osgp", "dpsgd, int8"])
def test_the_engine_waits_once_a_message(mode, monkeypatch):
    gpu, _ = run(MODES[mode], 2, monkeypatch)
    for rank in range(2):
        assert STEPS <= waited(gpu.waits, rank, "engine") <= STEPS + 1, "a drain may bring one more"


# -- planted faults -----------------------------------------------------------------------------------------------


def plant(patch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Change one place in a function's source, wherever the function has been imported."""
    function = inspect.unwrap(function)
    source, scope = textwrap.dedent(inspect.getsource(function)), dict[str, Any]()
    assert source.count(old) == 1, f"{old!r} is not in {function.__qualname__} once"
    exec(compile(source.replace(old, new), "planted", "exec"), function.__globals__, scope)
    patch.setattr(function, "__code__", inspect.unwrap(scope[function.__name__]).__code__)


class Engine:
    """A fake engine that runs each posted action immediately, on its own stream."""

    def __init__(self, gpu: RacyGpu) -> None:
        self._gpu, self._stream = gpu, gpu.default_stream(CPU)

    def call_soon(self, action: Callable[[], Any]) -> None:
        with self._gpu.on(self._stream):
            action()
            self._stream = self._gpu.current_stream(CPU)


Scenario = Callable[[RacyGpu], None]


def ones() -> torch.Tensor:
    return torch.ones(3, device=CPU)


def a_vector_is_read_next_to_training(gpu: RacyGpu) -> None:
    vector = streams.record_ready(ones())
    with streams.on_engine_stream_after(vector):
        double = vector * 2
    streams.use_here(double).sum()


def a_vector_is_changed_before_it_is_read(gpu: RacyGpu) -> None:
    vector = streams.record_ready(ones())
    vector += 1
    with streams.on_engine_stream_after(vector):
        vector.sum()


def a_vector_is_freed_whose_stream_was_left(gpu: RacyGpu) -> None:
    with gpu.on(gpu.stream("first")):
        vector = streams.record_ready(ones())
    with streams.on_engine_stream_after(vector):
        vector.sum()


def a_result_is_freed_that_was_made_elsewhere(gpu: RacyGpu) -> None:
    result = ones()
    gpu.default_stream(CPU).record_event().query()  # (the host has seen that its collective is done)
    with gpu.on(gpu.stream("user's")):
        streams.record_received(result).sum()


def a_number_is_read_later(gpu: RacyGpu) -> None:
    streams.Later(ones().sum()).numbers()


def a_late_gradient_is_added(gpu: RacyGpu) -> None:
    parameter = torch.nn.Parameter(ones())
    layout, compression = gradient_format.Layout([parameter]), hvd.Compression.none
    wire = gradient_format.make_wire(layout, compression, Tail(), RankGroup(None, (0,), 0, 0, 1))
    pending = streams.record_ready(torch.ones(4, device=CPU))
    with gpu.on(gpu.stream("another")):
        late = streams.record_ready(torch.ones(4, device=CPU))
    with gpu.on(gpu.stream("engine's current")):
        total = wire.add(pending, late)
        del pending, late
        with streams.on_engine_stream_after(total):
            total.sum()


def the_engine_works_after_training(gpu: RacyGpu) -> None:
    engine = Engine(gpu)
    with gpu.on(gpu.stream("user's")):
        vector = ones()
        streams.bind_training_stream(engine, [vector])
        engine.call_soon(vector.sum)


def training_goes_to_another_stream(gpu: RacyGpu) -> None:
    engine, vector = Engine(gpu), ones()
    for name in ("first", "second"):
        stream = gpu.stream(name)
        stream.wait_stream(gpu.default_stream(CPU))
        with gpu.on(stream):
            streams.bind_training_stream(engine, [vector])
        engine.call_soon(lambda: vector.add_(1))


def a_neighbours_weights_come_after_a_step(gpu: RacyGpu) -> None:
    post = TorchMessageFormat(ones(), ReusedMemory(1), compression="none", messages=1)
    own, theirs, shadow = (streams.record_ready(ones()) for _ in range(3))
    post.mark(shadow.add_(1))
    rank: Any = SimpleNamespace(_mine={0: own}, _shares={0: 0.5}, _post=post, _state=State(shadow, shadow))
    rank._lock, rank._note, rank._pairing = threading.Lock(), lambda *_: None, SimpleNamespace(averaged=lambda: None)
    rank._averagings = rank._taken = 0
    ADPSGDWorker._deliver(rank, 1, 0, 1.0, theirs)


RACE, FREED, EARLY = "race: ", "freed too early", "pinned memory too early"
WAITS_FOR_ALL = "waits for all"


class Fault(NamedTuple):
    """A call that is removed, and a run in which this is found.

    Attributes:
        shows: a scenario, or one of ``CASES``.
        finds: part of the error that is found.
        new: what stands there instead.
    """

    function: Callable[..., Any]
    old: str
    shows: Scenario | str
    finds: str = RACE
    new: str = "pass"


EVENT = "gpu.record(vector.device)"
LATE = "streams.on_engine_stream_after(total, late)"
APART = "self._post.apart(self._state.shadow, own, data)"
WITHIN = "with streams.on_engine_stream{}:\n            cut"
AFTER, WIRE = streams._on_engine_stream_after, gradient_format.make_wire
FAULTS = [
    Fault(streams.record_ready, f"_mark(vector, {EVENT})", "all: plain", WAITS_FOR_ALL),
    Fault(streams.record_received, "current.wait_event(event)", "lsgd: queued"),
    Fault(
        streams.record_received,
        "gpu.default_stream(tensor.device).record_event() if EARLY else None",
        "all, fp16: queued",
        new="None",
    ),
    Fault(
        streams.record_received, "gpu.record_stream(tensor, current)", a_result_is_freed_that_was_made_elsewhere, FREED
    ),
    Fault(streams.record_received, "_mark(tensor, event)", "all, fp16: queued"),
    Fault(AFTER, "own.wait_stream(gpu.current_stream(vector.device))", a_vector_is_changed_before_it_is_read),
    Fault(AFTER, "version != vector._version", a_vector_is_changed_before_it_is_read, new="version is None"),
    Fault(AFTER, "own.wait_event(event)", a_vector_is_read_next_to_training),
    Fault(AFTER, "gpu.record_stream(vector, own)", a_vector_is_freed_whose_stream_was_left, FREED),
    Fault(AFTER, "gpu.record_stream(vector, gpu.default_stream(vector.device))", "all, bf16: queued", FREED),
    Fault(streams.on_engine_stream, "gpu.current_stream(device).wait_stream(own)", a_vector_is_read_next_to_training),
    Fault(streams.on_engine_stream, "gpu.on(own)", "all: plain", WAITS_FOR_ALL, "contextlib.nullcontext()"),
    Fault(
        streams.use_here,
        "gpu.record_stream(tensor, gpu.current_stream(tensor.device))",
        a_vector_is_read_next_to_training,
        FREED,
    ),
    Fault(streams.copy_to_host, "own.wait_stream(gpu.default_stream(tensor.device))", "sgp: queued"),
    Fault(streams.Later.numbers, "self._copied.synchronize()", a_number_is_read_later, EARLY),
    Fault(streams.bind_training_stream, "engine.call_soon(lambda: _follow(others))", the_engine_works_after_training),
    Fault(streams._follow, "stream.wait_stream(gpu.current_stream(stream.device))", training_goes_to_another_stream),
    Fault(streams._follow, "gpu.set_stream(stream)", the_engine_works_after_training),
    Fault(
        ADPSGDWorker._deliver,
        APART,
        a_neighbours_weights_come_after_a_step,
        new=APART.replace("self._state.shadow, ", ""),
    ),
    Fault(
        collectives.HorovodCollectives._start,
        "streams.on_engine_stream_after(tensor)",
        "all: plain",
        WAITS_FOR_ALL,
        "streams._NOTHING",
    ),
    Fault(tensor_collectives.Staged.done, "if not self._copied.query():", "sgp: staged", EARLY, "if False:"),
    Fault(
        tensor_collectives.Staged.__init__,
        "streams.on_engine_stream_after(tensor)",
        "sgp: staged",
        new="streams.on_engine_stream(tensor.device)",
    ),
    Fault(
        tensor_collectives.Staged.result, "streams.record_received(self._result)", "sgp: staged", FREED, "self._result"
    ),
    Fault(WIRE, WITHIN.format("_after(vector)"), "all, fp16: plain", new=WITHIN.format("(vector.device)")),
    Fault(WIRE, "streams.record_ready(compressed)", "all, fp16: plain", WAITS_FOR_ALL, "compressed"),
    Fault(WIRE, LATE, a_late_gradient_is_added, new=LATE.replace(", late", "")),
    Fault(WIRE, LATE, a_late_gradient_is_added, new=LATE.replace("total, ", "")),
    Fault(WIRE, f"with {LATE}:", a_late_gradient_is_added, new="if True:"),
    Fault(WIRE, "streams.record_ready(total)", a_late_gradient_is_added, WAITS_FOR_ALL, "total"),
    Fault(WIRE, "streams.use_here(decompressed)", "all, fp16: plain", FREED, "decompressed"),
]


def complaints(shows: Scenario | str, patch: pytest.MonkeyPatch) -> list[str]:
    """Return what the detector finds in a scenario, or in a mode with two ranks."""
    if isinstance(shows, str):
        mode, setting = shows.split(": ")
        gpu, _ = run(MODES[mode], 2, patch, SETTINGS[setting])
    else:
        gpu = RacyGpu()
        with gpu.installed(), gpu.thread_of(0):
            shows(gpu)
            gpu.collect()
    return gpu.errors + [WAITS_FOR_ALL] * (gpu.waits_for_all > 0)


@pytest.mark.parametrize(
    "scenario", dict.fromkeys(fault.shows for fault in FAULTS if callable(fault.shows)), ids=lambda one: one.__name__
)
def test_without_a_fault_nothing_is_found_in_a_scenario(scenario, monkeypatch):
    found = {fault.finds for fault in FAULTS if fault.shows == scenario}
    assert not [line for line in complaints(scenario, monkeypatch) if any(finds in line for finds in found)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.function.__qualname__}: {fault.old}")
def test_a_planted_fault_is_found(fault, monkeypatch):
    plant(monkeypatch, fault.function, fault.old, fault.new)
    complained = complaints(fault.shows, monkeypatch)
    assert [line for line in complained if fault.finds in line], complained


def test_every_wait_of_streams_has_a_planted_fault():
    source = inspect.getsource(streams).partition("gpu = Gpu()")[2]
    waits = re.findall(r".*\.(?:wait_stream|wait_event|record_stream|synchronize|set_stream|call_soon)\(.*", source)
    planted = {fault.old for fault in FAULTS}
    assert [line for line in waits if not any(old in line for old in planted)] == []
    assert len(waits) == 13


# -- weights that are not finite, where nothing waits for that -------------------------------------------------------


SPREADS = ("sgp", "osgp", "dpsgd", "adpsgd", "local", "slowmo", "diloco", "sgp, fp16", "dpsgd, int8", "lsgd", "easgd")
BAD = 4
"""The first step that makes NaN, in which outer optimizers enter an average."""
WEIGHTS = sum(parameter.nbytes for parameter in conv_model().parameters())


class Watched(LateCollectives):
    """Collectives of a rank that keep what it sends of its own weights, or of their distance to an anchor."""

    sent: list[torch.Tensor]

    def allreduce_sum(self, vector: torch.Tensor, *rest: Any, **more: Any) -> Any:
        self.sent.append(vector + 0)
        return super().allreduce_sum(vector, *rest, **more)

    def broadcast(self, vector: torch.Tensor, root: int, *rest: Any, **more: Any) -> Any:
        if root == self.rank:
            self.sent.append(vector + 0)
        return super().broadcast(vector, root, *rest, **more)

    def alltoall(self, rows: torch.Tensor, splits: list[int], *rest: Any, **more: Any) -> Any:
        if any(splits):
            self.sent.append(rows[0, :WEIGHTS] + 0)
        return super().alltoall(rows, splits, *rest, **more)


def until_it_is_sent(worker: Any, step: int) -> None:
    """Wait until what this step has left has been sent, by an engine that sends it when others ask."""
    if isinstance(worker, ADPSGDWorker):
        worker.engine.wait(lambda: "sent" in [what for what, *_ in worker.log[worker.log.index(("step", step)) :]])
    elif isinstance(worker, LeaderWorker):
        wait_for_pulls(worker, step)


@pytest.mark.parametrize(("ranks", "late"), [(2, True), (3, True), (2, False)], ids=["2 late", "3 late", "at once"])
@pytest.mark.parametrize("mode", SPREADS)
def test_weights_that_are_not_finite_reach_no_other_rank(mode, ranks, late):
    """The last finite ones are sent instead. The rank hears of it, with the step's number, two steps later at most."""
    raises, weights, together = BAD + 2 * late, [0.0] * ranks, threading.Barrier(ranks)
    gpu, sent = fake_gpu.FakeGpu(lags=late), list[torch.Tensor]()
    wrapper, options, _ = MODES[mode]
    if wrapper is hvd.LeaderOptimizer:
        options = options | {"global_period": 1} | ({"group": ranks} if mode == "lsgd" else {})
    elif "average_every" in options:
        options = options | {"max_staleness": 1}
    elif mode == "adpsgd":
        options = options | {"max_local_steps": 1}

    def train(rank: int) -> None:
        model = conv_model()
        if rank == 0:
            start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            sent.append(start if wrapper is hvd.LeaderOptimizer else start.view(torch.uint8))
        optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)
        worker = optimizer._async.worker_now()
        worker.log = []
        for step in range(1, raises + (rank == 0)):
            images, labels = batch(rank, step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            if wrapper is hvd.LeaderOptimizer:
                optimizer.record_loss(float(rank))
            loss.backward()
            if rank == 0 and step >= BAD:
                next(model.parameters()).grad.fill_(torch.nan)
            together.wait(30) if step < raises else None
            optimizer.step()
            if step <= BAD:  # (afterwards no rank may be left)
                until_it_is_sent(worker, step)
            weights[rank] = getattr(optimizer.stats(), "push_sum_weight", 1.0)
            assert rank == 0 or all(torch.isfinite(parameter).all() for parameter in model.parameters())

    def watched(memory: MemoryCollectives) -> MemoryCollectives:
        made = Watched(memory._board, memory.rank, memory.size)
        made.sent = sent if memory.rank == 0 else []
        return made

    with gpu.installed():
        outcome, *others = Cluster(ranks, wrap=watched).outcomes(train, timeout=60)
    assert isinstance(outcome, FloatingPointError), outcome
    assert re.match(f"step {BAD} made weights NaN or infinite", str(outcome))
    assert not [other for other in others if isinstance(other, AssertionError)]
    if mode in ("sgp", "dpsgd"):
        assert sum(weights) == pytest.approx(ranks)
    if late and "average_every" in options and ", " not in mode:
        assert not sent[-1].any(), "who has NaN has not moved"
    elif late and mode not in ("osgp", "sgp, fp16", "dpsgd, int8"):
        assert torch.equal(sent[-1], sent[-2]), "the last finite weights are sent again"
        assert sent[-1].any()
        assert not torch.equal(sent[-1], sent[0]), "not those of the start"
