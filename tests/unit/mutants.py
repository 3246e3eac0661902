"""State machines with one fault each, made by an edit of their source: an exploration must find every one."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.unit.explore_jobs import MACHINES, Machine

BASE = "hvd_async.runtime.state_machine"


class Mutant(NamedTuple):
    """A fault: ``old``, which the source has exactly once, becomes ``new``.

    Attributes:
        job: the one of ``QUICK``, or else of ``LONG``, that finds it.
        base: whether it is in what all machines have in common.
        long: whether it takes long to find.
        part: the module of the family that it is in; empty: its state machine.
    """

    job: str
    old: str
    new: str
    base: bool = False
    long: bool = False
    part: str = ""


MUTANTS: Mapping[str, Mapping[str, Mutant]] = {
    "eager": {
        "a drain ends with one rank missing": Mutant(
            "opening",
            "if len(self._done) < len(self.ranks) or self._config is None:",
            "if len(self._done) < len(self.ranks) - 1 or self._config is None:",
            base=True,
        ),
        "the last rank decides between drain and cut": Mutant(
            "cut and drain", "self._flush = self._flush or event.flush", "self._flush = event.flush", base=True
        ),
        "what a rank that is gone has left is forgotten": Mutant(
            "one leaves, one cuts",
            "if event.produced != self._drained.get(rank, [0] * len(event.produced)):",
            "if False:",
            base=True,
        ),
        "a rank that is gone is waited for": Mutant(
            "one leaves for good", "self._done = dict.fromkeys(gone)", "self._done = dict()", base=True
        ),
        "a collective waits for a rank that is gone": Mutant(
            "one leaves in a collective",
            "commands = self._due_collectives()",
            "commands: list[Command] = []",
            base=True,
        ),
        "rounds are one staler than agreed": Mutant(
            "steps that differ",
            "number - self._positions.lowest_in(index) > self._config.max_staleness",
            "number - self._positions.lowest_in(index) > self._config.max_staleness + 1",
        ),
        "who has arrived counts for the next round too": Mutant(
            "opening", "bucket.waiting, bucket.arrived, bucket.least = {}, 0, 1", "pass"
        ),
        "nothing goes out at a drain": Mutant(
            "two buckets, both late", "extra = self._flush and any(", "extra = False and any("
        ),
        "a late gradient is not noted": Mutant("staleness 2", "all_buckets[index].loaded = True\n", "pass\n"),
        "a round has the hyperparameters of another step": Mutant(
            "steps that differ",
            "lead = self._steppers.lead(number, self._hosts.ranks(initiator))",
            "lead = next(iter(self._steppers._step_of), None)",
        ),
        "a round that has hyperparameters gets others": Mutant(
            "steps that differ", "round_ is None or round_.hyper is not None or self", "round_ is None or self"
        ),
        "late hyperparameters are not told": Mutant(
            "opening", "return [self._commands.hyper(event.step, hyper)]", "return []"
        ),
        "a drain's last round goes for one bucket": Mutant(
            "two buckets, both late", "while bucket.fired < last:", "if bucket.fired < last and not index:"
        ),
        "steps are not re-based at a drain": Mutant(
            "two buckets", "self._positions.begin_anew(self.ranks, last)", "self._positions.begin_anew(self.ranks, 0)"
        ),
        "a quorum counts ranks that are done": Mutant(
            "all", "active, started, commands = self._hosts.active,", "active, started, commands = self._hosts.number,"
        ),
        "a version that is taken frees nobody": Mutant(
            "pace by rounds",
            "        return self._advance(rank, now)\n\n    def _check_finished",
            "        return []\n\n    def _check_finished",
        ),
        "a rank that is done frees nobody": Mutant(
            "steps that differ",
            "return [*self._gather(host, ready, now), *self._advance(rank, now)]",
            "return self._gather(host, ready, now)",
        ),
        "a rank that is done keeps its host waiting": Mutant(
            "a host, uneven, cut", "[*self._gather(host, ready, now), *self", "[*self"
        ),
        "a host's gradients go apart": Mutant(
            "a host",
            "self._gathering.host_steps(index) if",
            "Gathering(self._hosts, len(self._buckets)).host_steps(0) if",
        ),
        "a host is not told that its late step has ended": Mutant(
            "two hosts",
            "return [EndStep(self._optimizer, self._hosts.number[host], whole, version)]",
            "return []",
        ),
        "what a host holds back is forgotten at a drain": Mutant(
            "half of each host",
            "bucket.loaded = self._by_hosts and self._gathering.holds(index)",
            "bucket.loaded = False",
        ),
        "a host's steps are not counted anew after an end": Mutant(
            "a host", "self._gathering.begin_anew(self._hosts)", "pass"
        ),
        "a host waits for its first rank alone": Mutant(
            "a host",
            "self._gather(host, self._gathering.hold(rank, host, step, indices, bits), now)",
            "(self._gathering.hold(rank, host, step, indices, bits), self._gather(host, indices, now))[1]",
        ),
        "a rank that is done is too late": Mutant("steps that differ", "self._positions.leave(rank)", "pass"),
        "nobody is told when a grace ends": Mutant("grace", "self._wakes[index] = until", "pass"),
    },
    "gossip": {
        "two exchanges at once": Mutant("sgp", "self._flights[exchange.round] = now", "pass"),
        "an exchange is never over": Mutant("sgp", "self._flights.pop(number)", "self._flights[number]"),
        "an announced exchange goes before earlier messages": Mutant(
            "osgp", "if self._queues or not alike", "if not alike"
        ),
        "an announced exchange goes without a rank": Mutant(
            "dpsgd",
            "        alike = len",
            "        active = active & self._coming.keys()\n        alike = len",
        ),
        "announced messages go twice": Mutant("dpsgd", "if key == self._granted.get(rank)", "if False"),
        "messages of several steps go together": Mutant(
            "sgp of three ranks, uneven",
            "groups = self._groups if self._stages > 1 else self._groups[:1]",
            "groups = self._groups",
            long=True,
            part="message_queues",
        ),
        "a message goes twice": Mutant("opening", "            del queue[key]\n", "", part="message_queues"),
        "offers stay behind at a drain": Mutant("osgp", "while self._queues:", "while False:"),
        "averaged with a rank that is done": Mutant(
            "adpsgd of three ranks, uneven", "(own & self._active).difference(", "own.difference(", part="pair_requests"
        ),
        "a rank is in two pairs": Mutant(
            "adpsgd of three ranks, uneven", ".difference(asking, taken)", ".difference(asking)", part="pair_requests"
        ),
        "averaged with a rank that is no neighbour": Mutant(
            "adpsgd",
            "own = self._neighbours[place]",
            "own = frozenset(range(len(self._neighbours)))",
            part="pair_requests",
        ),
        "nobody is told who is done": Mutant(
            "opening", "return [self._retired(rank), *self._advance(now)]", "return self._advance(now)"
        ),
        "the last step of a rank that is done is wrong after a drain": Mutant(
            "cut and drain", "self._produced[rank][0] - self._bases[rank]", "self._produced[rank][0]"
        ),
        "averages are not counted anew after a drain": Mutant(
            "averages", "self._starved, self._entered):\n", "self._starved):\n"
        ),
        "an average goes without a rank": Mutant(
            "averages",
            "self._inside[index] < len(self._readiness.active)",
            "self._inside[index] < len(self._readiness.active) - 1",
        ),
        "a rank that is done counts in an average": Mutant(
            "averages that ranks go on from", "self._inside[index] -= rank in there", "pass"
        ),
        "nobody is told when an exchange goes": Mutant(
            "sgp, exchanges take time", "self._wake_at = since + self._duration", "self._wake_at = None"
        ),
    },
    "leader": {
        "two pulls of a group at once": Mutant(
            "lsgd", "return self.flight is None and 0 < self.needed", "return 0 < self.needed"
        ),
        "a pull is never over": Mutant("lsgd", "self._groups[group].flight = None", "pass"),
        "a rank that is done leads": Mutant("lsgd", "if rank not in out and self._heard", "if self._heard"),
        "a loss that is not finite leads": Mutant(
            "lsgd, one leads at times",
            "pick_leader(self._means, self._recent(group.ranks))",
            "next(iter(self._recent(group.ranks)), None)",
        ),
        "steps count for two pulls": Mutant("lsgd", "group.steps %= group.needed", "group.steps -= 1"),
        "a rank's end makes a pull due": Mutant(
            "cut and drain", "group.steps * active // max(1, group.active), active", "group.steps, active"
        ),
        "a group of one is pulled": Mutant("groups", "1 < len(self._groups[number].ranks) < len(self.ranks)", "True"),
        "a drain keeps what was counted": Mutant(
            "cut and drain", "0 if self._flush else group.steps, len", "group.steps, len"
        ),
        "a rank that is gone counts": Mutant(
            "one leaves for good", "self._leaving, self._drains = sorted(self._absent), False", "self._drains = False"
        ),
    },
}


def build(family: str, name: str) -> Machine:
    """The state machine of a family with this fault.

    Raises:
        AssertionError: the source does not have the lines that the fault is made in: write it anew.
    """
    mutant, machine = MUTANTS[family][name], MACHINES[family]
    own = machine.__module__
    where = BASE if mutant.base else f"{own.rpartition('.')[0]}.{mutant.part}" if mutant.part else own
    source = _source(where)
    assert source.count(mutant.old) == 1, f"{where} has not, or more than once: {mutant.old}"
    faulty = _load("tests.unit.mutant_part", source.replace(mutant.old, mutant.new))
    module = faulty if where == own else _load("tests.unit.mutant", _importing(_source(own), where, faulty.__name__))
    built: Machine = getattr(module, machine.__name__)
    return built


def _source(module: str) -> str:
    return Path(str(importlib.import_module(module).__file__)).read_text("utf-8")


def _importing(source: str, old: str, new: str) -> str:
    """This source, importing from another module."""
    assert source.count(f"from {old} import") == 1
    return source.replace(f"from {old} import", f"from {new} import")


def _load(name: str, source: str) -> types.ModuleType:
    """A module by this name, in place of the one before (states are pickled by it)."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module
