"""Classes with one fault each, planted in one of their methods: an exploration must find every one.

A fault is a function that is called instead of a method, with the method itself and its arguments. So it depends on
names and results of methods, not on their text.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest

from hvd_async.algorithms.eager.config import HostSteps
from hvd_async.algorithms.eager.gradient_format import GradientFormat
from hvd_async.algorithms.eager.machine import EagerStateMachine, Gathering, Hosts, Positions, Steppers
from hvd_async.algorithms.eager.rank import EagerWorker, RoundsInFlight
from hvd_async.algorithms.gossip import outer
from hvd_async.algorithms.gossip.adpsgd import Pairing
from hvd_async.algorithms.gossip.averages import Averages
from hvd_async.algorithms.gossip.config import MessageComing, RankFinished, spans_of
from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback
from hvd_async.algorithms.gossip.exact_diffusion import ExactDiffusionWorker
from hvd_async.algorithms.gossip.hosts import HostWorker
from hvd_async.algorithms.gossip.machine import GossipStateMachine, MessageQueues, PairRequests
from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from hvd_async.algorithms.gossip.rank import GossipWorker, MessageExchange, PushSumWorker, ReceiveBuffer
from hvd_async.algorithms.leader import machine as leader
from hvd_async.algorithms.leader.config import PullDone
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.algorithms.leader.selection import ALL_RANKS
from hvd_async.runtime.carrier import Carrier
from hvd_async.runtime.machine import StateMachine
from tests.machines.driver import InPlace

Fault = Callable[..., Any]


class Mutant(NamedTuple):
    """A fault in a method.

    Attributes:
        job: the job of ``JOBS`` that finds the fault.
        owner: the class, or the module.
        method: the method's name, or the property's or the function's.
        fault: called with the method and its arguments.
    """

    job: str
    owner: Any
    method: str
    fault: Fault


def instead(result: Any = None) -> Fault:
    """Do nothing, and return a result."""
    return lambda real, *arguments: result


def before(change: Callable[..., Any]) -> Fault:
    """Change something first; ``change`` has the method's arguments."""

    def fault(real: Any, *arguments: Any) -> Any:
        change(*arguments)
        return real(*arguments)

    return fault


def after(change: Callable[..., Any]) -> Fault:
    """Change the result; ``change`` has it and the method's arguments."""
    return lambda real, *arguments: change(real(*arguments), *arguments)


def meanwhile(**values: Callable[[Any], Any]) -> Fault:
    """Have attributes of the object hold other values, which are functions of it, while the method runs."""

    def fault(real: Any, one: Any, *arguments: Any) -> Any:
        with mock.patch.multiple(one, **{name: value(one) for name, value in values.items()}):
            return real(one, *arguments)

    return fault


def without(method: str) -> Fault:
    """Have another method of the object do nothing, and return no commands, while the method runs."""
    return meanwhile(**{method: lambda one: lambda *arguments: []})


def keeping(name: str) -> Fault:
    """Have an attribute of the object be after the method as it was before."""

    def fault(real: Any, one: Any, *arguments: Any) -> Any:
        kept = copy.copy(getattr(one, name))
        result = real(one, *arguments)
        setattr(one, name, kept)
        return result

    return fault


def without_turn(real: Any, carrier: Any, *arguments: Any) -> None:
    """Carry a collective without a turn."""
    with mock.patch.multiple(carrier._engine, turn=lambda: None):
        real(carrier, *arguments)


# -- partial allreduce -------------------------------------------------------------------------------------------------


def one_too_few(got: Any, machine: Any, rank: int, event: Any, now: float) -> Any:
    """End once all ranks but one have finished."""
    lacks_one = machine._config is not None and len(machine._done) == len(machine.ranks) - 1
    return machine._drain(rank, now) if lacks_one else got


def still_waiting(real: Any, machine: Any, index: int, *arguments: Any) -> Any:
    """Start a round of a bucket, and leave the ranks there that have arrived."""
    bucket = machine._buckets[index]
    arrived = bucket.waiting, bucket.arrived, bucket.least
    started = real(machine, index, *arguments)
    bucket.waiting, bucket.arrived, bucket.least = arrived
    return started


def not_loaded(real: Any, machine: Any, rank: int, event: Any, *arguments: Any) -> Any:
    """Take gradients in, and note only the ones that start a round."""
    noted = [(bucket, bucket.fired, bucket.loaded, bucket.empty) for bucket in machine._buckets]
    commands = real(machine, rank, event, *arguments)
    for bucket, fired, loaded, empty in noted:
        if bucket.fired == fired:
            bucket.loaded, bucket.empty = loaded, empty
    return commands


