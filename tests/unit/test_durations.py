"""The seconds of test files: added up from a run, and compared with a table of an earlier one."""

from __future__ import annotations

from pathlib import Path

from tests import durations
from tests.durations import Spent

ROOT = Path(__file__).resolve().parents[2]


def test_a_files_tests_are_added_up_the_longest_file_first():
    ran = [("a.py", 1.0, 0.5), ("b.py", 8.0, 4.0), ("a.py", 3.0, 7.5)]
    assert list(durations.by_file(ran).items()) == [("b.py", Spent(1, 8.0, 0.5)), ("a.py", Spent(2, 4.0, 2.0))]


def test_a_file_that_takes_more_than_its_budget_is_named():
    table = {"a.py": Spent(2, 4.0, 1.0), "b.py": Spent(2, 4.0, 1.0)}
    assert durations.over({"a.py": 18.0, "b.py": 18.6, "new.py": 100.0}, table) == ["b.py: 19 s, its budget is 18 s"]


def test_the_table_names_files_that_are_there():
    assert [name for name in durations.read() if not (ROOT / name).is_file()] == []
