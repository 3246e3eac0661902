"""How long the steps took, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .files import write_rows

PERCENTS = range(101)


def write_step_times(path: Path, ranks: Sequence[Sequence[float]]) -> None:
    """Write percentiles of each rank's step times as CSV: `percent` from 0 to 100, and the seconds of `rank0`, `rank1`
    and so on (empty: it took no step).

    Args:
        ranks: the seconds of each rank's steps.
    """
    columns = [
        [f"{each:.6f}" for each in np.percentile(times, PERCENTS)] if times else [""] * len(PERCENTS) for times in ranks
    ]
    head = ["percent", *(f"rank{rank}" for rank in range(len(ranks)))]
    write_rows(path, [head, *zip(PERCENTS, *columns, strict=True)])
