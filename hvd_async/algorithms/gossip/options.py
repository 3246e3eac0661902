"""Gossip, as data: a user's options, and the algorithms with their own defaults, needs of a graph and differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.gossip import outer
from hvd_async.algorithms.gossip.quasi_global import Smoothing
from hvd_async.algorithms.option import BUFFERS, Real, Whole, check_one_of, option, read_by_epoch
from hvd_async.mixing import SCHEMES
from hvd_async.runtime.family import Algorithm
from hvd_async.topology import NAMED, WITH_PEERS

COMPRESSIONS = ("none", "fp16", "bf16", "int8")
OUTER_BOUNDS: Mapping[str, Whole | Real] = {
    "fragments": Whole(1),
    "outer_lr": Real(0.0, above=True),
    "outer_momentum": Real(0.0, below=1.0),
}
"""Bounds of an outer optimizer's options."""


def _number_by_epoch(one: Whole, example: str) -> Callable[[str], int | dict[int, int]]:
    """Return what reads a number, or numbers by epoch as in ``example``."""

    def read(text: str) -> int | dict[int, int]:
        if ":" not in text:
            return one(text)
        found = read_by_epoch(text, example, one)
        if 0 not in found:
            raise ValueError(f"{text!r} does not say how many from the start: begin with 0:, as {example}")
        return found

    return read


def _read_schedule(text: str) -> dict[int, str]:
    """Return algorithms by epoch."""

    def read(name: str) -> str:
        if name not in ALGORITHMS:
            known = sorted(ALGORITHMS.values(), key=lambda each: not each.takes_the_place)  # (all ranks' average first)
            raise ValueError(f"{name!r} is not one of {', '.join(each.name for each in known)}")
        return name

    return read_by_epoch(text, "0:allreduce,5:sgp", read)


