"""Quorums as pure functions: every kind, its bounds, majority's draw, and how a wrong one is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.quorum import Quorum, RoundQuorum, check_quorum, initiator, needed, parse_quorum

SIZES = st.integers(1, 9)
RANKS = (0, 1, 3, 4, 7, 8, 12, 20, 21)
"""A process set's need not be all of the job's."""


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, set[int], list[int]]:
    """(size, active ranks, those of them that have arrived, in order)."""
    size = draw(SIZES)
    active = draw(st.sets(st.sampled_from(RANKS[:size]), min_size=1))
    arrived = draw(st.lists(st.sampled_from(sorted(active)), unique=True))
    return size, active, arrived


def leader(
    quorum: Quorum, round_: int, arrived: list[int], active: set[int], ranks: Sequence[int], seed: int = 0
) -> int | None:
    """The initiator, if the round may fire."""
    return RoundQuorum(quorum, round_, ranks, seed).initiator(arrived, active)


@given(situations(), st.integers(1, 99), st.integers(0, 9), st.data())
def test_the_initiator_is_the_first_of_enough_ranks_or_the_drawn_one(situation, round_, seed, data):
    size, active, arrived = situation
    count = data.draw(st.integers(1, size))
    drawn = initiator(round_, seed, active, RANKS[:size])
    enough = {"solo": 1, "all": len(active), count: min(count, len(active)), count / size: min(count, len(active))}
    for quorum, needs in enough.items():
        expected = arrived[0] if arrived and len(arrived) >= needs else None
        assert leader(quorum, round_, arrived, active, RANKS[:size], seed) == expected
    assert leader("majority", round_, arrived, active, RANKS[:size], seed) == (drawn if drawn in arrived else None)


@given(situations(), st.integers(1, 99), st.integers(0, 5))
def test_majority_draws_again_when_the_drawn_rank_has_finished_and_says_whom(situation, round_, seed):
    size, active, arrived = situation
    quorum = RoundQuorum("majority", round_, RANKS[:size], seed)
    drawn = initiator(round_, seed, active, RANKS[:size])
    assert quorum.reason(arrived, active).startswith(f"majority: rank {drawn} was drawn; {len(arrived)} of")
    if others := set(RANKS[:size]) - {drawn}:
        assert quorum.drawn(others) in others, "the one before has finished"


def test_why_a_count_was_chosen_is_reported():
    quorum = RoundQuorum(2, 5, [0, 1, 3], 0, "auto: learned")
    assert quorum.initiator([3, 1], {0, 1, 3}) == 3
    assert quorum.reason([3, 1], {0, 1, 3}) == "quorum: 2 of 3 are in, 2 needed (auto: learned)"


@pytest.mark.parametrize(("fraction", "size", "want"), [(0.5, 4, 2), (0.75, 4, 3), (0.1, 10, 1), (0.3, 10, 3),
                                                         (2 / 3, 3, 2), (1.0, 7, 7), (0.51, 2, 2)])  # fmt: skip
def test_fraction_examples(fraction, size, want):
    assert needed(fraction, size) == want


# -- majority's draw ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_draw_is_close_to_uniform(size):
    rounds = 4000
    drawn = Counter(initiator(t, 7, set(range(size)), range(size)) for t in range(1, rounds + 1))
    expected = rounds / size
    chi_square = sum((drawn[r] - expected) ** 2 / expected for r in range(size))
    assert chi_square < 30  # 7 degrees of freedom at most: p < 1e-4, and the draw is a fixed one


@given(situations(), st.integers(1, 999), st.integers(0, 5), st.data())
def test_draw_moves_only_when_the_drawn_rank_finishes(situation, round_, seed, data):
    size, active, _ = situation
    drawn = initiator(round_, seed, active, RANKS[:size])
    assert drawn in active
    others = active - {drawn}
    gone = data.draw(st.sets(st.sampled_from(sorted(others)))) if others else set()
    assert initiator(round_, seed, active - gone, RANKS[:size]) == drawn
    if others:
        again = initiator(round_, seed, others, RANKS[:size])
        assert again in others


# -- wrong ones -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", ["most", "", "Solo", "3", 0, -1, 5, 9, 0.0, -0.5, 1.5, float("nan"), True, False,
                                    None, [2], (1, 2)])  # fmt: skip
def test_wrong_quorum_is_refused_with_a_hint(quorum):
    with pytest.raises(ValueError, match="quorum must be") as caught:
        check_quorum(quorum, 4)
    assert repr(quorum) in str(caught.value)
    assert '"solo", "majority", "all", "auto", a number of ranks from 1 to 4, or a fraction' in str(caught.value)


@pytest.mark.parametrize(("text", "quorum"), [("solo", "solo"), ("3", 3), ("0.75", 0.75), ("1", 1), ("1.0", 1.0),
                                              ("auto", "auto"), ("most", "most")])  # fmt: skip
def test_parse(text, quorum):
    parsed = parse_quorum(text)
    assert parsed == quorum
    assert type(parsed) is type(quorum)
