"""The job of ``soak``: very many rounds of a small model, with random pauses, while the launcher stops processes.

Arms that gossip train over one random graph after the other, each rank taking a number of steps of its own.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import psutil
import torch

from hvd_async.topology import Edge, Topology
from scripts.benchmarks.support.names import gossip_of

from .arm import Arm
from .rank import Job
from .tasks import layers

LOOKS = 400
"""Number of times that each rank notes its memory."""
PHASES, EDGES = 3, 0.4
"""Most phases of a random graph, and the largest share of all possible edges in addition to the connecting ones."""


class Soak:
    """One rank: a small model under an arm, and notes of this process's memory.

    Args:
        job: this rank.
        own: further arguments of the arm's optimizer.
    """

    def __init__(self, job: Job, **own: Any) -> None:
        torch.manual_seed(0)
        self.job, model, self._inputs = job, layers(16, 32, 4), torch.randn(4, 16)
        self.arm = Arm(job.plan["arm"], model, job, **own)
        self.draws = random.Random(1000 * job.plan["seed"] + job.rank)
        self._path = job.folder / f"soak.{job.rank}.jsonl"
        self._file, self._started = self._path.open("a", buffering=1), time.perf_counter()

    def step(self) -> None:
        """Take a step, perhaps after a pause."""
        plan = self.job.plan
        pause = self.draws.uniform(0.0, plan["delay"]) if self.draws.random() < plan["share"] else 0.0
        self.arm.train(lambda model: model(self._inputs).square().mean(), pause)

    def note(self, round_: float) -> None:
        """Note this process's memory at a round."""
        resident = psutil.Process().memory_info().rss
        note = {"round": round_, "mb": resident / 1e6, "s": time.perf_counter() - self._started}
        self._file.write(json.dumps(note) + "\n")

    def end(self) -> dict[str, Any]:
        """Have the launcher stop no more processes, and drain; return this rank's figures."""
        (self.job.folder / "stop").touch()
        self.arm.drain()
        notes = [json.loads(line) for line in self._path.read_text().splitlines()]
        own = {"elapsed": time.perf_counter() - self._started, "stats": self.arm.stats(), "memory": notes}
        return own | {"identical": self.arm.identical()}


def work(job: Job) -> None:
    """Run the plan."""
    if gossip_of(job.plan["arm"]):
        gossip(job)
        return
    plan, soak = job.plan, Soak(job)
    every = max(1, plan["rounds"] // LOOKS)
    for step in range(plan["rounds"]):
        soak.step()
        if step % every == 0:
            soak.note(int(soak.arm.stats()["rounds"]))
        if (step + 1) % plan["drain_every"] == 0:
            soak.arm.drain()  # it raises if a gradient was lost
    job.record({"arm": plan["arm"]}, soak.end())


# -- gossip ------------------------------------------------------------------------------------------------------------


def random_graph(size: int, symmetric: bool, draws: random.Random) -> Topology:
    """Return a way around all ranks in a random order, and a random share of all other edges, dealt to a few phases.

    Args:
        size: number of ranks.
        symmetric: whether each edge goes both ways, in the same phases.
        draws: the same on all ranks.
    """
    order = draws.sample(range(size), size)
    edges: list[Edge] = [(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True) if a != b]
    share = draws.uniform(0.0, EDGES)
    edges += [(a, b) for a in range(size) for b in range(size) if a != b and draws.random() < share]
    phases: list[set[Edge]] = [set() for _ in range(draws.randint(1, PHASES))]
    for a, b in edges:
        draws.choice(phases).update([(a, b), (b, a)] if symmetric else [(a, b)])
    return Topology("random", size, tuple(map(frozenset, phases)))


def gossip(job: Job) -> None:
    """Train over one graph after the other until there were enough rounds: steps of all ranks, or pairings."""
    plan, graphs = job.plan, random.Random(job.plan["seed"])
    pairs, symmetric = plan["arm"].startswith("adpsgd"), plan["arm"].startswith(("dpsgd", "adpsgd"))
    options: dict[str, Any] = {"mixing": "metropolis"} if plan["arm"].startswith("dpsgd") else {}
    soak = Soak(job, topology=random_graph(job.size, symmetric, graphs), **options)
    unit, worth = ("averagings", job.size / 2) if pairs else ("steps", 1.0)  # (rounds that one of every rank makes)
    every = max(1, round(plan["rounds"] / worth / LOOKS))
    off: list[float] = []
    same, done = True, 0.0
    while done < plan["rounds"]:
        about = plan["rounds"] / plan["graphs"] / worth
        for _ in range(max(1, round(about * soak.draws.uniform(1 - plan["uneven"], 1 + plan["uneven"])))):
            soak.step()
            stats = soak.arm.stats()
            if stats["steps"] % every == 0:
                soak.note(stats[unit] * worth)
        soak.arm.optimizer.cut()  # nothing is on its way: push-sum weights sum up to the number of ranks
        off.append(float(abs(sum(job.gather(soak.arm.stats()["push_sum_weight"])) - job.size)))
        soak.arm.optimizer.switch(topology=random_graph(job.size, symmetric, graphs))  # drains
        same = soak.arm.identical() and same
        done = float(sum(job.gather(soak.arm.stats()[unit])) * worth / job.size)
    found = soak.end()
    found["identical"] = found["identical"] and same
    job.record({"arm": plan["arm"], "done": round(done), "graphs_used": len(off), "weights_off": off}, found)
