"""The coordinator: a thread or process of rank 0 that feeds the state machines and sends their commands, in one order.

It also watches. When a connection ends without ``Leaving``, its rank is lost, and all ranks receive its number and
host. A rank that is alive but waited for longer than ``warn_after`` is named on rank 0's stderr, again and again.

When Horovod has failed on a rank, that is a symptom, and does not say which rank is to blame. A rank that has stopped,
or is cut off, does not answer; the others only see that a collective has failed. So each rank on which one fails
reports to the coordinator, which calls the roll.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hvd_async.errors import ProtocolError, ranks_text
from hvd_async.runtime.interfaces import Gone, Hub
from hvd_async.runtime.log import printable, warn
from hvd_async.runtime.machine import StateMachine, fault_of, registrations_due, to_register_before
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
"""Optimizers at a time."""
ENDS = (Registered, Finished, OptimizerDeleted, NoSuchOptimizer)
"""Events that change which ranks have an optimizer, or have finished with it."""
TOGETHER = 64
"""Events that are handled before timers and warnings are looked at."""
ROLL_CALL_MARGIN = 5.0
"""Seconds that a silent rank has to answer a roll call, beyond the limit of the hub."""


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
        """The same, by the number of an optimizer."""
        self._ended: set[int] = set()
        """Numbers of optimizers that no rank has any more; engines may still report their last collectives."""
        self._waits: dict[str, tuple[object, float]] = {}
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
        """Run in this thread."""
        try:
            while not self._over and not self._stopping.is_set():
                now = self._handle(self._hub.receive(self._timeout()))
                for machine in self._machines.values():
                    deadline = machine.deadline()
                    if deadline is not None and deadline <= now:
                        self._command(machine, machine.tick(now))
                self._warn(now)
                self._judge(now)
        except Exception as error:
            warn(f"the coordinator failed: {type(error).__name__}: {error}")
            self._lose(0, f"has a coordinator that failed with {type(error).__name__}: {error}")
            raise
        finally:
            self._hub.close()

    def _handle(self, item: tuple[Sequence[int], Event | Gone] | None) -> float:
        """Handle an event and others that have come with it, a limited number; return the time then."""
        now, handled = self._clock(), 0
        while item is not None and not self._over:
            ranks, event = item
            machine = self._machines.get(event.optimizer) if isinstance(event, OptimizerEvent) else None
            if machine is not None and not isinstance(event, ENDS):  # nearly all are such
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
        longest = self._warn_after / 4 if len(self._connected) == self._size else 1.0
        return max(0.0, min(until, longest))

    def _on_event(self, rank: int, event: Event | Gone, now: float) -> None:
        match event:
            case Gone(reason):
                self._on_connection_ended(rank, reason)
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
                    self._send_all([Welcome()])
                    self._count_commits()
            case HostsChanged():
                self._hosts_changed = True
                self._count_commits()
            case CommitsMade(made):
                commands = self._commits.count(rank, made)
                if commands is None:
                    self._lose(rank, "broke the protocol: it reported commits without a request")
                else:
                    self._send_all(commands)
            case Leaving():
                self._left.add(rank)
                self._check_left(rank)
                if self._over:
                    return
                if len(self._left) == self._size:
                    self._send_all([Close()])
                    self._over = True
            case Registered() if (fault := fault_of(rank, event, self._size)) is not None:
                self._lose(rank, f"broke the protocol: {fault}")
            case _:
                self._on_optimizer_event(rank, event, now)

    def _count_commits(self) -> None:
        """Ask all ranks for their commits, once all are connected and hosts have come or gone."""
        if self._hosts_changed and len(self._connected) == self._size:
            self._send_all(self._commits.ask())

    def _on_optimizer_event(self, rank: int, event: OptimizerEvent, now: float) -> None:
        """Handle an event that begins or ends an optimizer on a rank, or whose optimizer has not begun or has ended.

        The first event of an optimizer says which ranks share it, and what it is.
        """
        machine = self._machines.get(event.optimizer)
        if event.optimizer in self._ended:
            return
        if machine is None:
            if not isinstance(event, Registered):
                what = f"{type(event).__name__} before it opened optimizer {event.optimizer}"
                self._lose(rank, f"broke the protocol: rank {rank} sent {what}")
                return
            if len(self._machines) >= MOST_OPTIMIZERS:
                self._lose(rank, f"broke the protocol: it opened an optimizer beside {MOST_OPTIMIZERS} others")
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
        if machine.over:
            del self._machines[event.optimizer], self._group_of[event.optimizer], group[event.optimizer]
            self._ended.add(event.optimizer)
        self._ask(registrations_due(machine, group.values()))
        if isinstance(event, Registered):
            self._check_left_of(event.optimizer, machine)

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
            except Exception as error:  # noqa: BLE001  whatever a rank says, the coordinator does not fall over it
                what = f"{type(event).__name__}, which cannot be handled ({type(error).__name__}: {error})"
                self._lose(rank, f"broke the protocol: it sent {what}")
                return
            if commands:
                self._command(machine, commands)
        if (notice := machine.take_notice()) is not None:
            warn(f"optimizer {event.optimizer}, {notice}")

    def _check_left(self, rank: int) -> None:
        """Lose a rank that has left without registering an optimizer that others wait in."""
        for number, machine in self._machines.items():
            if machine.awaits_registration_of(rank):
                self._lose_unopened(rank, number)
                return

    def _check_left_of(self, number: int, machine: StateMachine[Any]) -> None:
        """Lose a rank that had left before the first rank has registered this optimizer."""
        if machine.first_opened:
            for rank in self._left:
                if machine.awaits_registration_of(rank):
                    self._lose_unopened(rank, number)
                    return

    def _lose_unopened(self, rank: int, number: int) -> None:
        self._lose(rank, f"left without a step or drain() of optimizer {number}, which others wait for")

    def _command(self, machine: StateMachine[Any], commands: list[Command]) -> None:
        """Send the commands of a state machine, each to its recipients."""
        for command in commands:
            self._send([command], machine.recipients(command))

    def _send_all(self, commands: list[Command]) -> None:
        self._send(commands, range(self._size))

    def _send(self, commands: list[Command], ranks: Sequence[int]) -> None:
        for command in commands:
            self._hub.send(ranks, command)

    def _on_connection_ended(self, rank: int, reason: str) -> None:
        """Lose the rank of a connection that has ended; if the rank has left, only once Horovod fails."""
        if self._roll is not None and rank in self._roll.errors:
            return
        if rank in self._left and self._roll is None:
            self._absent[rank] = reason
        else:
            self._lose(rank, reason)

    def _call_roll(self, rank: int, error: str, now: float) -> None:
        """Ask all ranks whether they are there, as Horovod has failed on ``rank``, which may not be to blame."""
        if self._roll is None:
            self._roll = RollCall(range(self._size), now, self._dead_after + ROLL_CALL_MARGIN)
            self._send_all([CallRoll()])
        self._roll.present(rank, printable(error))
        for absent, reason in self._absent.items():
            self._lose(absent, reason)
            return

    def _judge(self, now: float) -> None:
        """At the end of a roll call, lose a rank that has not answered; if all have, blame none."""
        roll = self._roll
        if roll is None or self._over or now < roll.deadline():
            return
        rank, error = next(iter(roll.errors.items()))
        said = f"Horovod failed on rank {rank} on host {self._hosts[rank]} ({error})"
        if roll.missing:
            self._lose(min(roll.missing), f"has not answered for {roll.limit:g} s since {said}")
        else:
            self._break(f"{said}, and the job cannot go on; all ranks answer, so none is known to be lost")

    def _break(self, problem: str) -> None:
        """End the job with a reason, where no rank is known to be to blame."""
        problem = printable(problem)
        warn(problem)
        self._send_all([JobFailed(problem)])
        self._over = True

    def _lose(self, rank: int, reason: str) -> None:
        """End the job as ``rank`` is lost; tell all ranks what was under way."""
        if self._over:
            return
        reason = printable(reason)
        context = "; ".join(
            f"optimizer {number} was waiting for {what}"
            for number, machine in self._machines.items()
            if (what := self._waiting_text(machine)) is not None
        )
        host = self._hosts[rank]
        warn(f"rank {rank} on host {host} {reason}{f' ({context})' if context else ''}")
        handed_over = {number: machine.handed_over() for number, machine in self._machines.items()}
        self._send_all([RankLost(rank, host, reason, context, handed_over)])
        self._over = True

    # -- warnings ---------------------------------------------------------------------------------------------

    @staticmethod
    def _waiting_text(machine: StateMachine[Any]) -> str | None:
        waiting = machine.blocked_on()
        return None if waiting is None else f"{waiting[0]}, {ranks_text(waiting[1])} missing"

    def _warn(self, now: float) -> None:
        if len(self._connected) < self._size:
            if now - self._started > self._connect_timeout:
                missing = min(set(range(self._size)) - self._connected)
                self._lose(missing, f"did not connect within {self._connect_timeout:g} s")
            return
        if now - self._looked_at < self._warn_after / 8:
            return
        self._looked_at = now
        for machine in self._machines.values():
            self._send(machine.roll_call(now - self._warn_after / 8), machine.ranks)
        waits = {f" of optimizer {number}": machine.blocked_on() for number, machine in self._machines.items()}
        waits[""] = ("the job's end", frozenset(range(self._size)) - self._left) if self._left else None
        for whose, waiting in waits.items():
            seen, since = self._waits.get(whose, (None, now))
            if waiting is None or seen != waiting:
                self._waits[whose] = (waiting, now)
            elif now - since >= self._warn_after:
                what, ranks = waiting
                names = ", ".join(f"{rank} ({self._hosts[rank]})" for rank in sorted(ranks))
                warn(
                    f"{what}{whose} has waited {self._warn_after:.0f} s more for rank(s) {names}: "
                    f"alive, but slow or not calling step()/drain(). Waiting on."
                )
                self._waits[whose] = (waiting, now)


# -- roll call ------------------------------------------------------------------------------------------------

SETTLE = 2.0
"""Seconds that a roll call takes at least: a rank that fails reports it itself, maybe just after it has answered."""


class RollCall:
    """A roll call: which ranks still answer, after Horovod has failed on some rank? Pure: time is an argument.

    Args:
        ranks: the ranks that have to answer.
        now: when it begins (s).
        limit: seconds that ranks have to answer.

    Attributes:
        missing: the ranks that have not answered.
        errors: Horovod's error on each rank that has reported one, in the order of the reports.
        limit: as given.
    """

    def __init__(self, ranks: Collection[int], now: float, limit: float) -> None:
        self.missing = set(ranks)
        self.errors: dict[int, str] = {}
        self.limit = limit
        self._began = now

    def present(self, rank: int, error: str | None = None) -> None:
        """Note that ``rank`` has answered, or has reported that Horovod failed there."""
        self.missing.discard(rank)
        if error is not None:
            self.errors.setdefault(rank, error)

    def deadline(self) -> float:
        """Return when it is over, if no rank answers any more."""
        return self._began + (max(self.limit, SETTLE) if self.missing else SETTLE)


# -- commits of elastic training ------------------------------------------------------------------------------


class CommitCounts:
    """The number of commits of each rank, from which follows the commit at which all ranks stop.

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
