"""Gossip: the user's options, the algorithms, the shared configuration, and messages to and from the coordinator."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.algorithms.gossip import outer
from hvd_async.algorithms.gossip.quasi_global import Smoothing
from hvd_async.algorithms.option import BUFFERS, ByEpoch, Real, Whole, check_one_of, option, options_of, read_by_epoch
from hvd_async.mixing import SCHEMES
from hvd_async.runtime.protocol import Algorithm, Config, OptimizerCommand, OptimizerEvent
from hvd_async.topology import NAMED, WITH_PEERS

# -- configuration that ranks share, and messages ----------------------------------------------------------------------


NAMES_IN_RING = 4
"""Names of collectives, and so the maximum number of exchanges, or averages, in flight; names are reused to fit into
Horovod's cache."""
STAGES = 3
"""Number of stages of a step if the ranks of a host step together. A message's key is then step * STAGES + stage."""


class GossipConfig(Config, frozen=True, tag=True):
    """Configuration of an optimizer, which must be the same on all its ranks.

    Attributes:
        algorithm: a name in ``ALGORITHMS``.
        graph: the topology's name, and a digest of its edges and their weights.
        neighbours: the neighbours of each place, as places (of hosts with ``local_size`` above 1, else of ranks); empty
            except for AD-PSGD.
        max_staleness: steps that a message (OSGP) or an average (outer optimizers) may be late.
        gossip_every: steps between two sending steps; see ``period``.
        max_local_steps: steps that a rank may take between two averagings (AD-PSGD).
        average_every: steps between two averages over all ranks; 0: never.
        compression: encoding of messages.
        local_size: ranks per host that are averaged before they gossip; 1: none.
        quasi_global: whether gossip corrects the momentum.
        fragments: number of parts of the weights that are averaged in turn (outer optimizers).
        outer_lr, outer_momentum: constants of the outer optimizer.
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
        """Steps between two sending steps. A rank of OSGP sends only after it has received all earlier messages: with
        more in flight it would keep too little of x and w, and z = x / w would diverge."""
        return max(self.gossip_every, self.max_staleness)


class MessageQueued(OptimizerEvent, frozen=True, tag=True):
    """This rank has queued messages of its step ``key``, with this push-sum weight; its engine holds them until an
    exchange takes them."""

    key: int
    weight: float = 1.0


class MessageComing(OptimizerEvent, frozen=True, tag=True):
    """This rank will queue messages of its step ``key``, or none, once it has received messages of earlier steps.

    It has queued all its own messages of earlier steps. When all active ranks have announced this, no rank waits for a
    message that is not in an exchange.
    """

    key: int


class NoMessage(OptimizerEvent, frozen=True, tag=True):
    """This rank has no message in its step ``key``, in which other ranks may have some."""

    key: int


class PairRequested(OptimizerEvent, frozen=True, tag=True):
    """This rank is ready to be averaged with a neighbour (AD-PSGD)."""


class WaitingForMessage(OptimizerEvent, frozen=True, tag=True):
    """This rank waits for a message that was in none of the first ``seen`` exchanges, and has none queued."""

    seen: int


class AverageEntered(OptimizerEvent, frozen=True, tag=True):
    """This rank has entered its average number ``index`` over all ranks, and waits for it.

    ``weights`` is its push-sum weight, or one for each part of its weights (push-sum of hosts). Under an outer
    optimizer the rank does not wait, ``part`` is the fragment, ``weights`` is the learning rate, and ``moved`` is the
    set of parameters that this rank has moved (``outer.packed``); empty if the optimizer has no momentum.
    """

    index: int
    weights: list[float]
    part: int = 0
    moved: bytes = b""


class ExchangeDone(OptimizerEvent, frozen=True, tag=True):
    """An exchange has completed on this rank. Not ``complete``: its messages can be used there, in the order of the
    device's stream."""

    round: int
    complete: bool = True


