"""Elastic training under ``horovodrun``: any rank dies at any point, the others continue, a new one joins."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jobs.elastic_task import ALONE, DEATH, EAGER, LR, MOMENTUM, RANKS, SIZE, TOGETHER, gradient
from launch import ForkServer, Job, run_elastic

from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc

POINTS = {"torch": ("between", "backward", "before step", "step"), "tensorflow": ("between", "step")}
KINDS = ("all", "majority", "solo", "sgp", "dpsgd", "adpsgd", "local", "exact-diffusion", "noloco", "lsgd", "easgd")
STEP_BY_STEP = ("all",)
"""Kinds whose ranks are never more than a step apart; under the others they wait for some ranks, or none."""
VICTIMS = ("first", "last")


def table(framework: str) -> list[tuple[str, str, str]]:
    """Cases of a framework: every family, point and victim; all kinds and crossings in a long run."""
    if LONG_RUN:
        return list(itertools.product(KINDS, POINTS[framework], VICTIMS))
    points, victims = itertools.cycle(POINTS[framework]), itertools.cycle(VICTIMS)
    some = ("all", "sgp", "adpsgd", "easgd") if framework == "torch" else ("solo", "dpsgd")
    return [(kind, next(points), next(victims)) for kind in some]


@pytest.fixture(scope="module", params=["torch", "tensorflow"])
def cases(request: pytest.FixtureRequest, server: Callable[[str], ForkServer]) -> list[dict[str, Any]]:
    """Return each case's name, and its processes' reports by host."""
    wanted = table(request.param)
    reported = ",".join(":".join(case) for case in wanted)
    job = run_elastic(
        "elastic.py",
        RANKS,
        server=server(request.param),
        args=("--framework", request.param, "--cases", reported),
        timeout=60 + 30 * len(wanted),
    )
    job.check()
    return [
        {
            "case": case,
            "job": job,
            "ranks": of_case(job, number),
            "dead": job.kept.get(f"dead.{number}"),
        }
        for number, case in enumerate(wanted)
    ]


def of_case(job: Job, number: int) -> dict[str, dict[str, Any]]:
    """Return what those processes have seen of a case that came to its end."""
    every = {host: json.loads(text) for host, text in job.kept.items() if not host.startswith("dead.")}
    return {
        host: seen for host, cases in every.items() for seen in cases if seen["case"] == number and "weights" in seen
    }


def survivors(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The ones that were there from the beginning."""
    return [seen for seen in case["ranks"].values() if seen["generations"][0][2] == 0]


def newcomer(case: dict[str, Any]) -> dict[str, Any]:
    """The one that joined."""
    (found,) = [seen for seen in case["ranks"].values() if seen["generations"][0][2] > 0]
    return found


def test_the_others_continue_and_a_new_rank_joins(cases):
    for case in cases:
        assert len(case["ranks"]) == RANKS, (case["case"], str(case["job"]))
        assert len(survivors(case)) == RANKS - 1, case
        for seen in survivors(case):
            sizes = [size for size, *_ in seen["generations"]]
            assert sizes == [RANKS, RANKS - 1, RANKS], case
        assert [size for size, *_ in newcomer(case)["generations"]] == [RANKS], case


def test_no_survivor_goes_back_or_leaves_a_step_out(cases):
    """The gradient, or the update, of a step that was broken off is there: it is given again, and left out. Where
    another survivor has ended that step, the next one follows; one that is ahead takes the others along."""
    for case in cases:
        for seen in survivors(case):
            batches, every = [batch for batch, *_ in seen["steps"]], list(range(seen["batch"]))
            left_out = sorted({*every} - {*batches})
            assert batches == [batch for batch in every if batch not in left_out], case["case"]
            assert left_out in ([], [DEATH]) or case["case"][0] not in STEP_BY_STEP, (case["case"], left_out)
            assert left_out == [*range(left_out[0], left_out[-1] + 1)] if left_out else True, (case["case"], left_out)
            assert len(batches) <= seen["steps_counted"] <= len(every), case["case"]
        joined = newcomer(case)
        first = joined["generations"][0][2]
        assert first >= DEATH + ALONE, case["case"]
        assert [batch for batch, *_ in joined["steps"]] == list(range(first, first + TOGETHER)), case["case"]


def test_replicas_are_identical_at_the_end(cases):
    for case in cases:
        weights = [seen["weights"] for seen in case["ranks"].values()]
        assert all(one == weights[0] for one in weights), case["case"]
        assert np.isfinite(weights[0]).all(), case["case"]


def test_each_gradient_of_a_survivor_is_applied_once(cases):
    """(``drain()`` compares what was produced and applied since the last reset; here it is over all of them.) A rank
    that continues with the batch of one that was ahead has no gradients of the batches between."""
    for case in cases:
        if case["case"][0] in EAGER:
            for seen in survivors(case):
                assert seen["produced"] == seen["steps_counted"], case["case"]
                assert seen["applied"] >= seen["produced"], case["case"]


def test_synchronous_rounds_are_those_of_the_ranks_that_there_were(cases):
    """Against NumPy in float64: only the dead rank's gradient of the step in which it died is missing."""
    for case in cases:
        if case["case"][0] != "all":
            continue
        weights, momentum = np.zeros(SIZE), np.zeros(SIZE)
        for batch in range(survivors(case)[0]["batch"]):
            hosts = [host for host, seen in case["ranks"].items() if any(batch == one[0] for one in seen["steps"])]
            hosts += [case["dead"]] if batch < DEATH else []
            momentum = MOMENTUM * momentum + np.mean([gradient(weights, batch, host) for host in hosts], axis=0)
            weights = weights - LR * momentum
            for seen in survivors(case):  # (at once: a quadratic forgets in a few steps)
                early = dict(seen["early"])
                if batch in early:
                    np.testing.assert_allclose(early[batch], weights, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(survivors(case)[0]["weights"], weights, rtol=1e-4, atol=1e-4)


def test_a_death_is_noticed_by_the_end_of_its_connection(cases):
    """And not by silence, for which seconds would pass."""
    for case in cases:
        for seen in survivors(case):
            first, case_of = seen["interrupts"][0], (case["case"], str(case["job"]))
            assert f"on host {case['dead']} died: " in first, case_of
            assert "connection to the coordinator ended" in first, case_of
