"""Process sets of groups: the ones that Horovod knows are used again, others are made if all ranks take part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_async.runtime.process_sets import process_set_among


class FakeSets:
    """Stands for ``horovod.common.process_sets``.

    Args:
        known: ranks of the process sets that there are, numbered from 0.
        dynamic: whether more can be made.
    """

    def __init__(self, *known: list[int], dynamic: bool = True) -> None:
        self.known, self.dynamic = list(known), dynamic
        self.made: list[list[int]] = []
        self._basics = SimpleNamespace(_get_process_set_ids_and_ranks=lambda: dict(enumerate(self.known)))

    class ProcessSet:
        """Horovod's."""

        def __init__(self, ranks: list[int]) -> None:
            self.ranks, self.process_set_id = ranks, None

    def add_process_set(self, one: Any) -> Any:
        """As Horovod's: it needs a setting of ``hvd.init()``."""
        if not self.dynamic:
            raise ValueError("HOROVOD_DYNAMIC_PROCESS_SETS is not set")
        self.known.append(one.ranks)
        self.made.append(one.ranks)
        one.process_set_id = len(self.known) - 1
        return one


PAIRS = [(0, 1), (2, 3)]


@pytest.mark.parametrize("make", [True, False])
@pytest.mark.parametrize(("rank", "number"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_ones_that_are_known_are_used_and_none_is_made(rank, number, make):
    sets = FakeSets([0, 1, 2, 3], [0, 1], [2, 3], dynamic=False)
    own = process_set_among(sets, dict(enumerate(sets.known)), PAIRS, rank, make)
    assert (own.process_set_id, list(own.ranks)) == (number, list(PAIRS[number - 1]))
    assert sets.made == []


@pytest.mark.parametrize("rank", range(4))
def test_ones_that_are_missing_are_made_by_all_ranks_in_one_order(rank):
    sets = FakeSets([0, 1, 2, 3])
    own = process_set_among(sets, dict(enumerate(sets.known)), PAIRS, rank, make=True)
    assert sets.made == [[0, 1], [2, 3]]  # also that of which it is no member
    assert own.process_set_id == 1 + rank // 2
    again = process_set_among(sets, dict(enumerate(sets.known)), PAIRS, rank, make=True)
    assert again.process_set_id == own.process_set_id
    assert len(sets.made) == 2


def test_only_ones_that_are_missing_are_made():
    sets = FakeSets([0, 1, 2, 3], [2, 3])
    assert process_set_among(sets, dict(enumerate(sets.known)), PAIRS, 0, make=True).process_set_id == 2
    assert sets.made == [[0, 1]]


def test_a_rank_of_no_group_makes_them_all_the_same_and_has_none():
    sets = FakeSets([0, 1, 2, 3, 4])
    assert process_set_among(sets, dict(enumerate(sets.known)), PAIRS, 4, make=True) is None
    assert sets.made == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("make", "why"), [(True, "HOROVOD_DYNAMIC"), (False, "other ranks of the job have no part")])
def test_where_none_can_be_made_it_says_what_else_to_do(make, why):
    sets = FakeSets([0, 1, 2, 3], [0, 1], dynamic=False)
    for rank in range(4):
        with pytest.raises(ValueError, match=rf"ranks \[2, 3\] need a Horovod process set.*\({why}") as caught:
            process_set_among(sets, dict(enumerate(sets.known)), PAIRS, rank, make)
        for hint in (
            "hvd.init(process_sets=[hvd.ProcessSet([2, 3]), ...])",
            "process_sets='dynamic'",
            "the number of all ranks",
        ):
            assert hint in str(caught.value)


def test_without_make_nothing_is_made_even_if_it_could_be():
    """Other ranks would have to take part, and do not."""
    sets = FakeSets([0, 1, 2, 3])
    with pytest.raises(ValueError, match="need a Horovod process set"):
        process_set_among(sets, dict(enumerate(sets.known)), PAIRS, 0, make=False)
    assert sets.made == []
