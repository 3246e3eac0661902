#!/usr/bin/env python
"""Pictures of a run: `scripts/plot.py LOG_DIR/leaders.csv --plot leaders.png` draws who led when."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from benchmarks import leadership

Pull = tuple[float, int, int]


def read_leaders(path: Path) -> list[Pull]:
    """The pulls in a runner's `leaders.csv`: seconds; group, or -1 for all ranks; leader.

    Raises:
        ValueError: it is no such file, or one of EASGD, whose ranks follow no leader.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames != ["time_s", "group", "leader"]:
            raise ValueError(f"{path} is no leaders.csv of a run with --algorithm lsgd --log-dir: give one")
        pulls = [(float(row["time_s"]), int(row["group"] or -1), int(row["leader"] or -1)) for row in rows]
    if not pulls or any(leader < 0 for _, _, leader in pulls):
        raise ValueError(f"{path}: nobody led in that run (easgd has a centre, and pulls of lsgd come by its periods)")
    return pulls


def draw_leaders(pulls: Sequence[Pull], ranks: int, path: Path) -> None:
    """Draw who led when.

    Args:
        pulls: as ``read_leaders``.
        ranks: of the job.
        path: a PNG.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    groups = 1 + max(group for _, group, _ in pulls)
    figure, axes = plt.subplots(figsize=(11, 1.4 + 0.45 * ranks), layout="constrained")
    leadership.draw(axes, pulls, ranks, ranks // groups if groups else ranks, max(time for time, _, _ in pulls) or 1.0)
    axes.set_xlabel("seconds since the first pull")
    axes.set_title("who led when")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(prog="scripts/plot.py", description="Draw who led when in a run with lsgd.")
    parser.add_argument("leaders", type=Path, metavar="LEADERS_CSV", help="leaders.csv, of a runner's --log-dir")
    parser.add_argument("--ranks", type=int, metavar="N", help="of the job (default: as far as the leaders go)")
    parser.add_argument("--plot", type=Path, default=Path("leaders.png"), metavar="FILE", help="(default: leaders.png)")
    given = parser.parse_args(argv)
    try:
        pulls = read_leaders(given.leaders)
        least = 1 + max(leader for _, _, leader in pulls)
        if given.ranks is not None and given.ranks < least:
            raise ValueError(f"--ranks {given.ranks}: rank {least - 1} led in that run; give {least} or more")
        draw_leaders(pulls, given.ranks or least, given.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {given.plot}")


if __name__ == "__main__":
    main()
