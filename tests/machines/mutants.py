"""State machines with one fault each, planted in one of their methods: an exploration must find every one."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.eager.rank import EagerWorker, RoundsInFlight
from hvd_async.algorithms.gossip.adpsgd import Pairing
from hvd_async.algorithms.gossip.hosts import HostWorker
from hvd_async.algorithms.gossip.machine import GossipStateMachine, MessageQueues, PairRequests
from hvd_async.algorithms.gossip.rank import MessageExchange, PushSumWorker
from hvd_async.algorithms.leader import machine as leader
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.runtime.carrier import Carrier
from hvd_async.runtime.machine import StateMachine


class Mutant(NamedTuple):
    """A fault: in one method, one piece of code becomes another.

    Code is compared by its syntax tree, so neither the method's file nor its format matters.

    Attributes:
        job: the job of ``JOBS`` that finds the fault.
        method: the method to change; of a property, its ``fget``.
        old: an expression or a statement that the method has exactly once.
        new: what replaces it; "pass" where it is a whole statement.
    """

    job: str
    method: Callable[..., Any]
    old: str
    new: str


MUTANTS: Mapping[str, Mapping[str, Mutant]] = {
    "eager": {
        "a drain ends with one rank missing": Mutant(
            "opening",
            StateMachine._on_finished,
            "len(self._done) < len(self.ranks)",
            "len(self._done) < len(self.ranks) - 1",
        ),
        "the last rank decides between drain and cut": Mutant(
            "cut and drain",
            StateMachine._on_finished,
            "self._flush = self._flush or event.flush",
            "self._flush = event.flush",
        ),
        "what a rank that is gone has left is forgotten": Mutant(
            "one leaves, one cuts",
            StateMachine._on_deleted,
            "event.produced != self._drained.get(rank, [0] * len(event.produced))",
            "False",
        ),
        "a rank that is gone is waited for": Mutant(
            "one leaves for good", StateMachine._drain, "self._done = dict.fromkeys(gone)", "self._done = dict()"
        ),
        "a collective waits for a rank that is gone": Mutant(
            "one leaves in a collective",
            StateMachine._on_deleted,
            "commands = self._due_collectives()",
            "commands: list[Command] = []",
        ),
        "rounds are one staler than agreed": Mutant(
            "steps that differ",
            EagerStateMachine._advance,
            "number - self._positions.lowest_in(index) > self._config.max_staleness",
            "number - self._positions.lowest_in(index) > self._config.max_staleness + 1",
        ),
        "who has arrived counts for the next round too": Mutant(
            "opening", EagerStateMachine._fire, "bucket.waiting, bucket.arrived, bucket.least = {}, 0, 1", "pass"
        ),
        "nothing goes out at a drain": Mutant(
            "two buckets, both late",
            EagerStateMachine._on_all_finished,
            "self._flush and any(bucket.loaded for bucket in self._buckets)",
            "False",
        ),
        "a late gradient is not noted": Mutant(
            "two buckets, both late",
            EagerStateMachine._arrived,
            "bucket.loaded, bucket.empty = (True, bucket.empty and index in event.empty)",
            "pass",
        ),
        "a round has the hyperparameters of another step": Mutant(
            "steps that differ",
            EagerStateMachine._fire,
            "lead is not None and round_.hyper is None",
            "(lead := next(iter(self._steppers.step_of), None)) is not None and round_.hyper is None",
        ),
        "a round that has hyperparameters gets others": Mutant(
            "steps that differ",
            EagerStateMachine._stepped,
            "round_ is None or round_.hyper is not None or self._fired < event.step",
            "round_ is None or self._fired < event.step",
        ),
        "late hyperparameters are not sent": Mutant(
            "opening",
            EagerStateMachine._stepped,
            "return [SetHyperparameters(self._optimizer, event.step, self._unsent(hyper))]",
            "return []",
        ),
        "a drain's last round goes for one bucket": Mutant(
            "two buckets, both late",
            EagerStateMachine._on_all_finished,
            "bucket.fired < last",
            "bucket.fired < last and not index",
        ),
        "steps are not re-based at a drain": Mutant(
            "two buckets",
            EagerStateMachine._on_all_finished,
            "self._positions.reset(self.ranks, last)",
            "self._positions.reset(self.ranks, 0)",
        ),
        "a quorum counts ranks that are done": Mutant(
            "all", EagerStateMachine._advance, "self._hosts.active", "self._hosts.number"
        ),
        "a version that is taken frees no rank": Mutant(
            "pace by rounds", EagerStateMachine._took, "return self._advance(rank, now)", "return []"
        ),
        "a rank that is done frees no rank": Mutant(
            "steps that differ",
            EagerStateMachine._on_rank_finished,
            "return [*self._gather(host, ready, now), *self._advance(rank, now)]",
            "return self._gather(host, ready, now)",
        ),
        "a rank that is done keeps its host waiting": Mutant(
            "a host, uneven, cut",
            EagerStateMachine._on_rank_finished,
            "[*self._gather(host, ready, now), *self._advance(rank, now)]",
            "self._advance(rank, now)",
        ),
        "a host's gradients go apart": Mutant(
            "a host",
            EagerStateMachine._fire,
            "self._gathering.host_steps(index)",
            "Gathering(self._hosts, len(self._buckets)).host_steps(0)",
        ),
        "a host does not learn that its late step has ended": Mutant(
            "two hosts",
            EagerStateMachine._gather,
            "return [EndStep(self._optimizer, self._hosts.number[host], whole, version)]",
            "return []",
        ),
        "what a host holds back is forgotten at a drain": Mutant(
            "half of each host",
            EagerStateMachine._fire,
            "bucket.loaded, bucket.empty = (self._by_hosts and self._gathering.holds(index), True)",
            "bucket.loaded = False",
        ),
        "a host's steps are not reset after an end": Mutant(
            "a host", EagerStateMachine._on_all_finished, "self._gathering.reset(self._hosts)", "pass"
        ),
        "a host waits for its first rank alone": Mutant(
            "a host",
            EagerStateMachine._arrived,
            "self._gather(host, self._gathering.hold(rank, host, step, indices, bits), now)",
            "(self._gathering.hold(rank, host, step, indices, bits), self._gather(host, indices, now))[1]",
        ),
        "a rank that is done is too late": Mutant(
            "steps that differ", EagerStateMachine._on_rank_finished, "self._positions.leave(rank)", "pass"
        ),
        "a bucket that was announced goes before it has come": Mutant(
            "announced", RoundsInFlight._has, "round_ != self._announced or bucket not in self._lacking", "True"
        ),
        "what has come before its announced round starts is forgotten": Mutant(
            "announced", RoundsInFlight.go, "self.take_in(go.round)", "pass"
        ),
        "what comes after its announced round has started is forgotten": Mutant(
            "announced", RoundsInFlight.take_in, "self._continue()", "pass"
        ),
        "a rank that is gone does not keep what it has announced": Mutant(
            "announced, one leaves", EagerWorker.discard_results, "self._in_flight.give_up()", "pass"
        ),
        "a step that is announced comes with the hyperparameters of another": Mutant(
            "announced", EagerWorker._hand_in, "self._announced_step != step", "True"
        ),
        "no rank wakes when a grace ends": Mutant(
            "grace", EagerStateMachine._advance, "self._wakes[index] = until", "pass"
        ),
    },
    "gossip": {
        "second stages of averages begin in another order": Mutant(
            "averages in two stages",
            Carrier._start_lane,
            "lane and self._may_start(lane[0])",
            "lane and any((self._may_start(each) and not lane.remove(each) and not lane.appendleft(each) "
            "for each in list(lane)))",
        ),
        "second stages of averages have no turn": Mutant(
            "averages in two stages",
            Carrier.carry,
            "self._engine.turn()",
            "None if lane == 'means' else self._engine.turn()",
        ),
        "an exchange starts while a rank is in a drain": Mutant(
            "sgp, cuts", GossipStateMachine._advance, "self._resuming", "False"
        ),
        "messages are announced where collectives start in order": Mutant(
            "dpsgd and averages", MessageExchange.announce, "self._engine.collectives.in_order", "False"
        ),
        "a rank does not wait for messages": Mutant("sgp", PushSumWorker.mix_program, "not late", "False"),
        "a rank exchanges messages before it has cut": Mutant("sgp, cuts", Carrier.pause, "self._last = last", "pass"),
        "a rank takes too many steps without a partner": Mutant(
            "adpsgd", Pairing.may_step, "self._local < self._most", "self._local <= self._most"
        ),
        "a host takes a step without one of its ranks": Mutant(
            "hosts with local steps",
            HostWorker._progress,
            "self._active(place, step) and place not in contributed",
            "False",
        ),
        "a host's steps do not restart after an end": Mutant(
            "hosts with local steps", HostWorker._complete_end, "self._host_step = 0", "pass"
        ),
        "two exchanges at once": Mutant(
            "sgp", GossipStateMachine._due_exchange, "self._in_the_way.add(exchange.round)", "pass"
        ),
        "an exchange is never over": Mutant(
            "sgp", GossipStateMachine._landed, "self._in_the_way.discard(number)", "pass"
        ),
        "an announced exchange goes before earlier messages": Mutant(
            "osgp",
            GossipStateMachine._announced_exchange,
            "self._queues or not alike or self._coming.keys() != active",
            "not alike or self._coming.keys() != active",
        ),
        "an announced exchange goes without a rank": Mutant(
            "dpsgd",
            GossipStateMachine._announced_exchange,
            "self._readiness.active",
            "self._readiness.active & self._coming.keys()",
        ),
        "announced messages go twice": Mutant(
            "dpsgd", GossipStateMachine._on_event, "key == self._granted.get(rank)", "False"
        ),
        "messages of several steps go together": Mutant(
            "sgp of three ranks",
            MessageQueues._next,
            "self._groups if self._stages > 1 else self._groups[:1]",
            "self._groups",
        ),
        "a message goes twice": Mutant("opening", MessageQueues.take, "del queue[key]", "pass"),
        "offers stay behind at a drain": Mutant(
            "osgp",
            GossipStateMachine._on_all_finished,
            "while self._queues:\n    commands += [exchange for exchange in [self._next()] if exchange is not None]",
            "pass",
        ),
        "averaged with a rank that is done": Mutant(
            "adpsgd of three ranks",
            PairRequests.pair,
            "(own & self._active).difference(asking, taken)",
            "own.difference(asking, taken)",
        ),
        "a rank is in two pairs": Mutant(
            "adpsgd of three ranks",
            PairRequests.pair,
            "(own & self._active).difference(asking, taken)",
            "(own & self._active).difference(asking)",
        ),
        "averaged with a rank that is no neighbour": Mutant(
            "adpsgd",
            PairRequests.pair,
            "own = self._neighbours[place]",
            "own = frozenset(range(len(self._neighbours)))",
        ),
        "ranks do not learn which ranks have finished": Mutant(
            "opening",
            GossipStateMachine._on_rank_finished,
            "return [self._retired(rank), *self._advance(now)]",
            "return self._advance(now)",
        ),
        "the last step of a rank that is done is wrong after a drain": Mutant(
            "cut and drain",
            GossipStateMachine._retired,
            "self._produced[rank][0] - self._bases[rank]",
            "self._produced[rank][0]",
        ),
        "averages are not reset after a drain": Mutant(
            "averages",
            GossipStateMachine._on_all_finished,
            "(self._coming, self._coming_steps, self._granted, self._starved, self._entered)",
            "(self._coming, self._coming_steps, self._granted, self._starved)",
        ),
        "an average goes without a rank": Mutant(
            "averages",
            GossipStateMachine._due_averages,
            "self._inside[index] < len(self._readiness.active)",
            "self._inside[index] < len(self._readiness.active) - 1",
        ),
        "a rank that is done counts in an average": Mutant(
            "averages that ranks continue from",
            GossipStateMachine._on_rank_finished,
            "self._inside[index] -= rank in there",
            "pass",
        ),
        "no rank wakes when an exchange goes": Mutant(
            "sgp",
            GossipStateMachine._due_exchange,
            "self._wake_at = since + self._duration",
            "self._wake_at = None",
        ),
    },
    "leader": {
        "a rank pulls before it has drained": Mutant(
            "lsgd",
            Carrier._may_start,
            "self._last is not None and first.number > self._last",
            "False",
        ),
        "a rank drains before its pulls are complete": Mutant(
            "easgd",
            Carrier.has_completed,
            "not any((number <= last for number in [*self._in_flight.values(), *waiting]))",
            "True",
        ),
        "a pull starts although this rank has not seen the group's last one": Mutant(
            "lsgd", Carrier._may_start, "first.name not in self._in_flight", "True"
        ),
        "two pulls of a group at once": Mutant(
            "lsgd",
            leader._Group.is_due.fget,
            "self.flight is None and 0 < self.needed <= self.steps",
            "0 < self.needed <= self.steps",
        ),
        "a pull is never over": Mutant(
            "lsgd", LeaderStateMachine._on_event, "self._groups[group].flight = None", "pass"
        ),
        "a rank that is done leads": Mutant(
            "lsgd",
            LeaderStateMachine._recent,
            "rank not in out and self._heard.get(rank, -math.inf) >= oldest",
            "self._heard.get(rank, -math.inf) >= oldest",
        ),
        "a loss that is not finite leads": Mutant(
            "lsgd, losses that are no numbers",
            LeaderStateMachine._due,
            "pick_leader(self._means, self._recent(group.ranks))",
            "next(iter(self._recent(group.ranks)), None)",
        ),
        "steps count for two pulls": Mutant(
            "lsgd", LeaderStateMachine._due, "group.steps %= group.needed", "group.steps -= 1"
        ),
        "a rank's end makes a pull due": Mutant(
            "cut and drain",
            LeaderStateMachine._on_rank_finished,
            "group.steps * active // max(1, group.active)",
            "group.steps",
        ),
        "a group of one is pulled": Mutant(
            "groups", LeaderStateMachine._is_pulled, "1 < len(self._groups[number].ranks) < len(self.ranks)", "True"
        ),
        "a drain keeps what was counted": Mutant(
            "cut and drain", LeaderStateMachine._on_all_finished, "0 if self._flush else group.steps", "group.steps"
        ),
        "a rank that is gone counts": Mutant(
            "one leaves for good",
            LeaderStateMachine._on_all_finished,
            "self._leaving, self._drains = sorted(self._absent), False",
            "self._drains = False",
        ),
    },
}


@contextlib.contextmanager
def planted(family: str, name: str) -> Iterator[None]:
    """Within the block, the classes of the library have this fault.

    Raises:
        AssertionError: the method does not have the code that the fault replaces exactly once: write the fault again.
    """
    mutant = MUTANTS[family][name]
    *owner, attribute = mutant.method.__qualname__.split(".")
    cls = vars(sys.modules[mutant.method.__module__])[owner[0]]
    faulty: Any = _rewritten(mutant)
    if isinstance(inspect.getattr_static(cls, attribute), property):
        faulty = property(faulty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, attribute, faulty)
        yield


def _rewritten(mutant: Mutant) -> Any:
    """The method with the fault in it."""
    method = mutant.method
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    edit = _Replacement(mutant.old, mutant.new)
    edit.visit(function)
    assert edit.count == 1, f"{method.__qualname__} has this {edit.count} times: {mutant.old}"
    code = compile(ast.fix_missing_locations(ast.Module([function], [])), inspect.getfile(method), "exec")
    made: dict[str, Any] = {}
    exec(code, method.__globals__, made)
    return made[function.name]


class _Replacement(ast.NodeTransformer):
    """Replaces code by other code.

    Attributes:
        count: how often it was there.
    """

    def __init__(self, old: str, new: str) -> None:
        (was,), (becomes,) = ast.parse(old).body, ast.parse(new).body
        if isinstance(was, ast.Expr) and isinstance(becomes, ast.Expr):
            self._old, self._new = ast.dump(was.value), becomes.value
        else:
            self._old, self._new = ast.dump(was), becomes
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if ast.dump(node) != self._old:
            return self.generic_visit(node)
        self.count += 1
        return self._new