@dataclass(frozen=True)
class GossipOptions:
    """A user's options of ``GossipOptimizer``, beside Horovod's arguments and those of one framework."""

    algorithm: str = option(
        "sgp",
        '"sgp" (stochastic gradient push, Assran et al., ICML 2019), "osgp" (the same, with messages up to '
        '``max_staleness`` steps late), "dpsgd" (Lian et al., NeurIPS 2017), "adpsgd" (Lian et al., ICML 2018: '
        "pairs of ranks are averaged while they compute, and no rank waits for a slow one), "
        '"exact-diffusion" (Yuan et al., 2019: what data differ by between ranks leaves no bias), "noloco" '
        "(Kolehmainen et al., 2025: pairs of ranks are averaged after some steps, with momentum), "
        '"allreduce" (weights are averaged over all ranks after every step), "local" (after every ``average_every`` '
        'steps, while the next ones are taken: local SGD, Stich, ICLR 2019), "slowmo" (with slow momentum, Wang et '
        'al., ICLR 2020) or "diloco" (with Nesterov\'s, Douillard et al., 2023)',
        flags=(),
    )
    topology: Any = option(
        None,
        "a name (``hvd_async.topology.NAMED``), a ``Topology`` or a networkx graph; None: "
        '"exponential" for sgp and osgp, "bipartite-exponential" for dpsgd and adpsgd, "ring" for exact-diffusion, '
        '"random-pairs" for noloco',
        help=f"who sends to whom: {', '.join(NAMED)}; all but sgp and osgp need a symmetric one",
        absent="exponential for these two, bipartite-exponential for dpsgd and adpsgd, ring for exact-diffusion, "
        "random-pairs for noloco",
        choices=tuple(NAMED),
        metavar="NAME",
    )
    peers: int | Mapping[int, int] = option(
        1,
        "how many ranks a rank sends to each step, where the topology leaves it open; or {epoch: peers}",
        help=f"to how many ranks a rank sends at a step, of the topologies {', '.join(WITH_PEERS)}; 0:1,30:2 "
        "is 1 from epoch 0 and 2 from epoch 30 on",
        read=_number_by_epoch(Whole(1), "0:1,30:2"),
        metavar="N",
    )
    mixing: Any = option(
        "uniform",
        '"uniform" or "metropolis" weights, a matrix ``W[receiver, sender]`` whose columns sum to 1, or a list of '
        "such, one a step in turn",
        help="uniform parts what a rank has equally among itself and its receivers; metropolis weighs by the "
        "larger number of neighbours of the two, as dpsgd needs it where these differ, such as on a star",
        choices=SCHEMES,
    )
    max_staleness: int | None = option(
        None,
        "steps a message of osgp may be late, or an average of local, slowmo and diloco (less than ``average_every``); "
        "None: 1 of osgp, half of ``average_every`` of these",
        help="how many steps late a message, or an average, may be; 0 waits for it: sgp, local SGD as it was published",
        absent="1 of osgp, half of --average-every of the others",
        read=Whole(0),
        metavar="N",
    )
    gossip_every: int | None = option(
        None,
        "send and mix each so many steps, with local steps in between (Koloskova et al., ICML 2020); None: 1, of "
        "noloco 8",
        help="send and mix in every N-th step only; in between ranks step by themselves",
        absent="1, of noloco 8",
        read=Whole(1),
        metavar="N",
    )
    hierarchical: bool | int = option(
        False,
        "average the ranks of a host first, then gossip between hosts, one partner a host. True for Horovod's "
        "local ranks, or so many ranks, numbered host by host",
        help="average the ranks of a host first, and gossip from host to host; the short form does not get past "
        "horovodrun, which has flags that begin so",
        absent="off",
        flags=("--hierarchical-gossip", "--hierarchical"),
    )
    max_local_steps: int = option(
        4,
        "steps that a rank of adpsgd may take between two averagings",
        help="steps that a rank may take between two averagings, before it waits for one",
        read=Whole(1),
        metavar="N",
    )
    average_every: int | Mapping[int, int] = option(
        0,
        "average all ranks each so many steps (Gossip-PGA, Chen et al., 2021), or {epoch: steps}; 0: never, but of "
        "local, slowmo and diloco 8",
        help="average the weights of all ranks every N steps; 0 is never, but of local, slowmo and diloco 8; 0:1,5:8 "
        "is 1 from epoch 0 and 8 from epoch 5 on",
        read=_number_by_epoch(Whole(0), "0:1,5:8"),
        metavar="N",
    )
    fragments: int = option(
        1,
        "parts of the weights that local, slowmo and diloco average in turn, within ``average_every`` steps (Streaming "
        "DiLoCo, Douillard et al., 2025)",
        help="parts of the weights that are averaged in turn, each every --average-every steps",
        read=OUTER_BOUNDS["fragments"],
        metavar="N",
    )
    outer_lr: float | None = option(
        None,
        "by how much slowmo, diloco and noloco move what the ranks have learned (alpha of slowmo, beta of noloco); "
        "None: 1 of slowmo, 0.7 of the others",
        help="by how much the ranks' mean step is taken; alpha of slowmo",
        absent="1 of slowmo, 0.7 of diloco and noloco",
        read=OUTER_BOUNDS["outer_lr"],
    )
    outer_momentum: float | None = option(
        None,
        "slow momentum of slowmo and noloco, Nesterov's of diloco; None: 0.3, and 0.5 of diloco, for some 4 to 16 "
        "steps between averages (the papers' 0.7 and 0.9 are for many more)",
        help="momentum from one average to the next",
        absent="0.3 of slowmo and noloco, 0.5 of diloco",
        read=OUTER_BOUNDS["outer_momentum"],
    )
    schedule: Mapping[int, str] | None = option(
        None,
        "{epoch: algorithm}, in place of ``algorithm`` from that epoch on; ``set_epoch`` makes it so",
        help="the algorithm from epoch E on: 0:allreduce,5:sgp is allreduce in epochs 0 to 4, then sgp",
        absent="--algorithm in all epochs",
        read=_read_schedule,
        metavar="E:NAME,...",
    )
    quasi_global: bool = option(
        False,
        "of sgp, dpsgd and adpsgd: what gossip does to a rank's weights pulls its momentum towards that of all ranks "
        "(after Lin et al., ICML 2021), where these see different data; of SGD with momentum",
        help="gossip pulls a rank's momentum towards that of all ranks, where these see different data; of SGD with "
        "momentum",
    )
    buffers: str = option(
        "average",
        'how batch-norm statistics agree in ``drain()`` and ``consensus()``: "average" them, keep each rank\'s own '
        '("local"), or take rank 0\'s ("root")',
        flags=(),
    )

    def check(self, ranks: int | None) -> None:
        """Refuse what no job can have, whatever its algorithms; ``make_plan`` checks what depends on them.

        Raises:
            ValueError: with a hint.
        """
        check_one_of("buffers", self.buffers, BUFFERS)
        if not isinstance(self.quasi_global, bool):
            raise ValueError(f"quasi_global={self.quasi_global!r}: take True or False")