def first_bucket_alone(real: Any, machine: Any, *arguments: Any) -> Any:
    """End with rounds of the first bucket."""
    starts = machine._starts
    first = mock.patch.object(
        machine, "_starts", lambda started, now: starts([one for one in started if one.bucket == 0], now)
    )
    with first:
        return real(machine, *arguments)


EAGER: Mapping[str, Mutant] = {
    "a drain ends with one rank missing": Mutant("opening", StateMachine, "_on_finished", after(one_too_few)),
    "the last rank decides between drain and cut": Mutant(
        "cut and drain",
        StateMachine,
        "_on_finished",
        before(lambda machine, *_: setattr(machine, "_flush", False)),
    ),
    "what a rank that is gone has left is forgotten": Mutant(
        "one leaves, one cuts",
        StateMachine,
        "_on_deleted",
        before(lambda machine, rank, event, now: machine._drained.update({rank: event.produced})),
    ),
    "a rank that is gone is waited for": Mutant(
        "one leaves for good", StateMachine, "_drain", after(lambda got, machine, *_: (machine._done.clear(), got)[1])
    ),
    "a collective waits for a rank that is gone": Mutant(
        "one leaves in a collective", StateMachine, "_on_deleted", without("_due_collectives")
    ),
    "rounds are one staler than agreed": Mutant(
        "steps that differ", Positions, "lowest_in", after(lambda lowest, *_: lowest + 1)
    ),
    "who has arrived counts for the next round too": Mutant("opening", EagerStateMachine, "_fire", still_waiting),
    "nothing goes out at a drain": Mutant(
        "two buckets, both late", EagerStateMachine, "_on_all_finished", meanwhile(_flush=lambda _: False)
    ),
    "a late gradient is not noted": Mutant("two buckets, both late", EagerStateMachine, "_arrived", not_loaded),
    "a round has the hyperparameters of another step": Mutant(
        "steps that differ",
        Steppers,
        "start",
        after(lambda got, steppers, *_: (next(iter(steppers.step_of), None), got[1])),
    ),
    "a round that has hyperparameters gets others": Mutant(
        "steps that differ",
        EagerStateMachine,
        "_stepped",
        before(
            lambda machine, rank, event, now: (
                event.step in machine._rounds and setattr(machine._rounds[event.step], "hyper", None)
            )
        ),
    ),
    "late hyperparameters are not sent": Mutant("opening", EagerStateMachine, "_stepped", after(lambda *_: [])),
    "a drain's last round goes for one bucket": Mutant(
        "two buckets, both late", EagerStateMachine, "_on_all_finished", first_bucket_alone
    ),
    "steps are not re-based at a drain": Mutant(
        "two buckets", Positions, "reset", lambda real, positions, ranks, at: real(positions, ranks, 0)
    ),
    "a quorum counts ranks that are done": Mutant("all", Hosts, "finish", instead()),
    "a version that is taken frees no rank": Mutant("pace by rounds", EagerStateMachine, "_took", without("_advance")),
    "a rank that is done frees no rank": Mutant(
        "steps that differ", EagerStateMachine, "_on_rank_finished", without("_advance")
    ),
    "a rank that is done keeps its host waiting": Mutant(
        "a host, uneven, cut", EagerStateMachine, "_on_rank_finished", without("_gather")
    ),
    "a host's gradients go apart": Mutant("a host", Gathering, "host_steps", instead(HostSteps(0, {}))),
    "a host does not learn that its late step has ended": Mutant(
        "two hosts", EagerStateMachine, "_gather", after(lambda *_: [])
    ),
    "what a host holds back is forgotten at a drain": Mutant("half of each host", Gathering, "holds", instead(False)),
    "a host's steps are not reset after an end": Mutant(
        "a host", Gathering, "reset", lambda real, one, hosts: None if hasattr(one, "held") else real(one, hosts)
    ),
    "a host waits for its first rank alone": Mutant(
        "a host", Gathering, "hold", after(lambda got, gathering, rank, host, step, buckets, bits: list(buckets))
    ),
    "a rank that is done is too late": Mutant("steps that differ", Positions, "leave", instead()),
    "a bucket that was announced goes before it has come": Mutant("announced", RoundsInFlight, "_has", instead(True)),
    "what comes after its announced round has started is forgotten": Mutant(
        "announced", RoundsInFlight, "take_in", without("_continue")
    ),
    "a rank that is gone does not keep what it has announced": Mutant(
        "announced, one leaves", RoundsInFlight, "give_up", instead()
    ),
    "a step that is announced comes with the hyperparameters of another": Mutant(
        "announced", EagerWorker, "_hand_in", meanwhile(_announced_step=lambda _: 0)
    ),
    "a late gradient replaces another": Mutant(
        "staleness 2",
        RoundsInFlight,
        "add",
        before(lambda rounds, bucket, vector, version: setattr(rounds._pending[bucket], "vector", None)),
    ),
    "a late gradient is dropped": Mutant(
        "staleness 2",
        RoundsInFlight,
        "add",
        lambda real, rounds, bucket, vector, version: (
            None if rounds._next_ready > version + 1 else real(rounds, bucket, vector, version)
        ),
    ),
    "what a round has taken stays pending": Mutant("staleness 2", RoundsInFlight, "_prepare", keeping("_pending")),
    "a bucket's gradients are counted twice": Mutant(
        "two buckets", GradientFormat, "tally", after(lambda got, *_: (2 * got[0], *got[1:]))
    ),
    "what was restored is forgotten": Mutant("an earlier run", RoundsInFlight, "restore", instead()),
    "the state after a cut is what is pending later": Mutant("cut", RoundsInFlight, "keep_for_cut", instead()),
    "rounds of nothing are counted as applied": Mutant(
        "empty buckets",
        EagerWorker,
        "stats",
        after(lambda got, worker, *_: dataclasses.replace(got, rounds_applied=got.rounds)),
    ),
    "what is handed over without a gradient is not kept": Mutant(
        "steps that differ",
        InPlace,
        "allreduce_sum",
        lambda real, plane, vector, name, process_set, keep, scale: real(
            plane, vector, name, process_set, False, scale
        ),
    ),
    "an empty bucket counts as a gradient": Mutant(
        "empty buckets",
        RoundsInFlight,
        "give",
        lambda real, rounds, one, *nbytes: real(
            rounds,
            one._replace(vector=rounds._wire.zeros(one.bucket) + 1) if getattr(one, "vector", one) is None else one,
            *nbytes,
        ),
    ),
    "a cut sends what is pending": Mutant(
        "cut", EagerStateMachine, "_on_all_finished", meanwhile(_flush=lambda _: True)
    ),
    "a round that waits has no turn": Mutant("announced", Carrier, "carry", without_turn),
    "no rank wakes when a grace ends": Mutant("grace", EagerStateMachine, "deadline", instead()),
}


