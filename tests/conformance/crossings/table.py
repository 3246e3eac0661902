"""Factors, cells and the choice of cells; framework-free."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS = 12
"""Optimizer steps of a script."""
MIDDLE = (3, 7)
"""Steps after which a script does what its level of ``middle`` says."""
PATIENCE = 100.0
"""Seconds that a rank waits for what takes a second on a quiet machine."""
TINY_MB = 1e-6
"""A ``bucket_cap_mb`` that gives every tensor a bucket of its own."""
FALLS = ("drop", "by-hand")
"""Levels of ``rate`` with which it falls to a tenth."""
NORMS = ("max-norm", "unit-norm")
"""Levels of ``weights`` that are constraints on norms. Keras' change weights that satisfy them by 1e-7 each time."""
HELD = ((0, 1), (-1, -1))
"""Before which step the last rank of an arm waits, and which step of rank 0 it waits for."""
FROZEN = range(4, 9)
"""Steps in which a parameter is frozen, of a script that freezes one."""
MOVED_BY_ENDS = ("adpsgd", "local", "slowmo", "diloco", "noloco")
"""Algorithms whose ends, which run no hooks, bring what other ranks sent before their hooks."""


@dataclass(frozen=True)
class Arm:
    """An optimizer family, an algorithm and its options.

    Attributes:
        name: unique.
        wrapper: name of the factory.
        options: of the factory.
        ranks: number of ranks.
        own: whether ranks see different data. (If not, all see rank 0's.)
        plain: whether all ranks' weights equal, after each step, those of one plain optimizer that sees the union of
            the ranks' batches. Of other arms only the invariants hold.
        counts: whether each step is one of ``opt.rounds``.
        late: whether a step may find what other ranks sent in another step than this one's; it depends on the time.
        tiny: whether each tensor travels in a bucket of its own.
    """

    name: str
    wrapper: str
    options: Mapping[str, Any]
    ranks: int = 2
    own: bool = False
    plain: bool = False
    counts: bool = False
    late: bool = False
    tiny: bool = False

    @property
    def eager(self) -> bool:
        """Whether gradients travel."""
        return self.wrapper == "EagerOptimizer"

    @property
    def holdable(self) -> bool:
        """Whether ranks continue while one has not begun its step. (A majority waits for the rank that it draws.)"""
        return self.late and self.algorithm != "osgp" and self.options.get("quorum") != "majority"

    @property
    def mixes(self) -> bool:
        """Whether ranks have weights of their own that differ."""
        return not self.eager and not self.plain

    @property
    def algorithm(self) -> str:
        """Name of the algorithm; "eager" where gradients travel."""
        return str(self.options.get("algorithm", "eager" if self.eager else "lsgd"))


def _arms() -> list[Arm]:
    def eager(name: str, plain: bool = False, **rest: Any) -> Arm:
        own = {key: rest.pop(key) for key in ("ranks", "own", "counts", "late", "tiny") if key in rest}
        return Arm(f"eager-{name}", "EagerOptimizer", rest, plain=plain, **own)

    def gossip(name: str, ranks: int = 2, plain: bool = False, own: bool = False, **options: Any) -> Arm:
        late = options["algorithm"] in ("osgp", "adpsgd")
        return Arm(name, "GossipOptimizer", options, ranks, own, plain, late=late)

    def leader(name: str, **options: Any) -> Arm:
        return Arm(name, "LeaderOptimizer", options, own=True, late=True)

    def both(name: str, ranks: int = 2, **options: Any) -> list[Arm]:
        """One that equals a plain run where ranks see the same data, and one whose ranks see different data."""
        return [gossip(name, ranks, plain=True, **options), gossip(f"{name}-own", ranks, own=True, **options)]

    outer = {"average_every": 2, "max_staleness": 1}
    return [
        eager("all", plain=True, own=True, counts=True, quorum="all"),
        eager("all-same", plain=True, counts=True, quorum="all"),
        eager("all-buckets", plain=True, own=True, counts=True, tiny=True, quorum="all"),
        eager("synchronous", plain=True, own=True, counts=True, quorum="solo", max_staleness=0),
        eager("ahead", own=True, counts=True, quorum="all", weight_prediction=2),
        eager("solo", own=True, late=True, quorum="solo", max_staleness=2),
        eager("solo-plain", own=True, late=True, tiny=True, quorum="solo", max_staleness=2, weight_prediction=0),
        eager("majority", own=True, late=True, ranks=3, quorum="majority"),
        eager("pace", own=True, late=True, quorum="solo", max_staleness=3, pace="rounds"),
        gossip("allreduce", plain=True, algorithm="allreduce"),
        gossip("allreduce-own", own=True, algorithm="allreduce"),
        *both("sgp", algorithm="sgp"),
        gossip("sgp-star", 3, algorithm="sgp", topology="star"),
        gossip("sgp-star-own", 3, own=True, algorithm="sgp", topology="star"),
        gossip("osgp-own", 4, own=True, algorithm="osgp"),
        *both("dpsgd", 3, algorithm="dpsgd", topology="ring"),
        *both("dpsgd-quasi", 3, algorithm="dpsgd", topology="ring", quasi_global=True),
        *both("dpsgd-seldom", 3, algorithm="dpsgd", topology="ring", gossip_every=3, average_every=5),
        gossip("adpsgd-own", 3, own=True, algorithm="adpsgd", topology="ring"),
        *both("exact", 3, algorithm="exact-diffusion", topology="ring"),
        gossip("exact-seldom-own", 3, own=True, algorithm="exact-diffusion", topology="ring", gossip_every=4),
        gossip("noloco-own", 3, own=True, algorithm="noloco", topology="random-pairs", gossip_every=2),
        *both("local", algorithm="local", **outer),
        gossip("slowmo", plain=True, algorithm="slowmo", outer_lr=1.0, outer_momentum=0.0, **outer),
        gossip("slowmo-own", own=True, algorithm="slowmo", **outer),
        gossip("diloco-own", own=True, algorithm="diloco", **outer | {"outer_momentum": 0.9}),
        leader("lsgd-own", algorithm="lsgd", global_period=1, local_period=1, group=2),
        leader("easgd-own", algorithm="easgd", global_period=1),
    ]


