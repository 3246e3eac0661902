"""The coordinator: a thread or process of rank 0 that runs the state machines and sends their commands in one order.

It also monitors the ranks. When a connection ends without ``Leaving``, its rank is lost, and all ranks receive its
number and host. If ranks wait for a live rank for longer than ``warn_after``, rank 0's stderr names it, repeatedly.

A failure of Horovod on a rank is only a symptom: it does not tell which rank caused it. A rank that has stopped, or is
cut off, does not answer; the others only see that a collective has failed. So each rank on which a collective fails
reports to the coordinator, which calls the roll.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hvd_async.errors import ProtocolError, ranks_text
from hvd_async.runtime.interfaces import Gone, Hub
from hvd_async.runtime.log import printable, warn
from hvd_async.runtime.machine import StateMachine, Waiting, fault_of, registrations_due, to_register_before
from hvd_async.runtime.protocol import (
    CallRoll,
    Close,
    Command,
    CommitsMade,
    CountCommits,
    Event,
    Failed,
    Family,
    Finished,
    Hello,
    HostsChanged,
    JobFailed,
    Leaving,
    NoSuchOptimizer,
    OptimizerDeleted,
    OptimizerEvent,
    Present,
    RankLost,
    Registered,
    StopAtCommit,
    Welcome,
)

MOST_OPTIMIZERS = 1024
"""Limit of optimizers at a time."""
ENDS = (Registered, Finished, OptimizerDeleted, NoSuchOptimizer)
"""Events that change which ranks have an optimizer, or have finished with it."""
TOGETHER = 64
"""Events that are handled before timers and warnings are checked."""
AT_ENDS = 15.0
"""Seconds, at most, until the first warning about a drain or another call that every rank must make: ranks that have
not made it may train on for long."""
ROLL_CALL_MARGIN = 5.0
"""Seconds that a silent rank has to answer a roll call, in addition to the limit of the hub."""


class Coordinator:
    """Event loop that runs until every rank has left, a rank is lost, or ``stop()`` is called.

    Args:
        hub: the coordinator's end of the channels; the coordinator closes it.
        families: the families of algorithms that ranks may run.
        hosts: the host of each rank, in order.
        warn_after: seconds of waiting for a rank before each warning.
        connect_timeout: seconds within which every rank must have connected; one that has not is lost.
        dead_after: seconds of silence before the hub declares a rank lost; also the minimum duration of a roll call.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        hub: Hub,
        families: Sequence[Family],
        hosts: Sequence[str],
        warn_after: float = 60.0,
        connect_timeout: float = 60.0,
        dead_after: float = 25.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds = {family.config: family.state_machine for family in families}
        self._hub, self._hosts, self._size = hub, [printable(host) for host in hosts], len(hosts)
        self._warn_after, self._connect_timeout, self._clock = warn_after, connect_timeout, clock
        self._dead_after = dead_after
        self._commits = CommitCounts(self._size)
        self._hosts_changed = False
        self._connected: set[int] = set()
        self._started = clock()
        self._left: set[int] = set()
        self._absent: dict[int, str] = {}
        """Ranks that had left when their connection ended, with the reason."""
        self._roll: RollCall | None = None
        self._machines: dict[int, StateMachine[Any]] = {}
        self._groups: dict[tuple[int, ...], dict[int, StateMachine[Any]]] = {}
        """The machines of each group of ranks."""
        self._group_of: dict[int, dict[int, StateMachine[Any]]] = {}
        """The group of each optimizer, by its number."""
        self._ended: set[int] = set()
        """Numbers of optimizers that no rank has any longer; engines may still report their last collectives."""
        self._waits: dict[tuple[int | None, bool], tuple[Waiting | None, float, bool]] = {}
        """By number of an optimizer, None for the job, and whether it is a call: for what ranks wait, since when, and
        whether rank 0 has said so."""
        self._at_ends = min(AT_ENDS, warn_after)
        self._looked_at = float("-inf")
        self._stopping = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self.run, name="hvd_async-coordinator", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the thread and close the hub, whatever the ranks are doing."""
        self._stopping.set()
        self._hub.wake()
        self._thread.join(timeout)

    def join(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for the coordinator to end; longer if a roll call is under way."""
        self._thread.join(timeout)
        if self._roll is not None:
            self._thread.join(max(self._roll.limit, SETTLE) + timeout)

    # -- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the event loop in this thread."""
        try:
            while not self._over and not self._stopping.is_set():
                now = self._handle(self._hub.receive(self._timeout()))
                for machine in self._machines.values():
                    deadline = machine.deadline()
                    if deadline is not None and deadline <= now:
                        self._command(machine, machine.tick(now))
                self._warn(now)
                if self._roll is not None and now >= self._roll.deadline() and not self._over:
                    self._judge(self._roll)
        except Exception as error:
            warn(f"the coordinator failed: {type(error).__name__}: {error}")
            self._lose(0, f"has a coordinator that failed with {type(error).__name__}: {error}")
            raise
        finally:
            self._hub.close()

    def _handle(self, item: tuple[Sequence[int], Event | Gone] | None) -> float:
        """Handle an event, and a limited number of others that have come with it; return the time afterwards."""
        now, handled = self._clock(), 0
        while item is not None and not self._over:
            ranks, event = item
            machine = self._machines.get(event.optimizer) if isinstance(event, OptimizerEvent) else None
            if machine is not None and not isinstance(event, ENDS):  # nearly all events
                self._dispatch(machine, ranks, event, now)  # type: ignore[arg-type]
            else:
                for rank in ranks:
                    if not self._over:
                        self._on_event(rank, event, now)
            handled += len(ranks)
            if not self._hub.has_more:
                self._hub.flush()  # (before timers and warnings: ranks wait for it)
                break
            if handled >= TOGETHER:
                break
            item, now = self._hub.receive(0.0), self._clock()
        return now

    def _timeout(self) -> float:
        deadlines = [d for d in (machine.deadline() for machine in self._machines.values()) if d is not None]
        deadlines += [] if self._roll is None else [self._roll.deadline()]
        until = min(deadlines, default=float("inf")) - self._clock()
        longest = self._at_ends / 4 if len(self._connected) == self._size else 1.0
        return max(0.0, min(until, longest))

    def _on_event(self, rank: int, event: Event | Gone, now: float) -> None:
        match event:
            case Gone() if self._roll is not None and rank in self._roll.errors:
                pass  # (it has reported the failure of Horovod on which it ends)
            case Gone(reason) if rank in self._left and self._roll is None:
                self._absent[rank] = reason  # (lost only if Horovod fails)
            case Gone(reason):
                self._lose(rank, reason)
            case Failed(error, horovod):
                if horovod:
                    self._call_roll(rank, error, now)
                else:
                    self._lose(rank, f"failed: {error}")
            case Present():
                if self._roll is not None:
                    self._roll.present(rank)
            case Hello():
                if rank in self._connected:
                    self._lose(rank, "broke the protocol: it said hello twice")
                self._connected.add(rank)
                if len(self._connected) == self._size:
                    self._send_all(Welcome())
                    self._count_commits()
            case HostsChanged():
                self._hosts_changed = True
                self._count_commits()
            case CommitsMade(made):
                commands = self._commits.count(rank, made)
                if commands is None:
                    self._lose(rank, "broke the protocol: it reported commits without a request")
                for command in commands or ():
                    self._send_all(command)
            case Leaving():
                self._left.add(rank)
                self._check_left((rank,), self._machines)
                if self._over:
                    return
                if len(self._left) == self._size:
                    self._send_all(Close())
                    self._over = True
            case Registered() if (fault := fault_of(rank, event, self._size)) is not None:
                self._lose(rank, f"broke the protocol: {fault}")
            case _:
                self._on_optimizer_event(rank, event, now)

    def _count_commits(self) -> None:
        """Ask all ranks for their commits, once all are connected and hosts have come or gone."""
        if self._hosts_changed and len(self._connected) == self._size:
            for command in self._commits.ask():
                self._send_all(command)

    def _on_optimizer_event(self, rank: int, event: OptimizerEvent, now: float) -> None:
        """Handle an event that begins or ends an optimizer on a rank, or whose optimizer has not begun or has ended.

        The first event of an optimizer specifies the ranks that share it, and its family.
        """
        machine = self._machines.get(event.optimizer)
        if event.optimizer in self._ended:
            return
        if machine is None:
            if not isinstance(event, Registered):
                what = f"{type(event).__name__} before it registered optimizer {event.optimizer}"
                self._lose(rank, f"broke the protocol: rank {rank} sent {what}")
                return
            if len(self._machines) >= MOST_OPTIMIZERS:
                self._lose(rank, f"broke the protocol: it registered more than {MOST_OPTIMIZERS} optimizers")
                return
            kind = self._kinds[type(event.config)]
            machine = kind(event.optimizer, event.members or range(self._size))
            self._machines[event.optimizer] = machine
            self._group_of[event.optimizer] = self._groups.setdefault(machine.ranks, {})
            self._group_of[event.optimizer][event.optimizer] = machine
        if isinstance(event, Registered) and not machine.shares(rank):
            self._break(
                f"rank {rank} shares optimizer {event.optimizer} with {event.members or 'all ranks'}, and others "
                f"share it with {list(machine.ranks)}: pass the same process_set on every rank of it"
            )
            return
        group = self._group_of[event.optimizer]
        if isinstance(event, Finished):
            self._ask(to_register_before(rank, machine, group.values()))
        self._dispatch(machine, (rank,), event, now)
        if self._over:
            return
        if not machine.present:
            del self._machines[event.optimizer], self._group_of[event.optimizer], group[event.optimizer]
            self._ended.add(event.optimizer)
        self._ask(registrations_due(machine, group.values()))
        if isinstance(event, Registered):
            self._check_left(self._left, {event.optimizer: machine})

    def _ask(self, due: list[tuple[StateMachine[Any], int]]) -> None:
        """Ask ranks to register optimizers."""
        for machine, rank in due:
            self._command(machine, machine.ask_to_register(rank))

    def _dispatch(self, machine: StateMachine[Any], ranks: Sequence[int], event: OptimizerEvent, now: float) -> None:
        """Let the state machine of an optimizer handle an event of several ranks."""
        for rank in ranks:
            try:
                commands = machine.handle(rank, event, now)
            except ProtocolError as error:
                self._lose(rank, f"broke the protocol: {error}")
                return
            except Exception as error:  # noqa: BLE001  no message of a rank may end the coordinator
                what = f"{type(event).__name__}, which cannot be handled ({type(error).__name__}: {error})"
                self._lose(rank, f"broke the protocol: it sent {what}")
                return
            if commands:
                self._command(machine, commands)
        if (notice := machine.take_notice()) is not None:
            warn(f"optimizer {event.optimizer}, {notice}")

    def _check_left(self, ranks: Collection[int], machines: Mapping[int, StateMachine[Any]]) -> None:
        """Declare lost a rank that has left without registering an optimizer that others wait in."""
        for number, machine in machines.items():
            for rank in ranks:
                if machine.awaits_registration_of(rank):
                    self._lose(rank, f"left without a step or drain() of optimizer {number}, which others wait for")
                    return

    def _command(self, machine: StateMachine[Any], commands: list[Command]) -> None:
        """Send the commands of a state machine, each to its recipients."""
        for command in commands:
            self._hub.send(machine.recipients(command), command)

    def _send_all(self, command: Command) -> None:
        self._hub.send(range(self._size), command)

    def _call_roll(self, rank: int, error: str, now: float) -> None:
        """Ask all ranks whether they are alive, as Horovod has failed on ``rank``, which may not be the cause."""
        if self._roll is None:
            self._roll = RollCall(range(self._size), now, self._dead_after + ROLL_CALL_MARGIN)
            self._send_all(CallRoll())
        self._roll.present(rank, printable(error))
        for absent, reason in self._absent.items():
            self._lose(absent, reason)
            return

    def _judge(self, roll: RollCall) -> None:
        """At the end of a roll call, declare lost a rank that has not answered; without one, end the job anyway."""
        rank, error = next(iter(roll.errors.items()))
        said = f"a collective failed on rank {rank} on host {self._hosts[rank]} ({error})"
        if roll.missing:
            self._lose(min(roll.missing), f"has not answered for {roll.limit:g} s since {said}")
        else:
            self._break(f"{said}, and the job cannot continue; all ranks answer, so none is known to be lost")

    def _break(self, problem: str) -> None:
        """End the job for a reason for which no rank is known to be responsible."""
        problem = printable(problem)
        warn(problem)
        self._send_all(JobFailed(problem))
        self._over = True

    def _lose(self, rank: int, reason: str) -> None:
        """End the job, as ``rank`` is lost; report to all ranks what they were waiting for."""
        if self._over:
            return
        reason = printable(reason)
        context = "; ".join(
            f"optimizer {number} was waiting for {blocked[0]}, {ranks_text(blocked[1])} missing"
            for number, machine in self._machines.items()
            if (blocked := machine.blocked_on()) is not None
        )
        host = self._hosts[rank]
        warn(f"rank {rank} on host {host} {reason}{f' ({context})' if context else ''}")
        handed_over = {number: machine.handed_over() for number, machine in self._machines.items()}
        self._send_all(RankLost(rank, host, reason, context, handed_over))
        self._over = True

    # -- warnings ---------------------------------------------------------------------------------------------

    def _warn(self, now: float) -> None:
        if len(self._connected) < self._size:
            if now - self._started > self._connect_timeout:
                missing = min(set(range(self._size)) - self._connected)
                self._lose(missing, f"did not connect within {self._connect_timeout:g} s")
            return
        if now - self._looked_at < self._at_ends / 8:
            return
        self._looked_at = now
        for machine in self._machines.values():
            self._command(machine, machine.roll_call(now - self._warn_after / 8))
        for key, waiting in self._open_waits():
            seen, since, said = self._waits.get(key, (None, now, False))
            if waiting is None or seen != waiting:
                self._waits[key] = (waiting, now, False)
                continue
            what, ranks, callers = waiting
            limit = self._at_ends if callers and not said else self._warn_after
            if now - since >= limit:
                names = ", ".join(f"{rank} ({self._hosts[rank]})" for rank in sorted(ranks))
                inside = f", in which {ranks_text(callers)} wait(s)," if callers else ""
                warn(
                    f"{what}{inside} has waited {limit:.0f} s more for rank(s) {names}: alive, but slow or not calling "
                    f"step()/drain(). Waiting on. Every rank must call drain(), and collectives of its own, equally "
                    f"often."
                )
                self._waits[key] = (waiting, now, True)

    def _open_waits(self) -> Iterator[tuple[tuple[int | None, bool], Waiting | None]]:
        """Yield the waits of each optimizer, and that of the job: keys of ``_waits``, and for what ranks wait.

        A call in progress is listed separately: ranks that have not made it continue to step, and wait for others.
        """
        for number, machine in self._machines.items():
            blocked, call = machine.blocked_on(), machine.call_in_progress()
            whose = f" of optimizer {number}"
            yield (number, True), None if call is None else call._replace(what=f"{call.what}{whose}")
            if blocked is None or (call is not None and blocked == (call.what, call.missing)):
                yield (number, False), None
            else:
                yield (number, False), Waiting(f"{blocked[0]}{whose}", blocked[1], frozenset())
        missing = frozenset(range(self._size)) - self._left
        yield (None, False), Waiting("the job's end", missing, frozenset()) if self._left else None


