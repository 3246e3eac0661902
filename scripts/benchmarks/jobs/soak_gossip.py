"""The job of ``soak`` for gossip: random graphs, pauses and numbers of steps, while the launcher stops processes."""

from __future__ import annotations

import random
from typing import Any

import torch

from ..support.random_graphs import random_graph
from .shared.arm import Arm, mean_square
from .shared.rank import Job
from .soak import LOOKS, Notes, pause, small


class Soak:
    """One rank of it.

    Args:
        job: this rank.
    """

    def __init__(self, job: Job) -> None:
        self.job, plan = job, job.plan
        torch.manual_seed(0)
        model, self._inputs = small()
        self._graphs = random.Random(plan["seed"])  # the same on all ranks
        self._draws = random.Random(1000 * plan["seed"] + job.rank + 1)
        options: dict[str, Any] = {"mixing": "metropolis"} if plan["arm"].startswith("dpsgd") else {}
        self._pairs = plan["arm"].startswith("adpsgd")
        self.arm = Arm(plan["arm"], model, job, topology=self._graph(), **options)
        self._notes = Notes(job)
        self._worth = job.size / 2 if self._pairs else 1.0
        """Rounds that a step, or an averaging, of every rank stands for."""

    def _graph(self) -> Any:
        symmetric = self.job.plan["arm"].startswith(("dpsgd", "adpsgd"))
        return random_graph(self.job.size, symmetric, self._graphs)

    def train(self, steps: int) -> None:
        """About so many steps, a number of this rank's own."""
        plan, every = self.job.plan, max(1, round(self.job.plan["rounds"] / self._worth / LOOKS))
        for _ in range(max(1, round(steps * self._draws.uniform(1 - plan["uneven"], 1 + plan["uneven"])))):
            self.arm.train(mean_square(self._inputs), pause(self._draws, plan))
            stats = self.arm.stats()
            if stats["steps"] % every == 0:
                self._notes.add(stats["averagings" if self._pairs else "steps"] * self._worth)

    def weights_off(self) -> float:
        """Collective: by how much the push-sum weights' sum misses the number of ranks, with nothing on its way."""
        self.arm.optimizer.cut()
        return float(abs(sum(self.job.gather(self.arm.stats()["push_sum_weight"])) - self.job.size))

    def done(self) -> float:
        """Collective: rounds of all so far."""
        stats = self.arm.stats()
        if self._pairs:
            return float(sum(self.job.gather(stats["averagings"])) / 2)
        return float(sum(self.job.gather(stats["steps"])) / self.job.size)

    def run(self) -> None:
        """Train over one graph after the other until there were enough rounds."""
        plan = self.job.plan
        off: list[float] = []
        identical, done = True, 0.0
        while done < plan["rounds"]:
            self.train(max(1, round(plan["rounds"] / plan["graphs"] / self._worth)))
            off.append(self.weights_off())
            self.arm.optimizer.switch(topology=self._graph())  # drains
            identical = identical and self.arm.identical()
            done = self.done()
        (self.job.folder / "stop").touch()  # no more stopping: what follows is not part of it
        own = {"elapsed": self._notes.elapsed, "stats": self.arm.stats(), "identical": identical}
        block = {"arm": plan["arm"], "done": round(done), "graphs_used": len(off), "weights_off": off}
        self.job.record(block, {**own, "memory": self._notes.all})


def work(job: Job) -> None:
    """Run the plan."""
    Soak(job).run()