ARMS: Mapping[str, Arm] = {arm.name: arm for arm in _arms()}
FEW = (
    *("eager-all", "eager-ahead", "eager-solo", "eager-pace", "sgp-star-own", "osgp-own", "dpsgd-quasi-own"),
    *("adpsgd-own", "exact-own", "noloco-own", "local", "diloco-own", "lsgd-own", "easgd-own"),
)
"""Arms of an ordinary run: each mechanism once."""


@dataclass(frozen=True)
class Cell:
    """A combination: a name of each factor's level, "none" where a factor is absent."""

    binding: str
    arm: str
    levels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __getitem__(self, factor: str) -> str:
        return self.levels.get(factor, "none")

    @property
    def id(self) -> str:
        """The cell in a test's name: levels that are there."""
        there = [f"{factor}={level}" for factor, level in self.levels.items() if level != "none"]
        return "/".join([self.binding, self.arm, *there])

    @property
    def ranks(self) -> int:
        """Number of ranks that share the optimizer."""
        return ARMS[self.arm].ranks * (1 if self["hosts"] == "none" else 2)

    @property
    def plain(self) -> bool:
        """Whether weights are a plain run's: as the arm says, where no gradients or averages are rounded."""
        arm = ARMS[self.arm]
        rounds = arm.eager or arm.algorithm in ("local", "slowmo", "diloco")
        return arm.plain and not (rounds and self["travel"] != "none")

    @property
    def moved_by_ends(self) -> bool:
        """Whether a drain, which runs no hooks, brings what other ranks sent before their hooks: so do hosts' messages
        that are late."""
        return self.arm.startswith(MOVED_BY_ENDS) or (self["hosts"] != "none" and self.arm.startswith("osgp"))

    @property
    def refuses_checkpoints(self) -> bool:
        """Whether ranks with messages of other hosts on their way refuse a checkpoint after a cut.

        (There are none where a script drains before, to swap averages in.)
        """
        osgp = self.arm.startswith("osgp") and self["averages"] != "swapped"
        return self["middle"] == "cut" and self["hosts"] != "none" and osgp

    @property
    def moves_frozen(self) -> bool:
        """Whether a parameter that is frozen between drains is mixed, or rounded, or moved by a late round."""
        arm = ARMS[self.arm]
        return arm.mixes or arm.late or self["travel"] != "none"

    def without(self, factor: str) -> Cell:
        """Return the cell with one factor absent."""
        return dataclasses.replace(self, levels={**self.levels, factor: "none"})


def steps_of(cell: Cell) -> int:
    """Return how many steps a cell's script takes: more where something may pile up."""
    arm = ARMS[cell.arm]
    corrects = arm.own and (arm.algorithm == "exact-diffusion" or arm.options.get("quasi_global", False))
    piles_up = cell["rate"] in FALLS or cell["training"] == "unused-on-a-rank"
    return 4 * STEPS if corrects and piles_up else STEPS


def drop_of(cell: Cell) -> int:
    """Return the step before which the rate falls, of a cell in which it does."""
    return steps_of(cell) // 2


def options_of(cell: Cell, hvd: Any, process_set: Callable[..., Any]) -> dict[str, Any]:
    """Return arguments of the factory: those of the arm, and of how ranks are connected.

    Args:
        hvd: the binding's namespace.
        process_set: makes one of ranks.
    """
    options = dict(ARMS[cell.arm].options)
    if ARMS[cell.arm].tiny:
        options["bucket_cap_mb"] = TINY_MB
    if cell["travel"] != "none":
        options["compression"] = getattr(hvd.Compression, cell["travel"])
    if cell["hosts"] != "none":
        options["hierarchical"] = 2
    if cell["set"] != "none":
        options["process_set"] = process_set(*range(cell.ranks))
    return options


