"""Every interleaving of a small job: model ranks around a coordinator's state machine, explored without chance.

A world (``explore_world``) is a state machine and its ranks. An action takes one thing from one queue, lets one
collective land on one rank, lets one training thread go on, or lets time pass. ``explore`` follows every action from
every state, and visits equal states once.

**Reduction.** ``sure`` names an action that commutes with all that others may do before it, and can be taken at once
without loss (a persistent set of one). No state occurs twice on a path, since every action consumes something, so
nothing is put off without end. ``reduced=False`` switches this off; a test compares the two.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.unit.explore_world import Action, World


class BrokenLawError(AssertionError):
    """A law is broken; the message has the actions that lead there."""


class Found(NamedTuple):
    """How large the space was: states that were kept, actions that were taken, paths' ends."""

    states: int
    actions: int
    ends: int
    complete: bool


def explore(make: Callable[[], World], reduced: bool = True, most: int | None = None, seed: int = 0) -> Found:
    """Visit every state of a world, depth first.

    Args:
        make: the world at its beginning.
        reduced: whether to take what is ``sure`` at once, and alone.
        most: states after which to stop; the order of actions is then drawn by ``seed``.

    Raises:
        BrokenLawError: a law is broken.
    """
    world = make()
    draw = random.Random(seed) if most is not None else None
    first = world.save()
    seen: dict[bytes, tuple[bytes, tuple[Action, ...]]] = {_digest(first): (b"", ())}
    stack = [first]
    actions = ends = 0
    while stack and (most is None or len(seen) < most):
        state = stack.pop()
        here = _digest(state)
        world.load(state)
        choices = world.actions()
        if draw is not None:
            draw.shuffle(choices)
        path: list[Action] = []
        try:
            if not choices:
                ends += 1
                world.check_over()
            for number, action in enumerate(choices):
                if number:
                    world.load(state)
                path = [action]
                world.act(action)
                while reduced and (sure := world.sure()) is not None:
                    path.append(sure)
                    world.act(sure)
                actions += len(path)
                after = world.save()
                digest = _digest(after)
                if digest not in seen:
                    seen[digest] = (here, tuple(path))
                    stack.append(after)
        except Exception as error:  # (whatever a wrong machine raises)
            raise BrokenLawError(_story(seen, here, path, error)) from error
    return Found(len(seen), actions, ends, not stack)


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()


def _story(seen: dict[bytes, tuple[bytes, tuple[Action, ...]]], last: bytes, path: list[Action], error: Any) -> str:
    steps: list[Action] = list(path)
    while last:
        last, before = seen[last]
        steps[:0] = before
    told = "\n".join("  " + " ".join(map(str, step)) for step in steps)
    return f"{type(error).__name__}: {error}\nafter\n{told}"
