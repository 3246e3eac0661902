"""The cases of ``scripts/bench.py``."""

from __future__ import annotations

from .advice import ADVICE
from .imbalance import HETERO, STRAGGLER
from .network import NETWORK
from .overhead import ACTIVATION, GPU, NO_STRAGGLERS
from .scale import SCALE
from .trainings import LENGTHS, SPLIT, TIME_TO_ACCURACY
from .trouble import ELASTIC, NEMESIS, SOAK

ALL = (
    *(STRAGGLER, NO_STRAGGLERS, ACTIVATION, SPLIT, LENGTHS, HETERO, NETWORK, TIME_TO_ACCURACY, SOAK),
    *(ELASTIC, NEMESIS, SCALE, ADVICE, GPU),
)
CASES = {case.name: case for case in ALL}
"""By name, in the order in which ``all`` runs them."""


def current_name(name: str) -> str:
    """Return the name of the case that had a name in 0.1.0; another name as it is."""
    return next((case.name for case in ALL if case.old_name == name), name)