# -- gossip ------------------------------------------------------------------------------------------------------------


def any_first(real: Any, carrier: Any, lane: Any) -> None:
    """Start what may start, in any order."""
    while ready := [one for one in lane if carrier._may_start(one)]:
        lane.remove(ready[0])
        lane.appendleft(ready[0])
        real(carrier, lane)


def announce_in_any_case(real: Any, exchanges: Any, optimizer: int, key: int) -> None:
    """Announce messages, whether or not collectives start in order."""
    exchanges._coming.add(key)
    exchanges._engine.send(MessageComing(optimizer, key))


def of_those_there(real: Any, machine: Any, *arguments: Any) -> Any:
    """Start an announced exchange over the ranks that have announced."""
    readiness = machine._readiness
    with mock.patch.object(readiness, "active", readiness.active & machine._coming.keys()):
        return real(machine, *arguments)


def take_twice(real: Any, queues: Any, *arguments: Any) -> Any:
    """Take messages, each of which is in its queue once more."""
    taken, again = real(queues, *arguments), vars(queues).setdefault("again", set())
    for rank, key in taken:
        if (rank, key) not in again:
            again.add((rank, key))
            queues.add(rank, key, 0.0)
    return taken


def all_places(requests: Any) -> frozenset[int]:
    """Return the places of all ranks."""
    return frozenset(range(len(requests._neighbours)))


def also_in_another_pair(got: Any, requests: Any, exchange: int) -> Any:
    """Pair a rank that is left over with a neighbour that has a partner."""
    pairs, met = got
    more = [
        (rank, other)
        for rank in requests.waiting
        for other in {one for pair in pairs for one in pair}
        if requests._place[other] in requests._neighbours[requests._place[rank]]
    ]
    return [*pairs, *more[:1]], met


def also_without_a_rank(due: Any, machine: Any) -> Any:
    """Start averages that one active rank has not entered."""
    while (
        machine._averages
        and machine._inside[index := next(iter(machine._averages))] == len(machine._readiness.active) - 1
    ):
        due.append(machine._start_average(index))
    return due


