"""NoLoCo of ranks as threads: equal to the reference, kept by cuts; what it is for special constants."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.threads.gossip_workload import Job, check_replay, job, run

GRAPHS = ["random-pairs", "bipartite-exponential", "ring", "star", "base"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, 6))
    counts = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    graph = draw(st.sampled_from(GRAPHS))
    return job(
        draw(st.lists(counts, min_size=1, max_size=3)),
        "noloco",
        graph,
        weights="metropolis" if graph == "star" else "uniform",
        gossip_every=draw(st.integers(1, 4)),
        outer_lr=draw(st.sampled_from([0.7, 1.0])),
        outer_momentum=draw(st.sampled_from([0.0, 0.3, 0.5])),
        compression=draw(st.sampled_from(["none", "none", "bf16"])),
    )


@settings(max_examples=examples(60))
@given(jobs(), st.booleans())
def test_every_step_equals_the_reference(one, late):
    """A drain leaves all at the mean, whichever rank ends first; a period sends one message a neighbour."""
    records = run(one, jitter=0.002 * late)
    check_replay(one, records)
    for end in range(len(one.steps)):
        assert len({record.segments[end].z.tobytes() for record in records}) == 1
    stats = [record.stats for record in records]
    assert sum(own.messages_sent for own in stats) == sum(own.messages_taken + own.messages_left for own in stats)
