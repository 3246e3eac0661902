"""Gossip: the user's options, the algorithms, the configuration ranks share, and messages to and from rank 0."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.algorithms.gossip import outer
from hvd_async.algorithms.gossip.quasi_global import Smoothing
from hvd_async.algorithms.option import BUFFERS, Real, Whole, check_one_of, option, read_by_epoch
from hvd_async.mixing import SCHEMES
from hvd_async.runtime.protocol import Algorithm, Config, OptimizerCommand, OptimizerEvent
from hvd_async.topology import NAMED, WITH_PEERS

# -- configuration that ranks share, and messages ----------------------------------------------------------------------


NAMES_IN_RING = 4
"""Exchanges, or averages, that may be in flight at once; their names are reused, which Horovod's cache needs."""
STAGES = 3
"""Number of stages of a step's messages where the ranks of a host step together. The key of a message is the number of
its step times this, plus its stage."""


class GossipConfig(Config, frozen=True, tag=True):
    """Configuration that all ranks of an optimizer must have in common before the first exchange.

    Attributes:
        algorithm: a name of ``options.ALGORITHMS``.
        graph: the topology's name, and a digest of its edges and their weights.
        neighbours: places of each rank's neighbours, by its own place (of hosts, if
            ranks are averaged there first); empty except for AD-PSGD.
        max_staleness: steps that a message may be late (OSGP), or an average (outer optimizers).
        gossip_every: steps between two in which messages are sent, if they may not be later than that.
        max_local_steps: steps a rank may take between two averagings (AD-PSGD).
        average_every: steps between two averages over all ranks; 0: never.
        compression: encoding of messages.
        local_size: ranks that are averaged before they gossip; 1: none.
        quasi_global: whether what gossip does to the weights corrects the momentum.
        fragments: parts of the weights that are averaged in turn (outer optimizers).
        outer_lr, outer_momentum: an outer optimizer's.
    """

    algorithm: str
    graph: str
    neighbours: list[list[int]] = msgspec.field(default_factory=list)
    max_staleness: int = 0
    gossip_every: int = 1
    max_local_steps: int = 0
    average_every: int = 0
    compression: str = "none"
    local_size: int = 1
    quasi_global: bool = False
    fragments: int = 1
    outer_lr: float = 0.0
    outer_momentum: float = 0.0

    @property
    def period(self) -> int:
        """Steps between two sending steps. When it sends, a rank of OSGP has received all earlier messages: with more
        in flight it would keep too little of x and w, and z = x / w would diverge."""
        return max(self.gossip_every, self.max_staleness)


class MessageQueued(OptimizerEvent, frozen=True, tag=True):
    """This rank has queued messages of its step ``key``, which its engine keeps until an exchange takes them."""

    key: int


class MessageComing(OptimizerEvent, frozen=True, tag=True):
    """This rank will queue messages of its step ``key``, or none, once it has received those of earlier steps: it is
    mixing, and has queued all of its own that come before. So when all active ranks have said this, nobody waits for
    anything that is not in an exchange."""

    key: int


class NoMessage(OptimizerEvent, frozen=True, tag=True):
    """This rank has no message of its step ``key``, in which others may have some."""

    key: int


class PairRequested(OptimizerEvent, frozen=True, tag=True):
    """This rank is ready to be averaged with a neighbour (AD-PSGD)."""


class WaitingForMessage(OptimizerEvent, frozen=True, tag=True):
    """This rank waits for a message that was in none of the first ``seen`` exchanges, and has none queued."""

    seen: int


class AverageEntered(OptimizerEvent, frozen=True, tag=True):
    """This rank is in its average number ``index`` over all ranks, and waits for it; with its push-sum weight, or one
    for each part of its weights (hierarchical gossip). Under an outer optimizer it does not wait; the average is of
    fragment ``part``, and the weight is its learning rate."""

    index: int
    weights: list[float]
    part: int = 0


class ExchangeDone(OptimizerEvent, frozen=True, tag=True):
    """An exchange has completed on this rank."""

    round: int


