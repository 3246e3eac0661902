"""All orders of a small job's moves, with the ranks and the coordinator of production.

Depth first: from each state that was not seen before the first move is made in place; the others are made later, from
the beginning, since neither a rank's program nor its closures can be copied. Engines run what is posted at once, which
leaves out no order of what ranks and coordinator tell each other; ``Drive.run`` draws those of posts, too.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tests.machines.driver import Drive, Move

HISTORY = {
    *("random", "ledger", "book", "log", "moves", "clock", "job", "engine", "_engine", "collectives", "changed"),
    *("_counters", "counters", "record", "rounds", "weights", "produced", "timeline", "seconds", "_wait_s", "_waited"),
    *("illegal_tried", "drains", "_staleness", "_waited_for", "_history"),
}
"""Attributes that tell how a state was come to, or are the same in all."""


class BrokenLawError(AssertionError):
    """A law is broken; the message has the moves that lead there."""


class Found(NamedTuple):
    """How large the space was: states, moves that were made, ends of jobs; and whether all of it was seen."""

    states: int
    moves: int
    ends: int
    complete: bool


class _Node(NamedTuple):
    """A state by the move that leads to it from another one."""

    before: _Node | None
    move: Move

    def path(self) -> list[Move]:
        """Return the moves from the beginning."""
        moves, node = [], self
        while node is not None:
            moves.append(node.move)
            node = node.before  # type: ignore[assignment]
        return moves[::-1]


def explore(make: Callable[[], Drive], most: int) -> Found:
    """Visit the states of a job.

    Args:
        make: the job at its beginning, with quick engines.
        most: states after which to stop.

    Raises:
        BrokenLawError: a law is broken, or no rank can move.
    """
    seen: set[bytes] = set()
    todo: list[_Node | None] = [None]
    moves = ends = 0
    while todo and len(seen) < most:
        node, drive = todo.pop(), make()
        try:
            for move in node.path() if node is not None else ():
                drive.move(move)
            while (state := fingerprint(drive)) not in seen and len(seen) < most:
                seen.add(state)
                choices = possible(drive)
                if not choices:
                    assert drive.finished, f"deadlock: {drive.machine.blocked_on()}"
                    drive.over()
                    ends += 1
                    break
                todo += [_Node(node, move) for move in choices[1:]]
                node = _Node(node, choices[0])
                drive.move(choices[0])
                moves += 1
        except Exception as error:  # (whatever a broken law raises)
            story = "".join(f"\n  {kind} {place} {name}" for kind, place, name in drive.moves)
            raise BrokenLawError(f"{type(error).__name__}: {error}\nafter{story}") from error
    return Found(len(seen), moves, ends, not todo)


def possible(drive: Drive) -> list[Move]:
    """Return all moves, time included."""
    time: list[Move] = [("time", 0, "")] if drive.machine.deadline() is not None else []
    return [*drive.possible(), *time]


def fingerprint(drive: Drive) -> bytes:
    """Return a digest of the state of a job: the same for states from which the same can happen."""
    return digest_of([vars(drive.machine), [vars(rank) for rank in drive.ranks], drive._open])


def digest_of(value: Any) -> bytes:
    """Return a digest of a value, whatever it is made of."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(value, {}):
        digest.update(b"%d:%b" % (len(part), part))
    return digest.digest()


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Yield what tells a value from others, whatever it is made of.

    Args:
        seen: values that were visited, by their ids, with their numbers. (It keeps them, so that no other gets the id.)
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
        return
    if id(value) in seen:
        yield f"#{seen[id(value)][0]}".encode()
        return
    seen[id(value)] = (len(seen), value)
    yield type(value).__name__.encode()
    if isinstance(value, np.ndarray):
        yield repr((value.shape, value.dtype)).encode()
        yield value.tobytes()
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in HISTORY:
                yield from _parts(key, seen)
                yield from _parts(each, seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(value, key=repr)).encode()
    elif isinstance(value, list | tuple | deque):
        yield str(len(value)).encode()
        for each in value:
            yield from _parts(each, seen)
    elif isinstance(value, types.FunctionType):
        yield value.__qualname__.encode()
        yield from _parts([value.__defaults__, value.__kwdefaults__], seen)
        for cell in value.__closure__ or ():
            yield from _parts(cell.cell_contents, seen)
    elif isinstance(value, types.MethodType):
        yield value.__func__.__qualname__.encode()
        yield from _parts(value.__self__, seen)
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is not None:
            yield f"{value.gi_code.co_name} {frame.f_lasti}".encode()
            yield from _parts(dict(frame.f_locals), seen)
            yield from _parts(value.gi_yieldfrom, seen)
    elif isinstance(value, Drive | type | types.ModuleType):
        pass
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _parts(getattr(value, name), seen)
    else:
        slots = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
        yield from _parts({**slots, **getattr(value, "__dict__", {})}, seen)