class StartExchange(OptimizerCommand, frozen=True, tag=True):
    """Submit this rank's part of an exchange.

    Attributes:
        round: the exchange's number.
        senders: queued messages, as (first rank, last rank, key): one of each rank from the first to the last, in
            order. So the command has few bytes at any number of ranks.
        pairs: pairs of ranks to average; a host is represented by its first rank.
        gathers: whether each rank sends the part of the weights that it owns to the other ranks of its host, once all
            earlier exchanges have completed. The last exchange before an end (AD-PSGD of hosts).
        weights: push-sum weights of queued messages other than 1, as (rank, key, weight).
    """

    round: int
    senders: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    pairs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    gathers: bool = False
    weights: list[tuple[int, int, float]] = msgspec.field(default_factory=list)

    @property
    def messages(self) -> list[tuple[int, int]]:
        """Queued messages, as (sender, key)."""
        return [(rank, key) for first, last, key in self.senders for rank in range(first, last + 1)]

    def keys_of(self, rank: int) -> list[int]:
        """Return the keys of a rank's messages in this exchange."""
        return [key for first, last, key in self.senders if first <= rank <= last]


class StartAverage(OptimizerCommand, frozen=True, tag=True):
    """Submit the average number ``index`` over the ranks in ``spans``; other ranks contribute zeros.

    Attributes:
        index: the average's number.
        spans: the ranks, as (first, last) of each run.
        weights: sums of these ranks' push-sum weights.
        part: the fragment that is averaged.
        moved: the set of parameters that at least one of these ranks has moved.
    """

    index: int
    spans: list[tuple[int, int]]
    weights: list[float]
    part: int = 0
    moved: bytes = b""

    @property
    def ranks(self) -> list[int]:
        """Ranks that are averaged, in order."""
        return [rank for first, last in self.spans for rank in range(first, last + 1)]


def spans_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranks as (first, last) of each run of consecutive numbers."""
    return [(first, last) for first, last, _ in senders_of((rank, 0) for rank in ranks)]


def senders_of(messages: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return messages, given as (sender, key), in the form of ``StartExchange.senders``."""
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
    """A rank has finished: it sends no messages of steps after ``step`` (since the last drain).

    ``gone``: its optimizer was deleted.
    """

    rank: int
    step: int
    gone: bool = False


EVENTS = (MessageQueued, MessageComing, NoMessage, PairRequested, WaitingForMessage, AverageEntered, ExchangeDone)
COMMANDS = (StartExchange, StartAverage, RankFinished)


# -- a user's options, and the algorithms ------------------------------------------------------------------------------


COMPRESSIONS = ("none", "fp16", "bf16", "int8")
_STEPS = Whole(1, "a whole number of steps, 1 or more")
_STEPS_OR_NONE = Whole(0, "a whole number of steps, 0 or more")


def _read_schedule(text: str) -> dict[int, str]:
    """Return algorithms by epoch."""

    def read(name: str) -> str:
        if name not in ALGORITHMS:
            known = sorted(ALGORITHMS.values(), key=lambda each: not each.takes_the_place)  # (allreduce first)
            raise ValueError(f"an algorithm must be one of {', '.join(each.name for each in known)}, got {name!r}")
        return name

    return read_by_epoch(text, "0:allreduce,5:sgp", read)


