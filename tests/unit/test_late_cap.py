"""How much memory late rounds may take: ``max_staleness`` is lowered to fit, and that is said once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.optimizers.eager import EagerDriver
from hvd_async.runtime.process_sets import RankGroup

MIB = 2**20


def state(cap: float, index: int = 0, **options: Any) -> EagerDriver:
    nothing, ranks = cast(Any, None), RankGroup(None, (0, 1), index, 0, 2)
    return EagerDriver(nothing, ranks, nothing, EagerOptions(late_cap_mb=cap, **options))


@pytest.mark.parametrize(
    ("megabytes", "cap", "staleness"),
    [(1, 17, 16), (1, 16.9, 15), (100, 4096, 16), (4000, 4096, 0), (1360, 4096, 2), (4000, float("inf"), 16),
     (2, 8, 3), (2, 1, 0)],
)  # fmt: skip
def test_the_bound_fits_the_memory(megabytes, cap, staleness, capfd):
    one = state(cap)
    for _ in range(2):
        config = one.config_for([megabytes * MIB // 2, megabytes * MIB // 2])
        assert config.max_staleness == staleness
        assert config.buckets == 2
        assert staleness == 0 or (staleness + 1) * megabytes <= cap
    said = capfd.readouterr().err
    assert said.count(f"max_staleness is {staleness} instead of 16") == (staleness != 16)
    assert "late_cap_mb" in said or staleness == 16


def test_no_rank_is_late_under_all_and_one_rank_says_it(capfd):
    assert state(1, quorum="all").config_for([8 * MIB]).max_staleness == 16
    assert state(1, index=1).config_for([8 * MIB]).max_staleness == 0
    assert state(1, max_staleness=0).config_for([8 * MIB]).max_staleness == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("late_cap_mb", [0, -1, "25", None, True, float("nan")])
def test_wrong_late_cap(late_cap_mb):
    with pytest.raises(ValueError, match=r"late_cap_mb must be a number of MiB above 0 \(usually 4096\), got "):
        EagerOptions(late_cap_mb=late_cap_mb).check(4)
