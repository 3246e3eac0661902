"""The benchmarks' medians, intervals, tables and JSON."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks.support.intervals import Interval, mean_interval, median_interval, quantile, slope, spread
from scripts.benchmarks.support.ratios import Ratios
from scripts.benchmarks.support.report import Column, Goal, Report, finite, row, table

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0)


def test_mean_interval_by_the_book():
    # Mean 3, standard deviation sqrt(2.5), t(4; 0.975) = 2.776.
    found = mean_interval([1, 2, 3, 4, 5])
    assert found.value == 3
    assert found.high - 3 == pytest.approx(2.776 * math.sqrt(2.5 / 5), abs=1e-3)
    assert found.low == pytest.approx(6 - found.high)
    assert mean_interval([7.0]) == Interval(7.0, -math.inf, math.inf)


def test_median_interval_by_the_book():
    # The usual table of order statistics for 95%: the 2nd and the 9th of 10, the 6th and the 15th of 20.
    assert median_interval(list(range(1, 11))) == Interval(5.5, 2, 9)
    assert median_interval(list(range(1, 21))) == Interval(10.5, 6, 15)
    assert median_interval([1, 2, 3, 4, 5]) == Interval(3, -math.inf, math.inf)
    assert median_interval([1, 2, 3, 4, 5, 6]) == Interval(3.5, 1, 6)


def test_median_interval_holds_the_median_often_enough():
    draws = random.Random(0)
    found = [median_interval([draws.lognormvariate(0, 1) for _ in range(15)]) for _ in range(2000)]
    assert sum(each.low <= 1.0 <= each.high for each in found) >= 0.95 * 2000


@given(NUMBERS)
def test_intervals_hold_their_estimates(values):
    for found in (spread(values), mean_interval(values), median_interval(values)):
        assert found.low <= found.value + 1e-6
        assert found.value <= found.high + 1e-6
        assert found.wide >= -1e-6


def test_within():
    assert Interval(0.0, -0.5, 0.5).within(-1, 1)
    assert not Interval(0.0, -0.5, 1.5).within(-1, 1)


def test_slope_and_quantile():
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope([1, 1], [0, 5]) == 0.0
    assert [quantile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.26, 1.0)] == [1, 1, 2, 4]


def test_ratios_are_taken_cycle_by_cycle():
    ratios = Ratios("horovod")
    assert ratios.wide(["solo"]) == math.inf
    for pace in range(1, 11):  # the machine gets slower all the time; the ratio does not
        ratios.add({"horovod": 2.0 * pace, "solo": 1.0 * pace})
    assert ratios.median("solo") == Interval(0.5, 0.5, 0.5)
    assert ratios.mean("solo").value == pytest.approx(0.5)
    assert ratios.wide(["solo", "an arm that is not there"]) == 0.0


ROWS = [
    row("horovod", {"delay": 0.2}, Interval(1.25, 1.2, 1.3), "s/step", speedup=1.0),
    row("solo", {"delay": 0.2}, 0.5, "s/step", speedup=2.5, met=True),
]


def test_rows_have_what_every_row_has():
    assert {"arm", "setting", "value", "unit", "low", "high", "speedup", "bound", "accuracy"} <= ROWS[1].keys()
    assert ROWS[1]["low"] == ROWS[1]["high"] == 0.5


def test_table():
    columns = (
        Column("delay", "setting.delay", "g"),
        Column("arm", "arm"),
        Column("s/step", "value", ".3f"),
        Column("bound", "bound", ".2f"),
        Column("met", "met"),
    )
    assert table(ROWS, columns).splitlines() == [
        "delay  arm      s/step  bound  met",
        "  0.2  horovod   1.250      -    -",
        "  0.2  solo      0.500      -  yes",
    ]


def test_json(tmp_path):
    report = Report("straggler", 8, ROWS, (), [Goal("a", math.inf, "<= 1", False)], ["busy"])
    report.write(tmp_path / "new" / "file.json")
    content = json.loads((tmp_path / "new" / "file.json").read_text())
    assert content["case"] == "straggler"
    assert content["ranks"] == 8
    assert content["transport"] == "gloo"
    assert "cores" in content["machine"]
    assert content["rows"] == ROWS
    assert content["goals"] == [
        {"what": "a", "value": None, "wanted": "<= 1", "met": False, "exact": False, "judged": True}
    ]


def test_infinity_is_null():
    assert finite({1: [math.nan, (1.0, -math.inf)]}) == {"1": [None, [1.0, None]]}


def test_goals_read_well():
    assert str(Goal("steps", 1.23456, ">= 1", True)) == "met     steps: 1.235 (>= 1)"
    assert str(Goal("same", "no", "yes", False)) == "MISSED  same: no (yes)"
    assert str(Goal("same", "no", "yes", False, judged=False)) == "open    same: no (yes)"


def test_text_has_all_parts():
    report = Report("x", 2, ROWS, (Column("arm", "arm"),), [Goal("g", 1.0, "w", True)], ["n"])
    assert report.text().splitlines() == ["arm", "horovod", "solo", "note: n", "met     g: 1 (w)"]


def test_median_of_ratios_is_robust():
    assert median_interval([1.0] * 20 + [9.0]).high == 1.0
