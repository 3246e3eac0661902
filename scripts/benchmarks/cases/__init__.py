"""The cases of ``scripts/bench.py``: a module each, with ``HELP``, ``add_arguments``, ``run`` and ``draw``."""

from __future__ import annotations

from types import ModuleType

from . import (
    accuracy,
    activation,
    advice,
    convergence,
    deaths,
    elastic,
    exchange_cost,
    gpu,
    hetero,
    host,
    late_gradients,
    memory,
    nemesis,
    network,
    no_stragglers,
    profile,
    pull_cost,
    race,
    scale,
    scaling,
    sequence_lengths,
    skew,
    sleeping_rank,
    soak,
    split_classes,
    straggler,
    time_to_accuracy,
)

_MODULES: tuple[ModuleType, ...] = (
    *(straggler, skew, no_stragglers, activation, memory, accuracy, split_classes, convergence, sequence_lengths),
    late_gradients,
    *(hetero, sleeping_rank, exchange_cost, network, scaling, pull_cost, race, time_to_accuracy, soak),
    *(elastic, deaths, nemesis, scale, advice, host, gpu, profile),
)
CASES = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
"""By name, in the order in which ``all`` runs them."""
OLD_NAMES = {
    "no_stragglers": "balanced",
    "split_classes": "hard",
    "sequence_lengths": "lengths",
    "sleeping_rank": "independence",
    "exchange_cost": "exchange",
    "pull_cost": "pull",
}
"""Names of 0.1.0: the command line knows them too, and the files of results keep them."""


def current_name(name: str) -> str:
    """Return the name of the case that is called so, now or in 0.1.0; a name of no case as it is."""
    return next((current for current, old in OLD_NAMES.items() if old == name), name)