BY_STEP = (
    *("topology", "peers", "mixing", "max_staleness", "gossip_every", "max_local_steps", "average_every"),
    *("fragments", "outer_lr", "outer_momentum"),
)
"""A user's options of a plan, beside its algorithm: those that ``switch()`` may change."""
NOT_GIVEN: Mapping[str, Any] = {
    **{name: getattr(GossipOptions, name) for name in BY_STEP},
    "compression": "none",
    "hierarchical": False,
    "quasi_global": False,
}
"""Values of a plan's options that any algorithm takes: those of an option that was not given."""
NO_USE: Mapping[str, str] = {
    "topology": "topology: {0} averages all ranks; leave it out",
    "peers": "peers: {0} averages all ranks; leave it out",
    "mixing": "mixing: {0} averages ranks alike (half and half, or all of them); leave it out, and give a graph as "
    "topology",
    "max_staleness": "max_staleness: messages of {0} are never late; take 'osgp', or 0",
    "gossip_every": "gossip_every: {0} sends nothing at steps of one number; leave it out (adpsgd has max_local_steps, "
    "allreduce average_every)",
    "max_local_steps": "max_local_steps: no rank of {0} goes on without its neighbours; leave it out, or take 'adpsgd'",
    "average_every": "average_every: {0} averages all ranks at no step; call drain() where an average is due",
    "fragments": "fragments: {0} averages no parts of the weights in turn; leave it out, or take local or diloco",
    "outer_lr": "outer_lr: {0} has no outer optimizer; leave it out, or take slowmo, diloco or noloco",
    "outer_momentum": "outer_momentum: {0} has no outer optimizer; leave it out, or take slowmo, diloco or noloco",
    "compression": "compression: averages over all ranks travel as they are; leave it out",
    "hierarchical": "hierarchical: {0} averages no hosts first; leave it out, or take sgp, osgp, dpsgd or adpsgd",
    "quasi_global": "quasi_global: under {0} each rank's momentum is its own; leave it out, or take sgp, dpsgd or "
    "adpsgd",
}
"""The error message for an option that an algorithm does not have."""


@dataclass(frozen=True)
class GossipAlgorithm(Algorithm):
    """One algorithm of the family. Its ``options`` hold the values that it uses where none was given.

    Attributes:
        doubly_stochastic: whether its mixing matrices must be doubly stochastic and symmetric.
        pairs: whether neighbours are averaged in pairs, when one asks: edges are not fixed, and no rank sends alone.
        sends_before_update: whether messages hold the weights from before a step's update.
        exact: whether what ranks' data differ by is corrected: on static graphs, mixed by (I + W) / 2.
        slow: whether neighbours' averages move a rank's slow weights, by an outer optimizer.
        outer: how the average of all ranks moves the anchor that they go on from; None: there is none.
    """

    doubly_stochastic: bool = False
    pairs: bool = False
    sends_before_update: bool = False
    exact: bool = False
    slow: bool = False
    outer: outer.Step | None = None

    @property
    def has_graph(self) -> bool:
        """Whether ranks have neighbours."""
        return "topology" in self.options

    @property
    def takes_the_place(self) -> bool:
        """Whether it is an average of all ranks after each step, which may take the place of any other algorithm."""
        return not self.has_graph and self.outer is None

    @property
    def may_be_late(self) -> bool:
        """Whether messages may be ``max_staleness`` steps late."""
        return "max_staleness" in self.options


