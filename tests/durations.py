"""Seconds that each file of tests takes.

``scripts/check.sh`` writes ``build/tests.xml``, and names files that take more than their budget at its end.
``python -m tests.durations build/tests.xml`` makes ``tests/durations.csv``, with the budgets, of a whole run.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

TABLE = Path(__file__).with_suffix(".csv")
CPU = "cpu_s"
"""Name of a test's property: seconds of CPU of its process (children that ended included, other processes not)."""


class Spent(NamedTuple):
    """Time of a file's tests.

    Attributes:
        tests: how many there are.
        seconds: seconds, set-up included.
        cores: seconds of CPU a second, in the process that runs them. Jobs' ranks come from fork servers, and are not
            in it.
    """

    tests: int
    seconds: float
    cores: float

    @property
    def budget(self) -> float:
        """Seconds that they may take: machines differ, and jobs wait for each other."""
        return 2.0 * self.seconds + 10.0


def cpu_seconds() -> float:
    """Return the seconds of CPU of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def by_file(tests: Iterable[tuple[str, float, float]]) -> dict[str, Spent]:
    """Add up tests, each its file, seconds and seconds of CPU; the longest file first."""
    files: dict[str, list[float]] = {}
    for file, seconds, cpu in tests:
        sums = files.setdefault(file, [0, 0.0, 0.0])
        for place, more in enumerate((1, seconds, cpu)):
            sums[place] += more
    ordered = sorted(files.items(), key=lambda item: (-item[1][1], item[0]))
    return {
        file: Spent(int(count), round(seconds, 1), round(cpu / max(seconds, 0.1), 1))
        for file, (count, seconds, cpu) in ordered
    }


def read(table: Path = TABLE) -> dict[str, Spent]:
    """Return the table."""
    with table.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {row["file"]: Spent(int(row["tests"]), float(row["seconds"]), float(row["cores"])) for row in rows}


def over(seconds: Mapping[str, float], table: Mapping[str, Spent]) -> list[str]:
    """Return a line for each file that took more than its budget."""
    return [
        f"{file}: {took:.0f} s, its budget is {table[file].budget:.0f} s"
        for file, took in seconds.items()
        if file in table and took > table[file].budget
    ]


def main() -> None:
    """Make the table of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", type=Path, help="build/tests.xml of a whole run of scripts/check.sh on a quiet machine")
    tests = []
    for case in ElementTree.parse(parser.parse_args().xml).getroot().iter("testcase"):
        cpu = case.find(f"properties/property[@name='{CPU}']")
        if cpu is not None:
            file = f"{case.get('classname', '').replace('.', '/')}.py"
            tests.append((file, float(case.get("time", 0)), float(cpu.get("value", 0))))
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["file", *Spent._fields])
        table.writerows([name, *spent] for name, spent in by_file(tests).items())


if __name__ == "__main__":
    main()