@dataclass(frozen=True, kw_only=True)
class GossipOptions:
    """Options of ``GossipOptimizer``, without Horovod's arguments and those of one framework."""

    algorithm: str = option(
        "sgp",
        '"sgp" (stochastic gradient push, Assran et al., ICML 2019), "osgp" (the same, with messages up to '
        '``max_staleness`` steps late), "dpsgd" (Lian et al., NeurIPS 2017), "adpsgd" (Lian et al., ICML 2018: '
        "pairs of ranks are averaged while they compute, and no rank waits for a slow one), "
        '"exact-diffusion" (Yuan et al., 2019: no bias if ranks have different data), "noloco" '
        "(Kolehmainen et al., 2025: pairs of ranks are averaged after some steps, with momentum), "
        '"allreduce" (weights are averaged over all ranks after every step), "local" (after every ``average_every`` '
        'steps, during the next steps: local SGD, Stich, ICLR 2019), "slowmo" (with slow momentum, Wang et '
        'al., ICLR 2020) or "diloco" (with Nesterov momentum, Douillard et al., 2023)',
        flags=(),
    )
    topology: Any = option(
        None,
        "a name (``hvd_async.topology.NAMED``), a ``Topology`` or a networkx graph; None: "
        '"exponential" for sgp and osgp, "bipartite-exponential" for dpsgd and adpsgd, "ring" for exact-diffusion, '
        '"random-pairs" for noloco',
        help=f"the communication graph: {', '.join(NAMED)}; all algorithms except sgp and osgp need a symmetric graph",
        absent="exponential for sgp and osgp, bipartite-exponential for dpsgd and adpsgd, ring for exact-diffusion, "
        "random-pairs for noloco",
        choices=tuple(NAMED),
        metavar="NAME",
        unsupported="topology: {0} averages all ranks; omit it",
    )
    peers: int | Mapping[int, int] = option(
        1,
        f"number of ranks that a rank sends to per step, for the topologies {', '.join(WITH_PEERS)}; or "
        "{epoch: peers}",
        help=f"number of ranks that a rank sends to per step, for the topologies {', '.join(WITH_PEERS)}; 0:1,30:2 "
        "is 1 from epoch 0 and 2 from epoch 30 on",
        read=ByEpoch(Whole(1, "a whole number, 1 or more"), "0:1,30:2"),
        metavar="N",
        unsupported="peers: {0} averages all ranks; omit it",
    )
    mixing: Any = option(
        "uniform",
        '"uniform" or "metropolis" weights, a matrix ``W[receiver, sender]`` whose columns sum to 1, or a list of '
        "matrices, used in turn, one per step",
        help="uniform: a rank's weight is split equally among itself and its receivers; metropolis: an edge is "
        "weighted by the larger number of neighbours of its ranks, which dpsgd needs on irregular graphs such as a "
        "star",
        choices=SCHEMES,
        unsupported="mixing: {0} averages ranks with equal weights; omit it, and pass a graph as topology",
    )
    max_staleness: int | None = option(
        None,
        "steps that a message of osgp, or an average of local, slowmo and diloco, may be late (averages: less than "
        "``average_every``); None: 1 for osgp, half of ``average_every`` for the others",
        help="steps that a message, or an average, may be late; 0 waits for it, as in sgp and in published local SGD",
        absent="1 for osgp, half of --average-every for the others",
        read=_STEPS_OR_NONE,
        metavar="N",
        unsupported="max_staleness: messages of {0} are never late; use 'osgp', or pass 0",
        no_effect=0,
    )
    gossip_every: int | None = option(
        None,
        "send and mix every n steps, with local steps in between (Koloskova et al., ICML 2020); None: 1, for noloco 8",
        help="send and mix every N steps only; in between ranks take local steps",
        absent="1, for noloco 8",
        read=_STEPS,
        metavar="N",
        unsupported="gossip_every: {0} has another period; omit it (adpsgd has max_local_steps, allreduce "
        "average_every)",
        no_effect=1,
    )
    hierarchical: bool | int = option(
        False,
        "average the ranks of a host first, then gossip between hosts. True for the launcher's local ranks, or the "
        "number of ranks per host, numbered host by host",
        help="average the ranks of a host first, then gossip between hosts; the short form does not work after "
        "horovodrun, whose own flags begin like this",
        absent="off",
        flags=("--hierarchical-gossip", "--hierarchical"),
        unsupported="hierarchical: {0} does not average hosts first; omit it, or use sgp, osgp, dpsgd, adpsgd, local, "
        "slowmo or diloco",
        fixed=True,
    )
    max_local_steps: int = option(
        4,
        "steps that a rank of adpsgd may take between two averagings",
        help="steps that a rank may take between two averagings before it waits for the next",
        read=_STEPS,
        metavar="N",
        unsupported="max_local_steps: ranks of {0} wait for each other; omit it, or use 'adpsgd'",
    )
    average_every: int | Mapping[int, int] = option(
        0,
        "average all ranks every n steps (Gossip-PGA, Chen et al., 2021), or {epoch: steps}; 0: never, for local, "
        "slowmo and diloco every 8",
        help="average the weights of all ranks every N steps; 0 is never, for local, slowmo and diloco every 8; "
        "0:1,5:8 is 1 from epoch 0 and 8 from epoch 5 on",
        read=ByEpoch(_STEPS_OR_NONE, "0:1,5:8"),
        metavar="N",
        unsupported="average_every: {0} does not average all ranks periodically; call drain() when an average is due",
    )
    fragments: int = option(
        1,
        "parts of the weights that local, slowmo and diloco average in turn, within ``average_every`` steps (Streaming "
        "DiLoCo, Douillard et al., 2025)",
        help="parts of the weights that are averaged in turn, each every --average-every steps",
        read=Whole(1),
        metavar="N",
        unsupported="fragments: {0} does not average the weights in parts; omit it, or use local, slowmo or diloco",
    )
    outer_lr: float | None = option(
        None,
        "learning rate of the outer optimizer of slowmo, diloco and noloco (alpha of slowmo, beta of noloco); "
        "None: 1 for slowmo, 0.7 for the others",
        help="factor of the ranks' mean step; alpha of slowmo",
        absent="1 for slowmo, 0.7 for diloco and noloco",
        read=Real(0.0, above=True),
        unsupported="outer_lr: {0} has no outer optimizer; omit it, or use slowmo, diloco or noloco",
    )
    outer_momentum: float | None = option(
        None,
        "slow momentum of slowmo and noloco, Nesterov momentum of diloco; None: 0.3, for diloco 0.5, which suit 4 to "
        "16 steps between averages (the papers' 0.7 and 0.9 suit many more)",
        help="momentum from one average to the next",
        absent="0.3 for slowmo and noloco, 0.5 for diloco",
        read=Real(0.0, below=1.0),
        unsupported="outer_momentum: {0} has no outer optimizer; omit it, or use slowmo, diloco or noloco",
    )
    schedule: Mapping[int, str] | None = option(
        None,
        "{epoch: algorithm}, used instead of ``algorithm`` from that epoch on; ``set_epoch`` switches",
        help="the algorithm from epoch E on: 0:allreduce,5:sgp is allreduce in epochs 0 to 4, then sgp",
        absent="--algorithm in all epochs",
        read=_read_schedule,
        metavar="E:NAME,...",
        fixed=True,
    )
    quasi_global: bool = option(
        False,
        "for sgp, dpsgd and adpsgd with SGD with momentum: gossip pulls a rank's momentum towards the mean of all "
        "ranks (after Lin et al., ICML 2021), if ranks have different data",
        help="gossip pulls a rank's momentum towards the mean of all ranks, if ranks have different data; needs SGD "
        "with momentum",
        unsupported="quasi_global: under {0} each rank has its own momentum; omit it, or use sgp, dpsgd or adpsgd",
        fixed=True,
    )
    buffers: str = option(
        "average",
        'how batch-norm statistics agree in ``drain()`` and ``consensus()``: "average" them, keep each rank\'s own '
        '("local"), or use rank 0\'s ("root")',
        flags=(),
        fixed=True,
    )

    def check(self, ranks: int | None) -> None:
        """Check the options that do not depend on the algorithm; ``make_plan`` checks the others.

        Raises:
            ValueError: an option has an invalid value.
        """
        check_one_of("buffers", self.buffers, BUFFERS)
        if not isinstance(self.quasi_global, bool):
            raise ValueError(f"quasi_global must be True or False, got {self.quasi_global!r}")