def own_weights(real: Any, worker: Any, x: Any, weights: list[float]) -> Any:
    """Average, and keep this rank's push-sum weights."""
    x, _ = yield from real(worker, x, weights)
    return x, weights


def counted_in_any_case(real: Any, averages: Any, command: Any) -> None:
    """Add this rank's vector to an average, whether or not the rank is in it."""
    own = {averages._engine.rank} if command.index in averages._contributed else set()
    real(averages, msgspec.structs.replace(command, spans=spans_of(sorted({*command.ranks, *own}))))


def as_before_a_drain(real: Any, worker: Any, weights: Any, flush: bool) -> Any:
    """End, and keep the anchor."""
    state = worker._state
    weights = yield from real(worker, weights, flush)
    worker._state = state
    return weights


def with_errors(real: Any, worker: Any, weights: Any, flush: bool) -> Any:
    """End, and keep the errors of compression."""
    error = worker._averages.error + 0
    weights = yield from real(worker, weights, flush)
    worker._averages.error = error
    return weights


GOSSIP: Mapping[str, Mutant] = {
    "a message is later than was agreed": Mutant(
        "compared osgp", ReceiveBuffer, "missing", meanwhile(_late=lambda buffer: buffer._late + 1)
    ),
    "D-PSGD sends what its update has made": Mutant(
        "compared dpsgd",
        PushSumWorker,
        "mix_program",
        lambda real, worker, weights, after: real(worker, after + 0, after),
    ),
    "averages leave push-sum weights out": Mutant(
        "compared sgp",
        PushSumWorker,
        "_average",
        lambda real, worker, x, weights: real(worker, x, [1.0] * len(weights)),
    ),
    "an average keeps own push-sum weights": Mutant("compared sgp", PushSumWorker, "_average", own_weights),
    "a message carries other weights than it takes away": Mutant(
        "compared sgp, fp16", ErrorFeedback, "encode", after(lambda got, known, edge, vector: (got[0], vector))
    ),
    "estimates of one end are lost at a cut": Mutant(
        "compared sgp, cuts",
        PushSumWorker,
        "_decode_discarded",
        before(lambda worker, *_: worker._place or worker._known.forget_edges()),
    ),
    "phases begin again at a cut": Mutant(
        "compared sgp, cuts", PushSumWorker, "_restart", before(lambda worker: setattr(worker, "_base", 0))
    ),
    "a rank that is gone is given messages": Mutant(
        "one leaves after a cut", ReceiveBuffer, "reset", lambda real, buffer, gone: real(buffer, ())
    ),
    "the share of a rank that is gone counts as lost": Mutant(
        "one leaves for good",
        GossipWorker,
        "consensus_program",
        before(lambda worker, x: setattr(worker, "_all_mass", True)),
    ),
    "corrections by a rank that is gone stay": Mutant(
        "one leaves exact diffusion",
        ExactDiffusionWorker,
        "_without_edge",
        lambda real, worker, x, place, last: x,
    ),
    "what a rank that is gone has sent is in an average": Mutant(
        "one is in an average and leaves", Averages, "submit", counted_in_any_case
    ),
    "a rank that is gone adds up no part of an average": Mutant(
        "one leaves averages in two stages",
        Averages,
        "submit",
        lambda real, averages, command: None if averages._discards else real(averages, command),
    ),
    "what a rank learns meanwhile is dropped": Mutant(
        "compared local", outer, "merged", lambda real, anchor, weights, sent: anchor + 0
    ),
    "a rank that is done does not follow averages": Mutant(
        "compared local", OuterWorker, "_with_moves", lambda real, worker, weights: weights
    ),
    "averages pile up on a rank that is done": Mutant(
        "one finishes much sooner", OuterWorker, "_follows", instead(False)
    ),
    "a rank that is done does not wake for averages": Mutant(
        "one finishes much sooner", OuterWorker, "has_available", lambda real, worker: worker._is_complete()
    ),
    "errors of messages are lost": Mutant("compared local, int8", Averages, "_encoded", keeping("error")),
    "errors of means are lost": Mutant("compared local, int8", Averages, "_send_mean", keeping("error")),
    "a drain leaves errors out": Mutant(
        "compared local, int8", Averages, "corrected", lambda real, averages, weights: weights
    ),
    "errors outlive a drain": Mutant("compared local, int8", OuterWorker, "gather_program", with_errors),
    "an average is taken too early": Mutant(
        "compared local", OuterWorker, "__init__", after(lambda got, worker, *_: setattr(worker, "_late", 1))
    ),
    "the anchor outlives a drain": Mutant("compared diloco", OuterWorker, "gather_program", as_before_a_drain),
    "a drain does not wait for averages": Mutant(
        "compared diloco",
        OuterWorker,
        "_is_complete",
        lambda real, worker: worker._drained is not None,
    ),
    "fragments are averaged in another order": Mutant(
        "compared local", outer.Rhythm, "fragment", lambda real, rhythm, average: average % rhythm.fragments
    ),
    "averages are counted from the last drain after a cut": Mutant(
        "compared local, cuts", Averages, "restart", lambda real, averages, first: real(averages, 0)
    ),
    "Nesterov's term is left out": Mutant(
        "compared diloco",
        OuterWorker,
        "__init__",
        after(lambda got, worker, *_: setattr(worker, "_outer_step", outer.slowmo)),
    ),
    "outer steps have no momentum": Mutant(
        "compared diloco",
        OuterWorker,
        "__init__",
        after(lambda got, worker, *_: setattr(worker, "_constants", worker._constants._replace(momentum=0.0))),
    ),
    "second stages of averages begin in another order": Mutant(
        "averages in two stages", Carrier, "_start_lane", any_first
    ),
    "second stages of averages have no turn": Mutant("averages in two stages", Carrier, "carry", without_turn),
    "an exchange starts while a rank is in a drain": Mutant(
        "sgp, cuts", GossipStateMachine, "_advance", meanwhile(_resuming=lambda _: ())
    ),
    "messages are announced where collectives start in order": Mutant(
        "dpsgd and averages", MessageExchange, "announce", announce_in_any_case
    ),
    "a rank does not wait for messages": Mutant("sgp", PushSumWorker, "_await_messages", instead(())),
    "a rank exchanges messages before it has cut": Mutant("sgp, cuts", Carrier, "pause", instead()),
    "a rank takes too many steps without a partner": Mutant(
        "adpsgd", Pairing, "may_step", after(lambda got, pairing: got or pairing._local == pairing._most)
    ),
    "a host takes a step without one of its ranks": Mutant(
        "hosts with local steps", HostWorker, "_progress", without("_active")
    ),
    "a host's steps do not restart after an end": Mutant(
        "hosts with local steps", HostWorker, "_complete_end", keeping("_host_step")
    ),
    "two exchanges at once": Mutant(
        "sgp", GossipStateMachine, "_due_exchange", after(lambda got, machine, _: (machine._in_the_way.clear(), got)[1])
    ),
    "an exchange is never over": Mutant("sgp", GossipStateMachine, "_landed", keeping("_in_the_way")),
    "an announced exchange goes before earlier messages": Mutant(
        "osgp", GossipStateMachine, "_announced_exchange", meanwhile(_queues=lambda _: ())
    ),
    "an announced exchange goes without a rank": Mutant(
        "dpsgd", GossipStateMachine, "_announced_exchange", of_those_there
    ),
    "announced messages go twice": Mutant(
        "dpsgd",
        GossipStateMachine,
        "_on_event",
        meanwhile(_granted=lambda _: {}),
    ),
    "messages of several steps go together": Mutant(
        "sgp of three ranks",
        MessageQueues,
        "_next",
        lambda real, queues, until: [group for group in queues._groups if group.step <= until],
    ),
    "a message goes twice": Mutant("opening", MessageQueues, "take", take_twice),
    "offers stay behind at a drain": Mutant(
        "osgp", GossipStateMachine, "_on_all_finished", meanwhile(_queues=lambda _: ())
    ),
    "averaged with a rank that is done": Mutant(
        "adpsgd of three ranks", PairRequests, "pair", meanwhile(_active=all_places)
    ),
    "a rank is in two pairs": Mutant("adpsgd of three ranks", PairRequests, "pair", after(also_in_another_pair)),
    "averaged with a rank that is no neighbour": Mutant(
        "adpsgd",
        PairRequests,
        "pair",
        meanwhile(_neighbours=lambda all_: [all_places(all_)] * len(all_._neighbours)),
    ),
    "ranks do not learn which ranks have finished": Mutant(
        "opening",
        GossipStateMachine,
        "_on_rank_finished",
        after(lambda got, *_: [command for command in got if not isinstance(command, RankFinished)]),
    ),
    "the last step of a rank that is done is wrong after a drain": Mutant(
        "cut and drain", GossipStateMachine, "_retired", meanwhile(_bases=lambda _: defaultdict(int))
    ),
    "averages are not reset after a drain": Mutant(
        "averages", GossipStateMachine, "_on_all_finished", keeping("_entered")
    ),
    "an average goes without a rank": Mutant(
        "averages", GossipStateMachine, "_due_averages", after(also_without_a_rank)
    ),
    "a rank that is done counts in an average": Mutant(
        "averages that ranks continue from",
        GossipStateMachine,
        "_on_rank_finished",
        before(
            lambda machine, rank, now: machine._inside.update(
                {n: count + (rank in machine._averages[n]) for n, count in machine._inside.items()}
            )
        ),
    ),
    "no rank wakes when an exchange goes": Mutant("sgp", GossipStateMachine, "deadline", instead()),
}


