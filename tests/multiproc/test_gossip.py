"""Gossip between processes: both frameworks against the float64 reference, at 2, 3 and 4 ranks, Gloo and MPI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs.gossip_table import COMPRESSED, HOSTS_COMPRESSED, STEPS, UNEVEN, UNEVEN_HOSTS, Gossip, cases
from launch import RunJob
from settings import TENSORFLOW, TORCH, Setting, having

from hvd_async.algorithms.gossip.config import ALGORITHMS
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.mixing import Matrix
from tests.conformance import gossip_reference as reference
from tests.conformance import outer_reference
from tests.conformance.cases import CASES
from tests.conformance.exact_diffusion_reference import exact_diffusion
from tests.conformance.noloco_reference import noloco
from tests.conformance.quasi_global_reference import Corrected

pytestmark = pytest.mark.multiproc

CASE = next(case for case in CASES if case.name == "nesterov")
FULL = (TORCH, TENSORFLOW)
EACH = [(setting, case) for setting in having("gossip") for case in cases(setting.ranks, setting.share)]


def each(*kinds: tuple[Gossip, ...]) -> Any:
    """Every setting with its cases of these kinds; without kinds the ones that must equal the reference."""
    chosen = [case for kind in kinds for case in kind]
    others = (*COMPRESSED, *HOSTS_COMPRESSED, *UNEVEN, *UNEVEN_HOSTS)
    picked = [(s, case) for s, case in EACH if (case in chosen if kinds else case not in others)]
    return pytest.mark.parametrize(
        ("setting", "case"), [pytest.param(s, case, id=f"{s}-{case.name}") for s, case in picked]
    )


def expected(case: Gossip, size: int, logs: list[Any], framework: str) -> reference.Outcome:
    """What the reference makes of it, taking in what the ranks took in."""
    problem: Any = reference.least_squares(size, CASE, framework)
    if case.options.get("quasi_global"):
        problem = Corrected(problem)
    if case.algorithm == "adpsgd":
        hosts, steps = case.options.get("hierarchical", 1), list(map(case.steps, range(size)))
        return reference.adpsgd(problem, logs, hosts, steps)
    if case.algorithm == "allreduce":
        return reference.allreduce(problem, STEPS)
    plan = make_plan(size, **case.plan)
    if ALGORITHMS[case.algorithm].outer is not None:
        outer = outer_reference.of_config(plan.config)
        return outer_reference.train(problem, [STEPS] * size, outer, local_size=plan.config.local_size)
    matrices: list[Matrix] = list(plan.matrices)
    if case.algorithm == "exact-diffusion":
        return exact_diffusion(problem, matrices[0], list(map(case.steps, range(size))))
    if case.algorithm == "noloco":
        return noloco(problem, matrices, list(map(case.steps, range(size))), plan.config)
    takes = [[taken for _, taken in log] for log in logs] if case.algorithm == "osgp" else None
    return reference.gossip(
        problem,
        matrices,
        STEPS,
        takes,
        algorithm="dpsgd" if case.algorithm == "dpsgd" else "sgp",
        max_staleness=plan.config.max_staleness,
        overlap=plan.config.max_staleness,
        every=plan.config.gossip_every,
        average_every=plan.config.average_every,
        local_size=plan.config.local_size,
    )


def check_after_cut(ranks: list[dict[str, Any]]) -> None:
    """Check ranks with weights of their own: consensus, distance and drain agree."""
    own = np.array([rank["own"] for rank in ranks])
    apart = np.sqrt(((own - own.mean(axis=0)) ** 2).sum(axis=1).mean())
    for rank in ranks:
        assert rank["back"] == rank["own"]
        assert rank["drained"] == ranks[0]["drained"]
        assert rank["consensus"] == ranks[0]["consensus"]
        assert rank["drained"] == pytest.approx(rank["consensus"], abs=1e-6)
        assert rank["distance"] == pytest.approx(apart, abs=1e-6)


def check_ends(ranks: list[dict[str, Any]]) -> None:
    """Check a gossip: it loses nothing, besides."""
    check_after_cut(ranks)
    assert [rank["weight_after"] for rank in ranks] == [1.0] * len(ranks)
    assert sum(rank["sent"] for rank in ranks) == sum(rank["taken"] for rank in ranks)


@each()
def test_every_algorithm_equals_the_reference(job: RunJob, setting: Setting, case: Gossip) -> None:
    ranks = setting.case(job, case.name)
    outcome = expected(case, len(ranks), [rank["log"] for rank in ranks], setting.reference)
    ends = "own" if case.algorithm == "adpsgd" else "before"
    np.testing.assert_allclose([rank[ends] for rank in ranks], outcome.z, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ranks[0]["drained"], outcome.drained(), rtol=0, atol=1e-5)
    if case.algorithm != "adpsgd":
        np.testing.assert_allclose([rank["weight"] for rank in ranks], outcome.w, rtol=0, atol=1e-9)
    check_ends(ranks)


@each(COMPRESSED, HOSTS_COMPRESSED)
def test_compression_loses_no_mass(job: RunJob, setting: Setting, case: Gossip) -> None:
    ranks = setting.case(job, case.name)
    check_ends(ranks)
    exact = reference.least_squares(len(ranks), CASE, setting.reference)
    plan = make_plan(len(ranks), **{**case.plan, "compression": "none"})
    if case.algorithm in ("sgp", "dpsgd"):
        config = plan.config
        outcome = reference.gossip(
            exact,
            list(plan.matrices),
            STEPS,
            algorithm=case.algorithm,
            average_every=config.average_every,
            local_size=config.local_size,
        )
        np.testing.assert_allclose(ranks[0]["drained"], outcome.drained(), rtol=0, atol=0.02)


@each(UNEVEN, UNEVEN_HOSTS)
def test_ranks_that_are_done_early_hold_no_rank_up(job: RunJob, setting: Setting, case: Gossip) -> None:
    check_ends(setting.case(job, case.name))


@pytest.mark.parametrize("setting", FULL, ids=str)
def test_adpsgd_continues_while_a_rank_is_stuck(job: RunJob, setting: Setting) -> None:
    ranks = setting.case(job, "stuck")
    assert len({str(rank["drained"]) for rank in ranks}) == 1
    assert all(rank["averagings"] > 0 for rank in ranks)  # its engine answers for the one that was stuck


@pytest.mark.parametrize("setting", FULL, ids=str)
def test_under_sgp_a_late_rank_holds_up_ones_that_the_graph_says(job: RunJob, setting: Setting) -> None:
    ranks = setting.case(job, "held")  # (ends at all: each came as far as the graph lets it, before rank 0 continued)
    assert len({str(rank["drained"]) for rank in ranks}) == 1
    assert all(rank["waited_for"][(index - 1) % len(ranks)] > 0 for index, rank in enumerate(ranks) if index)
    assert all(
        seconds == 0 for i, rank in enumerate(ranks) for j, seconds in enumerate(rank["waited_for"])
        if j != (i - 1) % len(ranks)
    )  # fmt: skip


@pytest.mark.parametrize("setting", [TENSORFLOW], ids=str)
def test_fit_gossips_and_evaluates(job: RunJob, setting: Setting) -> None:
    ranks = setting.case(job, "fitted")
    for number, rank in enumerate(ranks):
        assert rank["history"] == pytest.approx(ranks[0]["history"])  # averaged at the end of each epoch
        assert rank["history"][-1] < rank["history"][0]
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["steps"] == 4 * (4 + number)