SWITCHABLE = tuple(name for name, described in options_of(GossipOptions).items() if not described.fixed)
"""A user's options that ``switch()`` may change."""


@dataclass(frozen=True)
class GossipAlgorithm(Algorithm):
    """A gossip algorithm. Its ``options`` hold the defaults of the options that it supports.

    Attributes:
        doubly_stochastic: whether its mixing matrices must be doubly stochastic and symmetric.
        pairs: whether neighbours are averaged in pairs on request, instead of over all edges of a step.
        sends_before_update: whether messages hold the weights from before a step's update.
        exact: whether it corrects the bias of different data; it needs a static graph and mixes by (I + W) / 2.
        outer: the outer optimizer's step, which moves the anchor of all ranks; None: it has no outer optimizer.
        rank: the class of its ranks, as MODULE:CLASS of this package. (By name, since ranks import this module.) If the
            ranks of a host step together, it is HostCLASS of that module, or of ``hosts`` for one of ``rank``.
    """

    doubly_stochastic: bool = False
    pairs: bool = False
    sends_before_update: bool = False
    exact: bool = False
    outer: outer.Step | None = None
    rank: str = "rank:PushSumWorker"

    @property
    def has_graph(self) -> bool:
        """Whether ranks have neighbours."""
        return "topology" in self.options

    @property
    def takes_the_place(self) -> bool:
        """Whether it averages all ranks after each step, and so may replace any other algorithm for some epochs."""
        return not self.has_graph and self.outer is None

    @property
    def may_be_late(self) -> bool:
        """Whether messages may be ``max_staleness`` steps late."""
        return "max_staleness" in self.options