# -- leader-pull -------------------------------------------------------------------------------------------------------


def count_for_two_pulls(real: Any, machine: Any) -> Any:
    """Start pulls that are due, and keep the steps that made them so."""
    counted = [(group, group.steps) for group in machine._groups.values()]
    commands = real(machine)
    for group, steps in counted:
        if group.steps != steps:
            group.steps = steps - 1
    return commands


def keep_steps_of_groups(real: Any, machine: Any, *arguments: Any) -> Any:
    """Finish a rank, whose steps still count."""
    counted = [(group, group.steps) for group in machine._groups.values()]
    commands = real(machine, *arguments)
    for group, steps in counted:
        group.steps = steps
    return commands


LEADER: Mapping[str, Mutant] = {
    "a rank pulls before it has drained": Mutant("lsgd", Carrier, "pause", instead()),
    "a rank drains before its pulls are complete": Mutant("easgd", Carrier, "has_completed", instead(True)),
    "a pull starts although this rank has not seen the group's last one": Mutant(
        "lsgd", Carrier, "_may_start", meanwhile(_in_flight=lambda _: {})
    ),
    "results of pulls are taken twice": Mutant("lsgd", LeaderWorker, "mix", keeping("_fresh")),
    "results of pulls outlive a drain": Mutant("lsgd", LeaderWorker, "start_from", keeping("_fresh")),
    "two pulls of a group at once": Mutant(
        "lsgd", leader._Group, "is_due", lambda real, group: 0 < group.needed <= group.steps
    ),
    "a pull is never over": Mutant(
        "lsgd",
        LeaderStateMachine,
        "_on_event",
        lambda real, machine, rank, event, now: [] if isinstance(event, PullDone) else real(machine, rank, event, now),
    ),
    "a rank that is done leads": Mutant(
        "lsgd", LeaderStateMachine, "_recent", meanwhile(_done=lambda _: {}, _absent=lambda _: ())
    ),
    "a loss that is not finite leads": Mutant(
        "lsgd, losses that are no numbers", leader, "pick_leader", lambda real, means, ranks: next(iter(ranks), None)
    ),
    "steps count for two pulls": Mutant("lsgd", LeaderStateMachine, "_due", count_for_two_pulls),
    "a rank's end makes a pull due": Mutant(
        "cut and drain", LeaderStateMachine, "_on_rank_finished", keep_steps_of_groups
    ),
    "a group of one is pulled": Mutant(
        "groups",
        LeaderStateMachine,
        "_is_pulled",
        after(lambda got, machine, number: got or (number != ALL_RANKS and machine._config.local)),
    ),
    "a drain keeps what was counted": Mutant(
        "cut and drain", LeaderStateMachine, "_on_all_finished", meanwhile(_flush=lambda _: False)
    ),
    "a rank that is gone counts": Mutant(
        "one leaves for good", LeaderStateMachine, "_on_all_finished", meanwhile(_absent=lambda _: ())
    ),
}
MUTANTS: Mapping[str, Mapping[str, Mutant]] = {"eager": EAGER, "gossip": GOSSIP, "leader": LEADER}


@contextlib.contextmanager
def planted(family: str, name: str) -> Iterator[None]:
    """Within the block, the library has this fault."""
    mutant = MUTANTS[family][name]
    real = getattr(mutant.owner, mutant.method)
    method = real.fget if isinstance(real, property) else real

    @wraps(method)
    def faulty(*arguments: Any, **options: Any) -> Any:
        # (a caller's names of arguments are those of the method, which faults take in its order)
        return mutant.fault(lambda *given: method(*given, **options), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutant.owner, mutant.method, property(faulty) if isinstance(real, property) else faulty)
        yield
