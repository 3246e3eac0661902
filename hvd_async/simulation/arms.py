"""Simulates a job by the name of its arm, as the benchmarks' cases name them."""

from __future__ import annotations

from typing import Any

from hvd_async.algorithms.gossip.config import ALGORITHMS
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.simulation.eager import EagerJob
from hvd_async.simulation.gossip import GossipJob, OuterJob, PairJob, PushSumJob
from hvd_async.simulation.job import Job, Outcome, Setup
from hvd_async.simulation.leader import LeaderJob
from hvd_async.simulation.names import LEADERS, RIVALS, gossip_of, quorum_of, read_name

from . import baselines


def job_of(arm: str, setup: Setup, **options: Any) -> Job:
    """Return the job of an arm that has a state machine.

    Args:
        arm: such as "solo", "k7", "dpsgd-bf16", "local-int8-avg8", "lsgd".
        setup: what is simulated.
        options: of ``EagerJob``, ``make_plan`` or ``LeaderJob``.

    Raises:
        ValueError: there is no such arm.
    """
    name, how = read_name(arm), gossip_of(arm)
    if name.base in LEADERS:
        return LeaderJob(arm, setup, **options)
    if how is None:
        return EagerJob(arm, setup, quorum_of(name.base), compression=name.compression, **options)
    kind = ALGORITHMS[how.algorithm]
    job: type[GossipJob] = PairJob if kind.pairs else OuterJob if kind.outer is not None else PushSumJob
    return job(arm, setup, make_plan(setup.ranks, **{**how._asdict(), **options}))


def simulate(arm: str, setup: Setup, **options: Any) -> Outcome:
    """Simulate an arm, ours or a rival's, and return its figures; the arguments are those of ``job_of``."""
    if read_name(arm).base in RIVALS:
        return baselines.simulate(arm, setup)
    found = job_of(arm, setup, **options).run()
    assert found is not None
    return found