class StartExchange(OptimizerCommand, frozen=True, tag=True):
    """Submit an exchange, with this rank's part of it.

    Attributes:
        round: its number.
        senders: queued messages, as (first rank, last rank, key): one of each rank from the first to the last, in
            order. An exchange of all ranks is told in a few bytes, however many there are.
        pairs: of ranks to average; of hosts to average, each named by its first rank.
        gathers: whether each rank sends the ranks of its host the part of their weights that it owns, once all earlier
            exchanges have completed: the last exchange before an end (AD-PSGD of hosts).
    """

    round: int
    senders: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    pairs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    gathers: bool = False

    @property
    def messages(self) -> list[tuple[int, int]]:
        """The queued messages, as (sender, key)."""
        return [(rank, key) for first, last, key in self.senders for rank in range(first, last + 1)]

    def keys_of(self, rank: int) -> list[int]:
        """Return the keys of a rank's messages in it."""
        return [key for first, last, key in self.senders if first <= rank <= last]


class StartAverage(OptimizerCommand, frozen=True, tag=True):
    """Submit the average number ``index`` over some ranks, whose push-sum weights sum to ``weights``; all others
    contribute zeros. ``spans`` are those ranks, as (first, last); ``part`` is the fragment that is averaged."""

    index: int
    spans: list[tuple[int, int]]
    weights: list[float]
    part: int = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return [rank for first, last in self.spans for rank in range(first, last + 1)]


def spans_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranks as (first, last) of each run of consecutive numbers."""
    return [(first, last) for first, last, _ in senders_of((rank, 0) for rank in ranks)]


def senders_of(messages: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return messages, (sender, key), as ``StartExchange.senders``: a run of consecutive ranks has the same key."""
    runs: list[tuple[int, int, int]] = []
    first = last = key = 0
    for rank, own in messages:
        if runs and rank == last + 1 and own == key:
            last = rank
            runs[-1] = (first, last, key)
        else:
            first, last, key = rank, rank, own
            runs.append((first, last, key))
    return runs


class RankFinished(OptimizerCommand, frozen=True, tag=True):
    """A rank has finished: it sends nothing of its steps after ``step`` (since the last drain).

    ``gone``: it has the optimizer no more.
    """

    rank: int
    step: int
    gone: bool = False


EVENTS = (MessageQueued, MessageComing, NoMessage, PairRequested, WaitingForMessage, AverageEntered, ExchangeDone)
COMMANDS = (StartExchange, StartAverage, RankFinished)


# -- a user's options, and the algorithms ------------------------------------------------------------------------------


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
        outer: how the average of all ranks moves the anchor that they continue from; None: there is none.
        rank: the class of its ranks, as MODULE:CLASS of this package. (By name, since ranks import this module.)
        host_rank: the same where the ranks of a host step together.
    """

    doubly_stochastic: bool = False
    pairs: bool = False
    sends_before_update: bool = False
    exact: bool = False
    outer: outer.Step | None = None
    rank: str = "rank:PushSumWorker"
    host_rank: str = "hosts:HierarchicalWorker"

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
    """Return an algorithm whose ranks continue from an anchor that an outer optimizer moves."""
    return GossipAlgorithm(
        name,
        "gossip",
        options,
        "weights",
        "period",
        about=about,
        compressions=COMPRESSIONS,
        outer=step,
        rank="outer_worker:OuterWorker",
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
            rank="adpsgd:ADPSGDWorker",
            host_rank="hosts:HostPairWorker",
        ),
        _with_neighbours(
            "exact-diffusion",
            {**_MIXED, "topology": "ring"},
            "wants a static symmetric graph, and corrects what data differ by",
            exact=True,
            rank="exact_diffusion:ExactDiffusionWorker",
            **_BOTH_WAYS,
        ),
        _with_neighbours(
            "noloco",
            {**_NO_AVERAGES, **_PAIRS_IN_TURN},
            "averages pairs every --gossip-every steps, with momentum",
            rank="noloco:NoLoCoWorker",
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
"""By name. Those without a graph average the weights of all ranks periodically."""


def rank_class(config: GossipConfig) -> Any:
    """Return the class of a configuration's ranks."""
    algorithm = ALGORITHMS[config.algorithm]
    module, name = (algorithm.host_rank if config.local_size > 1 else algorithm.rank).split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
