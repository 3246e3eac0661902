"""The job of ``race``: trainings on the digits for the same time; the clock stops for evaluations."""

from __future__ import annotations

from hvd_async.simulation.names import waits_for_nobody

from .shared.digit_models import accuracy
from .shared.rank import Block, Job, rate
from .shared.training import Training


def run_block(job: Job, block: Block) -> None:
    """One training: stretches of it, with an evaluation after each.

    Where ranks wait for each other, all take equally many steps in a stretch; else each goes by the clock.
    """
    together = not waits_for_nobody(block["arm"])
    training = Training(job, block)
    arm, clock, curve = training.arm, training.clock, []
    compute = block["compute"] + (block["delay"] if job.rank == job.size - 1 else 0.0)

    def step(at: float) -> None:
        """One step, ``at`` seconds by the clock; the learning rate goes by that."""
        training.step(rate(block["lr"], round(1e3 * at), round(1e3 * block["seconds"])), compute)

    pace = 0.0
    """Seconds a step, where all ranks step together."""
    while block["seconds"] - clock.now > pace / 2:
        began, until = clock.now, min(block["seconds"], clock.now + block["every"])
        with training.stretch() as shown:
            if together:
                count = max(1, round((until - began) / pace)) if pace else 1
                for number in range(count):
                    step(began + (until - began) * number / count)
            else:
                while (at := shown()) < until:
                    step(at)
        pace = (clock.now - began) / count if together else 0.0
        with training.evaluation() as model:
            if job.rank == 0:
                curve.append([clock.now, accuracy(model, training.test)])
    stats = arm.stats()
    history = [[clock.at(unix), group, leader] for unix, group, leader in arm.history()]
    arm.drain()
    own = {
        "curve": curve,
        "seconds": clock.now,
        "steps": training.steps,
        "pulls": stats.get("pulls"),
        "history": history,
    }
    job.conclude(arm, block, own)