# -- roll call ------------------------------------------------------------------------------------------------

SETTLE = 2.0
"""Minimum seconds of a roll call: a rank that fails reports this itself, possibly just after it has answered."""


class RollCall:
    """Roll call: the ranks that still answer, after Horovod has failed on some rank. Pure: time is an argument.

    Args:
        ranks: the ranks that have to answer.
        now: the time of its start (s).
        limit: seconds in which ranks have to answer.

    Attributes:
        missing: the ranks that have not answered.
        errors: Horovod's error on each rank that has reported one, in the order of the reports.
        limit: the argument.
    """

    def __init__(self, ranks: Collection[int], now: float, limit: float) -> None:
        self.missing = set(ranks)
        self.errors: dict[int, str] = {}
        self.limit = limit
        self._began = now

    def present(self, rank: int, error: str | None = None) -> None:
        """Note that ``rank`` has answered, or has reported that a collective failed there."""
        self.missing.discard(rank)
        if error is not None:
            self.errors.setdefault(rank, error)

    def deadline(self) -> float:
        """Return the time (s) at which it ends, if no further rank answers."""
        return self._began + (max(self.limit, SETTLE) if self.missing else SETTLE)


# -- commits of elastic training ------------------------------------------------------------------------------


class CommitCounts:
    """Number of commits of each rank, which determine the commit at which all ranks stop.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked = False
        self._made: dict[int, int] = {}

    def ask(self) -> list[Command]:
        """Return the request to all ranks after hosts have come or gone; nothing if it was sent before."""
        if self._asked:
            return []
        self._asked = True
        return [CountCommits()]

    def count(self, rank: int, made: int) -> list[Command] | None:
        """Note a rank's answer; return the commands to all ranks, or None if the rank was not asked."""
        if not self._asked or rank in self._made:
            return None
        self._made[rank] = made
        return [StopAtCommit(max(self._made.values()) + 1)] if len(self._made) == self._size else []
