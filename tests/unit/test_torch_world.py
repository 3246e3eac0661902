"""Private process groups: their ranks meet again each time, reuse memory of what they received, and name who ended."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from hvd_async.runtime.launch import Launch, Seat, place_of
from hvd_async.torch import streams, torch_collectives
from hvd_async.torch.distributed import collectives, world
from hvd_async.torch.distributed.calls import OPERATIONS, Call, Calls
from hvd_async.torch.distributed.collectives import gather_objects, gathered
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.torch_collectives import TorchCollectives

PLACE = place_of(0, [Seat("a")])


def test_a_group_of_the_same_name_finds_no_addresses_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is started again makes its groups again; ranks that came first would connect to closed ports."""
    stores: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda store, *arguments: stores.append(store))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    ranks = world.World()
    ranks.group("engine.x", [0])
    stores[0].set("0", "an address")
    ranks.group("engine.x", [0])
    assert stores[0].check(["0"])
    assert not stores[1].check(["0"])


def test_received_rows_reuse_the_memory_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the receiver refers to them, not even a reference cycle: fresh memory costs more than the copy."""

    def begin(tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda limit: None, tensors=tensors)  # (as Gloo's works do)

    group = SimpleNamespace(send=begin, recv=begin)
    ranks = SimpleNamespace(rank=0, size=2, place=PLACE, group=lambda *_: group, close=lambda _: None)
    monkeypatch.setattr(world, "current", lambda: ranks)
    own, memory, done, addresses = TorchCollectives(), ReusedMemory(most=4), threading.Semaphore(0), set()
    own.start(done.release)
    for number in range(20):
        into = memory.empty(1 << 16, torch.device("cpu")).view(1, -1)
        addresses.add(into.data_ptr())
        handle = own.alltoall(torch.empty_like(into), [0, 1], [0, 1], f"exchange.{number}", into=into)
        assert done.acquire(timeout=30)
        handle.result()
    own.stop()
    assert len(addresses) <= 4, "one of this exchange, one of the last, and some between the two"


Open = Callable[[int, int], Calls]


@pytest.fixture
def open_calls(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A function that opens a rank's calls; ranks are threads."""
    here, store = threading.local(), HashStore()
    monkeypatch.setattr(world, "current", lambda: here.world)
    monkeypatch.setattr(world, "_to_sweep", [])  # (the keys of the last test's store have the names of this one's)

    def opened(rank: int, size: int) -> Calls:
        here.world = own = object.__new__(world.World)
        own.rank, own.store, own._made, own._groups = rank, PrefixStore("", store), Counter(), {}
        own._shared, own._prefix = store, ""
        return Calls("calls.0", range(size))

    return opened


def two_ranks(open_calls: Open, call: Callable[[Calls], Any]) -> list[Any]:
    """The results of a call of two ranks' collectives, errors as text; afterwards the calls still match."""
    with ThreadPoolExecutor() as ranks:
        each = list(ranks.map(lambda rank: open_calls(rank, 2), range(2)))

        def called(calls: Calls) -> Any:
            try:
                return call(calls)
            except (world.HorovodInternalError, ValueError) as error:
                return f"{type(error).__name__}: {error}"

        found = list(ranks.map(called, each))
        assert list(ranks.map(lambda calls: gather_objects(calls, calls.place), each)) == [[0, 1], [0, 1]]
        for calls in each:
            calls.close()
    return found


def allreduce(name: str = "x", dtype: str = "float32", shapes: list[list[int]] | None = None, op: str = "Sum") -> Call:
    """A call as ``hvd.allreduce`` makes it."""
    return Call("allreduce", name, dtype, shapes or [[2]], {"op": op})


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1"),
    [
        (allreduce(), allreduce(name="y")),
        (allreduce(), allreduce(dtype="float64")),
        (allreduce(), allreduce(shapes=[[2, 1]])),
        (allreduce(), allreduce(op="Min")),
        (allreduce(shapes=[[2]] * 400), allreduce(shapes=[[2]] * 399 + [[3]])),
        (Call("broadcast", options={"root_rank": 0}), Call("broadcast", options={"root_rank": 1})),
        (Call("allgather", "x", "uint8", [[2, 3]]), Call("allgather", "x", "uint8", [[2, 4]])),
        (Call("allgather", "x", "uint8", [[2]]), Call("barrier")),
    ],
)
def test_a_mismatch_is_an_error_of_all_ranks_that_names_both_calls(
    open_calls: Open, of_rank_0: Call, of_rank_1: Call
) -> None:
    each = [of_rank_0, of_rank_1]
    found = two_ranks(open_calls, lambda calls: calls.begin(each[calls.place], lambda everyones: ()).wait())
    expected = f"the ranks call different collectives: rank 0 calls {of_rank_0}, rank 1 calls {of_rank_1}. All ranks"
    assert [one.startswith(f"HorovodInternalError: {expected}") for one in found] == [True, True], found