def _with_neighbours(name: str, options: Mapping[str, Any], about: str, **traits: Any) -> GossipAlgorithm:
    """Return an algorithm whose ranks wait for messages of neighbours."""
    return GossipAlgorithm(
        name, "gossip", options, "weights", "neighbours", about=about, compressions=COMPRESSIONS, **traits
    )


def _with_anchor(name: str, options: Mapping[str, Any], about: str, step: outer.Step) -> GossipAlgorithm:
    """Return an algorithm whose ranks go on from an anchor that an outer optimizer moves."""
    return GossipAlgorithm(
        name, "gossip", options, "weights", "period", about=about, compressions=COMPRESSIONS, outer=step
    )


SMOOTHING = Smoothing(strength=0.7, memory=0.95)
"""Constants of quasi-global momentum. (With 1 and 0.9 momenta of dpsgd run away on a ring of 32 ranks.)"""

_MIXED: Mapping[str, Any] = {
    name: NOT_GIVEN[name] for name in ("peers", "mixing", "gossip_every", "average_every", "compression")
}
_NO_AVERAGES = {name: value for name, value in _MIXED.items() if name != "average_every"}
_PUSH_SUM: Mapping[str, Any] = {**_MIXED, "hierarchical": False, "topology": "exponential"}
_SYMMETRIC = {"topology": "bipartite-exponential"}
_PAIRED = {"peers": 1, "max_local_steps": 4, "compression": "none", "hierarchical": False}
_QUASI_GLOBAL = {"quasi_global": False}
_PAIRS_IN_TURN = {"topology": "random-pairs", "gossip_every": 8, "outer_lr": 0.7, "outer_momentum": 0.3}
_OUTER: Mapping[str, Any] = {"average_every": 8, "max_staleness": None, "fragments": 1, "compression": "none"}
"""(With None an average may be half of ``average_every`` steps late.)"""
_BOTH_WAYS = {"symmetric_graph": True, "doubly_stochastic": True}

ALGORITHMS: Mapping[str, GossipAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        _with_neighbours("sgp", {**_PUSH_SUM, **_QUASI_GLOBAL}, "waits for their messages"),
        _with_neighbours("osgp", {**_PUSH_SUM, "max_staleness": 1}, "takes them in up to --max-staleness steps later"),
        _with_neighbours(
            "dpsgd",
            {**_PUSH_SUM, **_SYMMETRIC, **_QUASI_GLOBAL},
            "wants a symmetric graph",
            sends_before_update=True,
            **_BOTH_WAYS,
        ),
        GossipAlgorithm(
            "adpsgd",
            "gossip",
            {**_SYMMETRIC, **_PAIRED, **_QUASI_GLOBAL},
            sends="weights",
            waits_for="nobody",
            symmetric_graph=True,
            about="averages with whichever neighbour is ready",
            compressions=("none", "fp16", "bf16"),
            pairs=True,
        ),
        _with_neighbours(
            "exact-diffusion",
            {**_MIXED, "topology": "ring"},
            "wants a static symmetric graph, and corrects what data differ by",
            exact=True,
            **_BOTH_WAYS,
        ),
        _with_neighbours(
            "noloco",
            {**_NO_AVERAGES, **_PAIRS_IN_TURN},
            "averages pairs every --gossip-every steps, with momentum",
            slow=True,
            **_BOTH_WAYS,
        ),
        GossipAlgorithm("allreduce", "gossip", {"average_every": 1}, sends="weights", waits_for="all"),
        _with_anchor(
            "local",
            _OUTER,
            "averages all ranks every --average-every steps, while it takes the next ones",
            outer.local,
        ),
        _with_anchor(
            "slowmo", {**_OUTER, "outer_lr": 1.0, "outer_momentum": 0.3}, "the same with slow momentum", outer.slowmo
        ),
        _with_anchor(
            "diloco",
            {**_OUTER, "outer_lr": 0.7, "outer_momentum": 0.5},
            "the same with Nesterov's momentum",
            outer.diloco,
        ),
    )
}
"""By name. Those without a graph average the weights of all ranks every so many steps."""