def _with_neighbours(name: str, options: Mapping[str, Any], about: str, **traits: Any) -> GossipAlgorithm:
    """Return an algorithm whose ranks wait for their neighbours' messages."""
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
"""Constants of quasi-global momentum. (With 1 and 0.9, momenta of dpsgd diverge on a ring of 32 ranks.)"""

_MIXED: Mapping[str, Any] = {
    **{name: getattr(GossipOptions, name) for name in ("peers", "mixing", "gossip_every", "average_every")},
    "compression": "none",
}
_NO_AVERAGES = {name: value for name, value in _MIXED.items() if name != "average_every"}
_PUSH_SUM: Mapping[str, Any] = {**_MIXED, "hierarchical": False, "topology": "exponential"}
_SYMMETRIC = {"topology": "bipartite-exponential"}
_PAIRED = {"peers": 1, "max_local_steps": 4, "compression": "none", "hierarchical": False}
_QUASI_GLOBAL = {"quasi_global": False}
_PAIRS_IN_TURN = {"topology": "random-pairs", "gossip_every": 8, "outer_lr": 0.7, "outer_momentum": 0.3}
_OUTER: Mapping[str, Any] = {
    "average_every": 8,
    "max_staleness": None,
    "fragments": 1,
    "compression": "none",
    "hierarchical": False,
}
"""(With ``max_staleness`` None an average may be half of ``average_every`` steps late.)"""
_BOTH_WAYS = {"symmetric_graph": True, "doubly_stochastic": True}

ALGORITHMS: Mapping[str, GossipAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        _with_neighbours("sgp", {**_PUSH_SUM, **_QUASI_GLOBAL}, "waits for their messages"),
        _with_neighbours("osgp", {**_PUSH_SUM, "max_staleness": 1}, "mixes them in up to --max-staleness steps later"),
        _with_neighbours(
            "dpsgd",
            {**_PUSH_SUM, **_SYMMETRIC, **_QUASI_GLOBAL},
            "needs a symmetric graph",
            sends_before_update=True,
            **_BOTH_WAYS,
        ),
        GossipAlgorithm(
            "adpsgd",
            "gossip",
            {**_SYMMETRIC, **_PAIRED, **_QUASI_GLOBAL},
            sends="weights",
            waits_for="none",
            symmetric_graph=True,
            about="averages with whichever neighbour is ready",
            compressions=("none", "fp16", "bf16"),
            pairs=True,
            rank="adpsgd:ADPSGDWorker",
        ),
        _with_neighbours(
            "exact-diffusion",
            {**_MIXED, "topology": "ring"},
            "needs a static symmetric graph, and corrects the bias of different data",
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
            "averages all ranks every --average-every steps, during the next steps",
            outer.local,
        ),
        _with_anchor(
            "slowmo", {**_OUTER, "outer_lr": 1.0, "outer_momentum": 0.3}, "the same with slow momentum", outer.slowmo
        ),
        _with_anchor(
            "diloco",
            {**_OUTER, "outer_lr": 0.7, "outer_momentum": 0.5},
            "the same with Nesterov momentum",
            outer.diloco,
        ),
    )
}
"""The gossip algorithms, by name. Algorithms without a graph average the weights of all ranks periodically."""


def rank_class(config: GossipConfig) -> Any:
    """Return the class of a configuration's ranks."""
    algorithm = ALGORITHMS[config.algorithm]
    module, name = algorithm.rank.split(":")
    if config.local_size > 1:
        module, name = "hosts" if module == "rank" else module, f"Host{name}"
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