@pytest.mark.parametrize("unsendable", [threading.Lock(), (one for one in ())])
def test_an_object_that_cannot_be_pickled_is_an_error_of_all_ranks(open_calls: Open, unsendable: Any) -> None:
    found = two_ranks(open_calls, lambda calls: gather_objects(calls, unsendable if calls.place else 0))
    assert [one[:54] for one in found] == ["ValueError: rank 1 cannot send its object, since pickl"] * 2


def test_torchs_default_device_does_not_matter(open_calls: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "calls_of", lambda calls: calls)
    own, sparse = torch.ones(2), torch.ones(2).to_sparse()

    def call(calls: Any) -> Any:
        with torch.device("meta"):
            if calls.place:
                calls.begin(allreduce(), lambda everyones: calls.reduced([own], OPERATIONS.index("Sum"))).wait()
            calls.join()
            summed = collectives.sparse_allreduce_async(sparse, "x", collectives.Sum, calls)()
            _, counts = collectives.alltoall(sparse.values(), [1, 1], None, calls)
            return summed.to_dense().tolist(), counts.tolist()

    assert two_ranks(open_calls, call) == [([2.0, 2.0], [1, 1])] * 2
    assert own.tolist() == [1.0, 1.0]


def test_what_begins_later_ends_later(open_calls: Open) -> None:
    """Asynchronous calls run one at a time: no rank mixes up the steps of two of them."""

    def several(calls: Calls) -> Any:
        rows = torch.arange(3 + calls.place, dtype=torch.uint8)
        sizes = [3, 4]
        begin = [functools.partial(lambda own, _: gathered(calls, own, sizes), rows + i) for i in range(20)]
        handles = [calls.begin(Call("allgather"), run) for run in begin]
        last = handles[-1].wait().tolist()
        return [one.done() for one in handles], last

    expected = [19, 20, 21, 19, 20, 21, 22]
    assert two_ranks(open_calls, several) == [([True] * 20, expected)] * 2


def test_a_collective_that_others_do_not_call_ends_with_the_shutdown(open_calls: Open) -> None:
    with ThreadPoolExecutor() as ranks:
        first, _ = ranks.map(lambda rank: open_calls(rank, 2), range(2))
    announced = first.begin(Call("barrier", "alone"), lambda everyones: ())
    assert not announced.done()
    first.close()
    with pytest.raises(world.HorovodInternalError, match=r"hvd\.shutdown\(\) has ended barrier 'alone'"):
        announced.wait()


