"""Partial allreduce, as data: a user's options, and what the algorithm is to the rest of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.eager.quorum import Quorum, check_quorum, parse_quorum
from hvd_async.algorithms.option import BUFFERS, Real, Whole, check_hosts, check_one_of, option
from hvd_async.runtime.family import Algorithm

PACES = ("steps", "rounds")
NONFINITE = ("skip", "raise")
WEIGHTINGS = ("ranks", "samples")


@dataclass(frozen=True)
class EagerOptions:
    """A user's options of ``EagerOptimizer``, beside Horovod's arguments and those of one framework."""

    quorum: Quorum = option(
        "solo",
        'who must be there for a round to start: "solo" (the first rank), "majority" (a rank drawn anew each '
        'round), "all" (synchronous SGD), a number of ranks, a fraction of them, or "auto" (the number that '
        "brings the most fresh gradients per second, learned from the ranks' arrival times and said on rank 0's "
        "stderr); hosts in place of ranks with ``hierarchical``",
        help="who fires a round: solo (the first rank), majority (a rank drawn anew each round), all, a count of "
        "ranks, a fraction such as 0.75, or auto, which learns from the arrival times",
        read=parse_quorum,
        metavar="Q",
    )
    max_staleness: int = option(
        16,
        "rounds a gradient may be late; 0 is synchronous",
        help="how many rounds late a gradient may be, 0 is synchronous",
        read=Whole(0),
        metavar="N",
    )
    grace: float = option(
        0.0,
        "seconds to wait for more ranks once the quorum is there",
        help="seconds a round still waits for more ranks once the quorum is there",
        read=Real(0),
        metavar="S",
    )
    seed: int = option(0, "of majority's draw, the same on all ranks", flags=())
    bucket_cap_mb: float = option(
        25.0, "MiB of gradients that travel together; smaller ones leave earlier during backward", flags=()
    )
    late_cap_mb: float = option(
        4096.0,
        "MiB of rounds that may wait for a late rank, of which there are up to ``max_staleness`` + 1: where a "
        "round (the model's gradients in float32) is too large for that, ``max_staleness`` is lowered, and rank "
        '0 says so. ``float("inf")`` leaves it alone',
        flags=(),
    )
    pace: str = option(
        "steps",
        '"steps" (all ranks do the same number of steps, and one that is always slower holds the others up after '
        '``max_staleness`` rounds) or "rounds" (it gives fewer gradients; end the job by ``optimizer.rounds``)',
        help="steps: every rank goes through its batches once an epoch; rounds: an epoch is as many rounds as the "
        "longest rank has batches, and a rank that is slow for good gives fewer gradients",
        choices=PACES,
    )
    hierarchical: bool | int = option(
        False,
        "the ranks of a host take each step together, so that their gradients go in the same round, and ``quorum``, "
        "``max_staleness`` and ``grace`` count hosts. True for Horovod's local ranks, or so many ranks, numbered host "
        "by host",
        help="the ranks of a host take each step together, and the quorum counts hosts",
        absent="off",
        flags=("--hierarchical-gossip", "--hierarchical"),
    )
    weighting: str = option(
        "ranks",
        'by what a round weights gradients: "ranks" (all alike) or "samples" (by the samples of each, as one large '
        "batch would; tell these by ``record_samples()``, which Keras' ``fit()`` does by itself)",
        help="ranks: a round weights all gradients alike; samples: by the images of each, as one large batch would",
        choices=WEIGHTINGS,
    )
    nonfinite: str = option(
        "skip",
        'what to do where a gradient holds NaN or an infinity: "skip" (hand its bucket over empty; counted in '
        '``stats().gradients_skipped``) or "raise" FloatingPointError',
        flags=(),
    )
    buffers: str = option(
        "average",
        'how batch-norm statistics agree: "average" them, keep each rank\'s own ("local"), or take rank 0\'s ("root")',
        flags=(),
    )

    def check(self, ranks: int | None, local_size: int | None = None) -> None:
        """Refuse what no job of so many ranks can have; None: nobody knows how many yet.

        Args:
            ranks: that share the optimizer.
            local_size: ranks that step together; None if only ``hierarchical`` says so.

        Raises:
            ValueError: with a hint.
        """
        together = self.hierarchical if local_size is None and not isinstance(self.hierarchical, bool) else local_size
        if ranks is not None and together is not None:
            check_hosts(ranks, together)
            ranks //= together
        check_quorum(self.quorum, ranks, "ranks" if together in (None, 1) else "hosts")
        late, grace = self.max_staleness, self.grace
        if isinstance(late, bool) or not isinstance(late, int) or late < 0:
            raise ValueError(
                f"max_staleness={late!r} is not a number of rounds: take 0 (synchronous) or more, 16 is usual"
            )
        if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < float("inf"):
            raise ValueError(f"grace={grace!r} is not a number of seconds: take 0.0 or more")
        for name, size, usual in (("bucket_cap_mb", self.bucket_cap_mb, 25), ("late_cap_mb", self.late_cap_mb, 4096)):
            if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
                raise ValueError(f"{name}={size!r} is not a size in MiB: take a number above 0, {usual} is usual")
        check_one_of("buffers", self.buffers, BUFFERS)
        check_one_of("pace", self.pace, PACES)
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        check_one_of("weighting", self.weighting, WEIGHTINGS)
        if self.pace == "rounds" and (self.quorum == "all" or late == 0):
            raise ValueError(
                f'pace="rounds" lets late ranks give fewer gradients, which quorum={self.quorum!r}, max_staleness='
                f'{late} never does: take pace="steps", or a quorum that does not wait for all'
            )

    def config(self, local_size: int = 1) -> dict[str, Any]:
        """Return what ranks must have in common, of ``EagerConfig``, where so many of a host step together."""
        return {
            "quorum": self.quorum,
            "max_staleness": self.max_staleness,
            "grace": float(self.grace),
            "seed": self.seed,
            "pace": self.pace,
            "local_size": local_size,
            "weighting": self.weighting,
        }


ALGORITHMS: Mapping[str, Algorithm] = {
    "eager": Algorithm(
        "eager",
        "eager",
        {
            name: getattr(EagerOptions, name)
            for name in ("quorum", "max_staleness", "grace", "pace", "hierarchical", "weighting")
        },
        sends="gradients",
        waits_for="quorum",
        about="rounds that do not wait for late ranks",
        compressions=("none", "fp16", "bf16"),
    ),
}
"""By name."""
