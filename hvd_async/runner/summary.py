"""Summary of a run: the figures of all ranks put together, as JSON for programs and as text for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .logs import write_atomically
from .metrics import JobMetrics, ModelQuality, RankMetrics, Replicas
from .options import Options
from .stragglers import Injector

KEYS = (
    "framework",
    "algorithm",
    "quorum",
    "world_size",
    "steps",
    "rounds",
    "images_per_sec",
    "step_time_s",
    "train_loss",
    "test_accuracy",
    "replicas_identical",
    "max_replica_diff",
    "gradients_produced",
    "gradients_applied",
    "gradients_skipped",
    "staleness",
    "fresh",
    "contributors",
    "consensus_distance",
    "wait_s_by_rank",
    "held_s_by_rank",
    "bytes_sent",
    "latency_s",
    "peak_bytes",
    "led",
    "leader_distance_by_rank",
)
SHOWN_RANKS = 8


def summarise(
    options: Options, ranks: Sequence[RankMetrics], replicas: Replicas, learned: ModelQuality
) -> dict[str, Any]:
    """The `--summary` object: exactly KEYS. `ranks` are the figures of all ranks, in order of rank.

    `steps` are those of the rank that did the most; `rounds` of gossip are its exchanges and averages, those
    of leaders pulls. Figures that do not exist (no step was done; plain allreduce does not tell; in gossip no gradient
    travels), and those that are not finite, are None, so that the JSON is valid.
    """
    totals = JobMetrics.of([figures.outcome for figures in ranks])
    times = np.concatenate([figures.step_times for figures in ranks])
    train_s = max(figures.train_s for figures in ranks)
    summary = {
        "framework": options.framework,
        "algorithm": options.algorithm,
        "quorum": options.quorum,
        "world_size": len(ranks),
        "steps": max(figures.steps for figures in ranks),
        "rounds": totals.rounds,
        "images_per_sec": _finite(sum(figures.images for figures in ranks) / train_s if train_s else None),
        "step_time_s": {
            "mean": float(times.mean()) if len(times) else None,
            "p50": _percentile(times, 50),
            "p95": _percentile(times, 95),
        },
        "train_loss": _finite(learned.train_loss),
        "test_accuracy": _finite(learned.test_accuracy),
        "replicas_identical": replicas.identical,
        "max_replica_diff": _finite(replicas.max_diff),
        "gradients_produced": totals.produced,
        "gradients_applied": totals.applied,
        "gradients_skipped": totals.skipped,
        "staleness": {"mean": totals.staleness_mean, "max": totals.staleness_max},
        "fresh": totals.fresh,
        "contributors": {"mean": totals.contributors},
        "consensus_distance": _finite(replicas.consensus_distance),
        "wait_s_by_rank": list(totals.wait_s),
        "held_s_by_rank": None if totals.held_s is None else list(totals.held_s),
        "bytes_sent": totals.bytes_sent,
        "latency_s": totals.latency_s,
        "peak_bytes": totals.peak_bytes,
        "led": None if totals.led is None else {str(rank): times for rank, times in sorted(totals.led.items())},
        "leader_distance_by_rank": None if totals.leader_distance is None else list(totals.leader_distance),
    }
    assert tuple(summary) == KEYS
    return summary


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary as JSON, whole or not at all. Raises ValueError if its keys are not exactly KEYS."""
    if set(summary) != set(KEYS):
        raise ValueError(
            f"a summary has the keys {', '.join(KEYS)}; wrong or missing: {sorted(set(summary) ^ set(KEYS))}"
        )
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda place: place.write_text(text))


def describe(summary: Mapping[str, Any], stragglers: Sequence[str], learned: ModelQuality) -> str:
    """The end of a run for people: what was reached, how fast, what the stragglers cost, and that nothing was lost.

    stragglers: the lines of `straggler_lines`.
    """
    quorum = f" ({summary['quorum']})" if summary["quorum"] is not None else ""
    gossip, led = summary["gradients_produced"] is None, summary["led"] is not None
    rounds = "pulls" if led else "rounds"
    times = summary["step_time_s"]
    best = f" (best {_text(learned.best_accuracy, 4)})" if learned.best_accuracy is not None else ""
    replicas = (
        "bit-identical on all ranks"
        if summary["replicas_identical"]
        else (f"NOT identical: a weight differs by up to {_text(summary['max_replica_diff'], 3)}")
    )
    lines = [
        ("test accuracy", _text(summary["test_accuracy"], 4) + best),
        (
            "training",
            f"loss {_text(summary['train_loss'], 4)}, {_text(summary['images_per_sec'], 1)} images/s over all ranks",
        ),
        (
            "step time",
            f"mean {_text(times['mean'], 3)} s, p50 {_text(times['p50'], 3)} s, p95 {_text(times['p95'], 3)} s",
        ),
        *(("stragglers" if i == 0 else "", line) for i, line in enumerate(stragglers)),
        *(_led(summary) if led else _gossiped(summary) if gossip else _averaged(summary)),
        ("replicas", replicas),
    ]
    head = (
        f"{summary['framework']} {summary['algorithm']}{quorum} on {summary['world_size']} ranks: "
        f"{summary['steps']} steps a rank, {summary['rounds']} {rounds}"
    )
    return "\n".join([head, *(f"  {name:<14} {text}" for name, text in lines)])


