"""Who connects to whom in a large job, and what a relay makes of several messages."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.runtime.protocol import DecodeError
from hvd_async.runtime.relays import FAN_OUT, Tree, direct_tree, merged, plan_tree
from hvd_async.runtime.transport import Child, Upward, decode_ranks, decode_upward, encode_ranks, encode_upward

PLACES = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40)


def below(tree: Tree, children: tuple[Child, ...]) -> list[int]:
    """The ranks that connections from above lead to, one by one."""
    found: list[int] = []
    for child in children:
        own = below(tree, tree.relays[child.owner]) if child.relay else [child.owner]
        assert sorted(own) == sorted(child.behind)
        assert child.behind[0] == child.owner
        found += own
    return found


@given(PLACES, st.integers(2, 5))
def test_each_rank_is_reached_once_and_no_rank_has_too_many_below(places, fan_out):
    tree = plan_tree(places, fan_out)
    assert sorted(below(tree, tree.root)) == [*range(len(places))]
    hosts = Counter(places)
    assert len(tree.root) <= fan_out + hosts[places[0]]
    for owner, children in tree.relays.items():
        assert 2 <= len(children) <= fan_out * 3 + hosts[places[owner]]  # (it may have several levels below it)
    for rank in range(len(places)):
        parent = tree.parent(rank)
        children = tree.root if parent is None else tree.relays[parent]
        assert Child(rank, (rank,), False) in children
        if rank in tree.relays:
            above = tree.above(rank)
            assert any(c.owner == rank and c.relay for c in (tree.root if above is None else tree.relays[above]))


def test_a_relay_for_each_host_but_the_coordinators():
    tree = plan_tree(["a", "a", "b", "b", "b", "c"])
    assert tree.root == (Child(0, (0,), False), Child(1, (1,), False), Child(2, (2, 3, 4), True), Child(5, (5,), False))
    assert tree.relays == {2: tuple(Child(rank, (rank,), False) for rank in (2, 3, 4))}
    assert (tree.parent(1), tree.parent(3), tree.parent(5), tree.above(2)) == (None, 2, None, None)


def test_relays_below_relays_above_many_hosts():
    tree = plan_tree([str(rank // 2) for rank in range(10)], fan_out=2)
    assert [child.behind for child in tree.root] == [(0,), (1,), (2, 3, 4, 5), (6, 7, 8, 9)]
    assert tree.relays[2] == (Child(2, (2,), False), Child(3, (3,), False), Child(4, (4, 5), True))
    assert (tree.above(4), tree.above(2), tree.parent(5)) == (2, None, 4)


def test_a_thousand_hosts_of_eight():
    tree = plan_tree([str(rank // 8) for rank in range(8192)])
    assert len(tree.root) <= FAN_OUT + 8
    assert sorted(below(tree, tree.root)) == [*range(8192)]


def test_a_small_job_has_no_relays():
    assert direct_tree(3) == Tree(tuple(Child(rank, (rank,), False) for rank in range(3)), {})


MESSAGES = st.lists(
    st.tuples(
        st.sets(st.integers(0, 4), min_size=1, max_size=3),
        st.sampled_from([b"a", b"b", b"c"]),
        st.sampled_from(["", "", "", "died"]),
    ).map(lambda made: Upward(sorted(made[0]), b"" if made[2] else made[1], made[2])),
    max_size=20,
)


@given(MESSAGES)
def test_merging_leaves_each_ranks_messages_as_they_were(messages):
    """Those of one rank in their order; those of several ranks that say the same may be one."""

    def of(rank: int, some: list[Upward]) -> list[tuple[bytes, str]]:
        return [(message.data, message.gone) for message in some for _ in range(message.ranks.count(rank))]

    found = merged(messages)
    for rank in range(5):
        assert of(rank, found) == of(rank, messages)
    assert len(found) <= len(messages)


def test_what_all_ranks_of_a_host_say_is_one_message():
    found = merged([Upward([rank], data) for data in (b"step", b"gradient") for rank in range(8)])
    assert found == [Upward([*range(8)], b"step"), Upward([*range(8)], b"gradient")]


@given(MESSAGES)
def test_the_wire_gives_back_what_was_put_in(messages):
    assert decode_upward(encode_upward(messages)) == messages


@pytest.mark.parametrize("ranks", [None, [], [0], [3, 1, 1023]])
def test_ranks_on_the_wire(ranks):
    assert decode_ranks(encode_ranks(ranks)) == ranks


def test_what_is_no_message_is_refused():
    with pytest.raises(DecodeError):
        decode_upward(b"\x93abc")
    with pytest.raises(DecodeError):
        decode_ranks(b"\xa1x")
