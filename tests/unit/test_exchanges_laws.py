"""The laws of ``exchanges`` under any interleaving of simulated ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.gossip.config import ALGORITHMS, StartExchange
from hvd_async.algorithms.gossip.plan import make_plan
from tests.conftest import examples
from tests.unit.gossip_simulation import Job, Simulation

DIRECTED = ["exponential", "ring", "ring-right", "star", "complete"]
BOTH_WAYS = ["bipartite-exponential", "ring", "star", "complete", "mesh"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, 5))
    names = ["sgp", "osgp", "dpsgd", "exact-diffusion", "noloco", "adpsgd", "adpsgd", "allreduce", "local"]
    algorithm = draw(st.sampled_from(names))
    kind = ALGORITHMS[algorithm]
    graphs = DIRECTED if algorithm in ("sgp", "osgp") else BOTH_WAYS
    graph = draw(st.sampled_from(graphs[1:] if algorithm == "exact-diffusion" else graphs))  # (static ones)
    plan = make_plan(
        size,
        algorithm,
        graph if kind.has_graph else None,
        weights="metropolis" if algorithm in ("dpsgd", "exact-diffusion", "noloco") else "uniform",
        max_staleness=draw(st.integers(0, 2)) if algorithm in ("osgp", "local") else None,
        gossip_every=draw(st.sampled_from([1, 1, 2, 3])) if "gossip_every" in kind.options else 1,
        max_local_steps=draw(st.integers(1, 3)) if algorithm == "adpsgd" else 4,
        average_every=draw(
            st.sampled_from({"adpsgd": [0], "noloco": [0], "local": [2, 3]}.get(algorithm, [0, 0, 1, 3]))
        ),
        fragments=draw(st.integers(1, 2)) if algorithm == "local" else 1,
    )
    counts = st.lists(st.integers(0, 5), min_size=size, max_size=size).map(tuple)
    steps = tuple(draw(st.lists(counts, min_size=1, max_size=3)))
    ends = [(end, index) for end in range(len(steps)) for index in range(size)]
    hasty = [index for index in range(size) if not steps[0][index]]
    first = draw(st.integers(0, 3))
    return Job(
        plan,
        steps,
        speeds=tuple(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 5.0]), min_size=size, max_size=size))),
        ranks=draw(st.sampled_from([tuple(range(size)), tuple(range(first, first + 2 * size, 2))])),
        seed=draw(st.integers(0, 2**32)),
        cuts=frozenset(draw(st.sampled_from([set(), set(ends)]) | st.sets(st.sampled_from(ends)))),
        hasty=frozenset(draw(st.sets(st.sampled_from(hasty)))) if hasty else frozenset(),
    )


IDLE = Job(make_plan(3, "adpsgd", "ring"), ((0, 0, 0), (0, 0, 0)), (1.0, 0.0, 1.0), (0, 1, 2), hasty=frozenset({0, 2}))


@settings(max_examples=examples(120))
@given(jobs())
@example(IDLE)
@example(replace(IDLE, hasty=frozenset({0, 1, 2})))
def test_laws_hold_under_any_interleaving(job):
    simulation = Simulation(job).run()
    exchanges = [command for command in simulation.log if isinstance(command, StartExchange)]
    carried = [one for exchange in exchanges for one in simulation.carried.get(exchange.round, ())]
    assert len(carried) == sum(len(exchange.messages) for exchange in exchanges)
    mail = [(job.ranks[index], key) for index, key, receivers in carried if receivers]  # (of a step announced: or none)
    if job.plan.config.algorithm in ("adpsgd", "allreduce", "local"):
        assert not mail
    else:
        assert len(mail) == sum(map(len, simulation.offered))
        of_all = {key for _, key in mail}
        assert all(job.plan.moves(key) for key in of_all), "an exchange of a step without edges"
    assert all(exchange.messages or exchange.pairs for exchange in exchanges)
    for index, number in enumerate(job.ranks):
        keys = [key for sender, key in mail if sender == number]
        assert keys == simulation.offered[index]
        paired = sum(number in pair for exchange in exchanges for pair in exchange.pairs)
        assert paired == simulation.ranks[index].averagings


def test_the_simulation_has_teeth():
    """Illegal moves are tried; exchanges go with and without all ranks; ranks are averaged that did not ask."""
    tried = partial = whole = pairs = 0
    for seed in range(15):
        job = Job(make_plan(4), ((5, 3, 4, 5), (1, 0, 2, 2)), (1.0, 1.0, 0.1, 1.0), (0, 1, 2, 3), seed)
        one = Simulation(job).run()
        two = Simulation(replace(job, plan=make_plan(4, "adpsgd", "ring"))).run()
        tried += one.illegal_tried + two.illegal_tried
        partial += one.ledger.partial
        whole += one.ledger.whole
        pairs += sum(rank.averagings for rank in two.ranks)
    assert min(tried, partial, whole, pairs) > 20