def _averaged(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about gradients and their rounds."""
    produced, applied, skipped = (summary[f"gradients_{name}"] for name in ("produced", "applied", "skipped"))
    kept = (
        "no gradient was lost"
        if produced == applied
        else f"{abs(produced - applied)} were {'LOST' if produced > applied else 'applied TWICE'}: this is an error"
    )
    left_out = f"; {skipped} skipped, as they overflowed" if skipped else ""
    late, present = summary["staleness"], summary["contributors"]["mean"]
    latency = "" if summary["latency_s"] is None else f"; a round took {1000 * summary['latency_s']:.1f} ms"
    return [
        ("gradients", f"{produced} produced, {applied} applied: {kept}{left_out}"),
        ("staleness", f"mean {_text(late['mean'], 2)} rounds, at most {_text(late['max'], 0)}"),
        ("rounds", f"{_text(present, 1)} of {summary['world_size']} ranks had arrived on average{latency}"),
    ]


def _gossiped(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How late the messages were, and how far apart the ranks."""
    late, distance, skipped = summary["staleness"], summary["consensus_distance"], summary["gradients_skipped"]
    mail = [] if late["mean"] is None else [f"mean {late['mean']:.2f} steps late, at most {late['max']}"]
    if summary["latency_s"] is not None:
        mail.append(f"an exchange took {1000 * summary['latency_s']:.1f} ms")
    lines = [
        ("messages", "; ".join(mail) or "none"),
        ("consensus", f"distance {'none' if distance is None else f'{distance:.3g}'} before the last drain"),
    ]
    return [*lines, *([("gradients", f"{skipped} skipped, as they overflowed")] if skipped else [])]


def _led(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who led, and how far the others were away."""
    led, distances, skipped = summary["led"], summary["leader_distance_by_rank"], summary["gradients_skipped"]
    who = ", ".join(f"{'the centre' if rank == '-1' else f'rank {rank}'} {times}" for rank, times in led.items())
    latency = "" if summary["latency_s"] is None else f"; a pull took {1000 * summary['latency_s']:.1f} ms"
    away = ", ".join(f"{distance:.3g}" for distance in distances[:SHOWN_RANKS])
    lines = [
        ("led", f"{who or 'nobody'} of the pulls of all ranks{latency}"),
        ("distance", f"from the leaders when pulled, by rank: {away}{' ...' if len(distances) > SHOWN_RANKS else ''}"),
    ]
    return [*lines, *([("gradients", f"{skipped} skipped, as they overflowed")] if skipped else [])]


def straggler_lines(ranks: Sequence[RankMetrics], injector: Injector, first_step: int = 0) -> list[str]:
    """Return the lines about the cost of stragglers: each rank's sleep and waits, beside a synchronous run's."""
    slept = [figures.slept_s for figures in ranks]
    waited = [figures.outcome.wait_s for figures in ranks]
    none = injector.kind == "none"
    delays = ["" if none else f"slept {seconds:.1f} s by --inject and " for seconds in slept]
    lines = [
        f"rank {rank} {delays[rank]}waited {waited[rank]:.1f} s for others"
        for rank in range(min(len(ranks), SHOWN_RANKS))
    ]
    if len(ranks) > SHOWN_RANKS:
        lines.append(f"... ({len(ranks)} ranks: {sum(slept):.1f} s slept and {sum(waited):.1f} s waited in all)")
    if none:
        return ["none were injected (--inject makes some)", *lines]
    bound = synchronous_delay(injector, max(figures.steps for figures in ranks), len(ranks), first_step)
    spent = (sum(slept) + sum(waited)) / len(ranks)
    verdict = (
        f"{bound - spent:.1f} s a rank were saved"
        if spent < bound
        else f"{spent - bound:.1f} s more, which is waiting for computing and the network"
    )
    return [
        *lines,
        f"A synchronous run waits in every step for the slowest rank: {bound:.1f} s or more for each.",
        f"Here a rank spent {spent:.1f} s on average sleeping and waiting: {verdict}.",
    ]


def synchronous_delay(injector: Injector, steps: int, size: int, first_step: int = 0) -> float:
    """Seconds of injected delay that no synchronous run of these steps can avoid: the slowest rank's, step by step."""
    return math.fsum(injector.slowest(step, size) for step in range(first_step, first_step + steps))


def _percentile(times: Any, percent: float) -> float | None:
    return float(np.percentile(times, percent)) if len(times) else None


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _text(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
