"""Blocks of a few steps an arm, in alternation, until their ratios are known well enough. No framework here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ...support.ratios import Ratios
from .rank import Job


class Stepper(Protocol):
    """A model under one arm."""

    def step(self) -> None:
        """Forward, backward, update."""

    def drain(self) -> None:
        """Leave nothing on its way."""

    def fresh(self) -> int | None:
        """Gradients of staleness 0 that this rank has had carried so far; None where all are fresh."""


Trainer = TypeVar("Trainer", bound=Stepper)


def by_wall_clock(job: Job, arm: Stepper, steps: int) -> dict[str, Any]:
    """An untimed step and ``steps`` timed ones. What is left on its way goes untimed: as much came in at the start."""
    job.barrier()
    arm.step()
    before = arm.fresh()
    started = time.perf_counter()
    for _ in range(steps):
        arm.step()
    elapsed = time.perf_counter() - started
    after = arm.fresh()
    arm.drain()
    fresh = steps if before is None or after is None else after - before
    return {"elapsed": elapsed, "steps": steps, "fresh": fresh}


def alternate(
    job: Job,
    make: Callable[[str, Job], Trainer],
    measure: Callable[[Job, Trainer, int], dict[str, Any]] = by_wall_clock,
) -> dict[str, Trainer]:
    """Run the plan's cycles; a cycle is one block of each arm. All arms' models live side by side.

    Args:
        make: makes an arm's model, by its name.
        measure: measures a block: ``elapsed`` seconds of so many ``steps``, and whatever else is to be recorded.

    Returns:
        The models, by arm.
    """
    plan, names = job.plan, job.plan["arms"]
    arms = {name: make(name, job) for name in names}
    ratios = Ratios(plan["baseline"])
    deadline = time.monotonic() + plan["seconds"]
    for name in names:
        measure(job, arms[name], 1)
    cycle = 0
    while True:
        first = cycle % len(names)
        seconds: dict[str, float] = {}
        for name in (*names[first:], *names[:first]):
            found = job.record({"arm": name, "cycle": cycle}, measure(job, arms[name], plan["steps"]))
            seconds[name] = sum(own["elapsed"] for own in found) / len(found)
        ratios.add(seconds)
        cycle += 1
        enough = cycle >= plan["least"] and ratios.wide(plan["judged"]) <= plan["wide"]
        if job.agree(enough or cycle >= plan["most"] or time.monotonic() > deadline):
            return arms