CONNECTED: Mapping[str, Sequence[str]] = {"travel": ["bf16", "int8"], "hosts": ["hosts"], "set": ["set"]}
"""Factors of all bindings: what messages are compressed to, hosts of two ranks, a rank outside of a process set."""
OTHER = {"algorithm": "sgp", "average_every": 0, "max_staleness": None}
"""Settings that "switch" takes up in the middle of a script, before it goes back to those of the arm."""


def switched(cell: Cell, back: bool) -> dict[str, Any]:
    """Return the settings to switch to: other ones, or back to the arm's."""
    options = ARMS[cell.arm].options
    if not back:
        return {"algorithm": "allreduce"} if options["algorithm"] == "sgp" else dict(OTHER)
    own = {"average_every": 0, "max_staleness": None, **options}
    return {name: value for name, value in own.items() if name != "quasi_global"}


def connects(levels: Mapping[str, str]) -> bool:
    """Return whether an arm may have these levels of ``CONNECTED``, "switch" and "elastic" in the middle."""
    arm, middle = ARMS.get(levels.get("arm", "")), levels.get("middle", "none")
    travel, hosts, inside = (levels.get(factor, "none") for factor in CONNECTED)
    if middle == "elastic" and (hosts != "none" or inside != "none"):
        return False  # (an elastic job has to be given its process sets and hosts again)
    if arm is None:
        return True
    if travel != "none" and (arm.wrapper == "LeaderOptimizer" or arm.algorithm == "allreduce"):
        return False
    exact = levels.get("weights") in ("prune", "unit-norm") or levels.get("training") == "freeze-at-drain"
    if travel != "none" and arm.mixes and exact:
        return False  # (what rounding leaves out of one message is in a later one: weights move a little)
    if travel == "int8" and (arm.eager or arm.algorithm == "adpsgd"):
        return False
    mixes = arm.algorithm in ("sgp", "osgp", "dpsgd", "adpsgd") and not arm.options.get("quasi_global")
    if hosts != "none" and not (mixes or (arm.eager and "pace" not in arm.options)):
        return False
    return middle != "switch" or (arm.wrapper == "GossipOptimizer" and arm.algorithm not in ("noloco", "adpsgd"))


def parse(text: str) -> Cell:
    """Return the cell of an ``id``."""
    binding, arm, *levels = text.split("/")
    return Cell(binding, arm, dict(level.split("=", 1) for level in levels))


def shrink(cell: Cell, fails: Callable[[Cell], bool]) -> Cell:
    """Return a part of a cell that fails too and of which no level can be left out."""
    for factor, level in list(cell.levels.items()):
        smaller = cell.without(factor)
        if level != "none" and fails(smaller):
            cell = smaller
    return cell


def cover(
    factors: Mapping[str, Sequence[str]],
    crossed: int,
    allowed: Callable[[Mapping[str, str]], bool],
    seed: int = 0,
    begun: Sequence[Mapping[str, str]] = (),
) -> list[dict[str, str]]:
    """Choose few combinations in which all levels of any ``crossed`` factors meet, where they are allowed to.

    Greedy, for too many factors to list all combinations (``tests.covering`` does, for few): each begins with a
    meeting that is still due, and takes of each other factor the level in which most due meetings are.

    Args:
        factors: the levels of each.
        crossed: number of factors whose levels meet.
        allowed: whether some levels may meet; what it forbids, it must forbid of any combination with these levels.
        seed: of the order of factors and of the choice between levels that are as good.
        begun: levels that must meet in addition, each in a combination of their own.
    """
    draw, names = random.Random(seed), list(factors)
    due = {
        meeting: None
        for group in itertools.combinations(names, crossed)
        for meeting in itertools.product(*([(name, level) for level in factors[name]] for name in group))
        if allowed(dict(meeting))
    }
    rows, beginnings = list[dict[str, str]](), list(begun)
    while due or beginnings:
        row = dict(beginnings.pop(0) if beginnings else next(iter(due)))
        for name in draw.sample(names, len(names)):
            if name in row:
                continue
            levels = [level for level in factors[name] if allowed({**row, name: level})]
            if not levels:
                break
            others = list(itertools.combinations(sorted(row.items()), crossed - 1))
            gains = {
                level: sum(_ordered((*other, (name, level)), names) in due for other in others) for level in levels
            }
            best = max(gains.values())
            row[name] = draw.choice([level for level in levels if gains[level] == best])
        met = list(itertools.combinations(((name, row[name]) for name in names if name in row), crossed))
        if len(row) == len(names):
            rows.append({name: row[name] for name in names})
        else:  # no level of a factor may meet all of these: its first meeting cannot be in any combination
            met = met[:0]
            del due[next(iter(due))]
        for meeting in met:
            due.pop(meeting, None)
    return rows


def _ordered(meeting: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(meeting, key=lambda pair: names.index(pair[0])))