def test_the_rank_that_has_ended_is_found_and_no_other(open_calls: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is blamed where all ranks fail alike; a rank that ends after it has found another one is not blamed."""
    monkeypatch.setattr(world, "TRIED_FOR", 0.0)

    def refused(calls: Calls) -> Any:
        def steps(everyones: list[Call]) -> Any:
            raise RuntimeError("Invalid scalar type")
            yield

        return calls.begin(Call("allreduce"), steps).wait()

    assert two_ranks(open_calls, refused) == ["HorovodInternalError: allreduce has failed: Invalid scalar type"] * 2
    own = [world.Doors("a") for _ in range(3)]
    for one in own:
        one.all = [each.own for each in own]
    with ThreadPoolExecutor(1) as thread:  # (a rank of the job, which has the store)
        thread.submit(open_calls, 0, 1).result().close()
        assert thread.submit(own[0].lost).result() is None
        own[2].close()
        assert thread.submit(own[0].lost).result() == 2
        own[1].close()
        assert thread.submit(own[0].lost).result() == 2
    own[0].close()


# -- meeting in a store --------------------------------------------------------------------------------------------


class Noticed:
    """A store that tells when a key is set."""

    def __init__(self, store: Any, key: str) -> None:
        self.get, self.check, self._store, self._key, self.noticed = (
            store.get,
            store.check,
            store,
            key,
            threading.Event(),
        )

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        if key == self._key:
            self.noticed.set()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_meet_those_of_their_own_attempt(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted job finds what ranks that have ended have left in the store: one whole attempt, and one of rank 1
    alone. Whichever comes first lists, or signs, without harm."""
    monkeypatch.setattr(world, "PrefixStore", lambda prefix, store: store)
    store, never = HashStore(), time.monotonic() + 60

    def roll(rank: int) -> tuple[str, list[Seat]]:
        return world._roll(store, Launch(rank, 2, local_rank=rank), never)

    with ThreadPoolExecutor() as ranks:
        before = list(ranks.map(roll, range(2)))
        assert before[0] == before[1]
        store.set("card/1", json.dumps(["of a rank that has ended", *Seat("elsewhere")]))
        early = Noticed(store, "list" if first == 0 else "card/1")
        one = ranks.submit(world._roll, early, Launch(first, 2, local_rank=first), never)
        assert early.noticed.wait(60)
        other = roll(1 - first)
    assert one.result() == other
    assert other[0] != before[0][0]
    assert [seat.local_rank for seat in other[1]] == [0, 1]


def test_ranks_that_do_not_come_are_named() -> None:
    store, now = HashStore(), time.monotonic()
    with pytest.raises(world.HorovodInternalError, match=r"ranks 1, 2 did not call hvd.init\(\) within 300 s"):
        world._roll(store, Launch(0, 3), now)


# -- meeting before NCCL connects ----------------------------------------------------------------------------------


LONG = timedelta(seconds=30.0)


def rank_of(number: int, store: HashStore) -> world.World:
    """A rank that shares a store with others."""
    made: world.World = object.__new__(world.World)
    made.rank, made.store = number, PrefixStore("job", store)
    return made


def test_ranks_meet_or_none_of_them_does():
    store, both = HashStore(), [0, 1]
    with ThreadPoolExecutor() as pool:
        met = [pool.submit(rank_of(rank, store).meet, PrefixStore("a", store), both, LONG) for rank in both]
        assert [one.result() for one in met] == [None, None]
    alone = PrefixStore("b", store)
    with pytest.raises(world.HorovodInternalError, match=r"rank 1 did not join .* within 0 s"):
        rank_of(0, store).meet(alone, both, timedelta(seconds=0.01))
    with pytest.raises(world.HorovodInternalError, match="did not join"):  # (else it would wait in NCCL without end)
        rank_of(1, store).meet(alone, both, LONG)


def test_a_lost_store_is_an_error_of_the_job():
    def check(keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    lost: Any = SimpleNamespace(set=lambda *_: None, check=check)
    with pytest.raises(world.HorovodInternalError, match="store was lost"):
        rank_of(0, HashStore()).meet(lost, [0, 1], LONG)


def test_collectives_start_in_order_only_where_tensors_can_be_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """(torch's usual wheel for Linux has NCCL, whether there is a GPU or not.)"""
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(rank=0, size=2, place=PLACE))
    monkeypatch.setattr(streams, "gpu", SimpleNamespace(has_nccl=True))
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert TorchCollectives().in_order is has_gpu


SET_BY_USERS = {"BLOCKING_WAIT": "1", "ASYNC_ERROR_HANDLING": "3", "DESYNC_DEBUG": "1"}


@pytest.mark.parametrize("close", ["abort", "_shutdown"])  # (the latter up to torch 2.5)
def test_on_gpus_all_collectives_share_a_group_that_is_aborted_at_the_end(
    monkeypatch: pytest.MonkeyPatch, close: str
) -> None:
    made: list[str] = []
    set_by_users = {f"TORCH_NCCL_{name}": value for name, value in SET_BY_USERS.items()}

    def settings() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}

    def group(store: Any, rank: int, size: int, options: Any) -> Any:
        assert settings() == dict.fromkeys([*set_by_users, "TORCH_NCCL_ENABLE_MONITORING"], "0")
        assert levels[-1] == dist.DebugLevel.INFO  # (DETAIL would let torch end the process)
        made.append("made")
        return SimpleNamespace(**{close: lambda: made.append("closed")})

    nccl: Any = group
    nccl.Options = SimpleNamespace
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    ranks = SimpleNamespace(rank=1, size=2, place=PLACE, store_of=lambda *_: None, close=made.extend)
    ranks.meet = lambda *_: made.append("met")
    monkeypatch.setattr(world, "current", lambda: ranks)
    for name, value in set_by_users.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    levels = [dist.DebugLevel.DETAIL]
    monkeypatch.setattr(torch_collectives, "get_debug_level", lambda: levels[-1])
    monkeypatch.setattr(torch_collectives, "set_debug_level", levels.append)
    own = TorchCollectives()
    groups = {id(own._group(name, None, on_gpu=True)) for name in ("eager.0.1.2", "gossip.0.3", "end.0.sum")}
    own.stop()
    assert (settings(), levels[-1]) == (set_by_users, dist.DebugLevel.DETAIL)
    assert len(groups) == 1
    assert made == ["met", "made", "closed"]
