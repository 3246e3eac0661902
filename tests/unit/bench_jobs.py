"""What the benchmarks' jobs bring home, without a job: figures of every rank that are made up for the plan's blocks.

A run that is ``well`` meets the goals of its case; one that is not misses all that can be missed. Numbers are round, so
that a table can be checked in the head: it is fixed in ``tests/fixtures/benchmarks``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvd_async.simulation.names import LEADERS, gossip_of, read_name
from scripts.benchmarks.support.arms import MUTANT
from scripts.benchmarks.support.nemesis import HOROVOD, Schedule, Trouble
from tests.unit.bench_advice import advised
from tests.unit.nemesis_history import history_of

Block = dict[str, Any]
Own = dict[str, Any]
OPTIONS = {
    "straggler": "--ranks 4 --arms horovod,majority,solo,auto --delay 0.1 0.2 --compute 0.1 --steps 10 --repetitions 2",
    "skew": "--ranks 4 --arms horovod,all,majority,solo,auto --steps 10 --repetitions 2",
    "no_stragglers": "--arms horovod,all,solo --image-size 32",
    "activation": "--ranks 2 --rounds 10 --repetitions 2",
    "memory": "--ranks 2 --arms horovod,solo --steps 4 --repetitions 2",
    "accuracy": "--arms horovod,solo,adpsgd --folds 2 --repetitions 2 --epochs 1",
    "split_classes": f"--arms horovod,solo,sgp,lsgd,lsgd-close,{MUTANT} --folds 2 --repetitions 2 --epochs 1",
    "convergence": "--arms horovod,sgp,lsgd --folds 2 --repetitions 2 --epochs 2",
    "sequence_lengths": "--arms horovod,majority,solo,auto --steps 14",
    "late_gradients": "--arms synchronous,none,extrapolate-2,fresh --tasks digits-late clips8 --repetitions 3",
    "hetero": "--ranks 4 --arms horovod,adpsgd,lsgd --slow 5 --compute 1 --window 10 --repetitions 2 --even",
    "sleeping_rank": "--ranks 4 --arms adpsgd,sgp,lsgd --sleeper 0 --sleep 10 --before 2 --repetitions 2",
    "exchange_cost": "--ranks 4 --fewer 2 --megabytes 1 --rounds 3 --repetitions 2",
    "network": "--arms horovod,ddp,decent-dp,sgp,dpsgd,easgd --mbit 50 1000 --steps 3 --compute 0.5 --repetitions 2",
    "scaling": "--ranks 4 --sizes 1 4 --arms horovod,decent-dp,sgp --mbit 50 --steps 3 --compute 0.5 --repetitions 2",
    "pull_cost": "--megabytes 1",
    "race": "--ranks 4 --fewer 0 --delay 0 0.1 --repetitions 2",
    "time_to_accuracy": "--kinds slow-rank network --arms horovod,ddp,solo,osgp-bf16 --length 0.2 --repetitions 2",
    "soak": "--arms solo,adpsgd,sgp --rounds 1000",
    "elastic": "--arms horovod,solo,dpsgd --weights 3072 5000 --repetitions 2",
    "deaths": "--arms solo,dpsgd --repetitions 3",
    "nemesis": "--first 10 --schedules 10",
    "advice": "--arms all,adpsgd --jobs slow,straggler --steps 40 --repetitions 2",
    "host": "--arms horovod,ddp,all,solo,sgp --steps 5 --repetitions 2",
    "gpu": "--arms plain,horovod,all,solo,sgp,lsgd",
    "profile": "--arms horovod,solo,dpsgd --steps 5 --repetitions 2",
}
"""Of each case, a run in which all its figures, goals and remarks are there."""
VARIANTS = {
    "straggler real": "--ranks 4 --arms horovod,solo --delay 0.1 --compute 0 --steps 10 --model resnet50",
    "no_stragglers keras": "--framework tensorflow",
    "no_stragglers recorded": "--recorded --image-size 32",
    "sequence_lengths keras": "--framework tensorflow --arms horovod,solo --steps 14 --ms 0 --no-bucketed",
    "network compressed": "--arms horovod-fp16,dpsgd-fp16,dpsgd-int8 --mbit 50 --steps 3 --compute 0.5",
    "network averaged": "--arms horovod,ddp-powersgd,torchft-diloco,local-sgd,sgp-avg4,dpsgd-avg4 --mbit 50 --steps 3 "
    "--compute 0.5",
    "advice keras": "--framework keras --arms all,lsgd --jobs straggler --steps 40",
    "advice links": "--arms all --jobs even --steps 30 --mbit 50 --megabytes 1",
    "gpu ranks": "--ranks 2 --arms horovod,all --batch-size 64",
}
"""Other runs, which have other figures, goals or jobs: the name's first word is the case."""


def options(case: ModuleType, *line: str, **more: Any) -> argparse.Namespace:
    """A case's own options from a command line, with more beside them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arms")
    case.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(line)) | more)


def pulls_of(rank: int) -> list[list[Any]]:
    """Pulls that a rank of four tells of: ranks 0 and 2 lead their groups of two all the time, all ranks in turn."""
    group = rank // 2
    return [[1.0, group, 2 * group], [2.0, -1, 2], [4.0, group, 2 * group], [6.0, -1, 0]]


def timed(block: Block, rank: int, size: int, well: bool) -> Own:
    """Steps by a schedule; the last rank is the slowest."""
    if "job" in block:
        return advised(block, rank, size, well)
    arm, steps = block["arm"], block["steps"]
    share = {"horovod": 1.0, "all": 1.0, "majority": 0.7}.get(arm, 0.4)  # of the delay
    seconds = 0.1 + share * block["delay"] + 0.01 * (arm == "horovod")
    waited = {"solo": 0.0, "auto": 0.0, "majority": 0.018}.get(arm, 0.045)
    together = {"majority": {"2": steps // 2, "3": steps // 2}, "all": {"4": steps}}.get(arm, {"1": steps})
    fresh = 8
    if not well:
        seconds *= {"horovod": 1.3, "solo": 2.0}.get(arm, 1.0)
        waited, together = 0.045, {"3": steps} if arm == "majority" else {"2": steps}
        fresh = 1 if arm == "auto" else fresh
    late = {"staleness": {"0": fresh, "1": steps - fresh}, "contributors": together, "held_s": [waited * steps] * size}
    elapsed = steps * (seconds + 0.01 * block["repetition"]) * (1.0 if rank == size - 1 else 0.5)
    own = {"elapsed": elapsed, "waited": waited * steps, "rounds_before": 3, "identical": True}
    return own | {"stats": {} if arm == "horovod" else late}


def accuracy(block: Block, rank: int, size: int, well: bool) -> Own:
    """A training on the digits."""
    arm, steps, shares = block["arm"], block["steps"][rank], block["evaluations"]
    score = {"horovod": 0.97, MUTANT: 0.8}.get(arm, 0.968) if well else {"horovod": 0.93}.get(arm, 0.90)
    score += 0.01 * block["fold"] + 0.001 * block["seed"] * (1 if arm == "horovod" else -1)
    elapsed = (4.0 if arm == "horovod" else 2.0) * (1 + block.get("delay", 0.0))
    curve = [[elapsed * share / shares, 1 / share, score * share / shares] for share in range(1, shares + 1)]
    return {
        "elapsed": elapsed,
        "curve": [] if rank else curve,
        "accuracy": None if rank else score,
        "of_mean": 0.95 if block.get("mean") else None,
        "pulls": steps // 2 if block.get("algorithm", arm) in LEADERS else None,
        "distance": 0.5 if gossip_of(arm) else None,
        "norm": 50.0,
        "averagings": steps if gossip_of(arm) else None,
        "steps": steps,
        "staleness": {"0": 3, "1": 1} if arm in ("solo", MUTANT) else {},
        "skipped": 0,
        "identical": True,
    }


def activation(block: Block, rank: int, size: int, well: bool) -> Own:
    """Messages alone, or the engine's CPU time."""
    worse = 1.0 if well else 10.0
    if block["what"] == "engine":
        return {"engine_s": 0.001 * (1 + rank) * worse, "process_s": 0.01, "step_s": 0.5}
    late = 0.001 * worse * (0.5 * rank + block["busy"])
    return {
        "first": [float(i) for i in range(block["rounds"])],
        "received": [i + late * (1 + i / 100) for i in range(block["rounds"])],
    }


def profile(block: Block, rank: int, size: int, well: bool) -> Own:
    """A step's CPU: nothing but the training thread's under the plain optimizer."""
    ms = {"plain": 4.0, "horovod": 20.0}.get(block["arm"], 15.0) + block["repetition"]
    used = {"training": [ms, 3.0], "fresh pages": [1000.0, 0.0], "step": [2 * ms, 0.0]}
    if block["arm"] not in ("plain", "horovod"):
        used |= {"engine": [1.0 + rank, 12.0], "Horovod, framework": [5.0, 80.0], "ZeroMQ": [0.5, 3.0]}
    return {"used": used, "copy_ms": 2.0}


def host(block: Block, rank: int, size: int, well: bool) -> Own:
    """Steps of many small tensors: each arm costs the host what the plain optimizer does, and more."""
    arm, plain, worse = block["arm"], block["arm"] == "plain", 1 if well else 10
    more = {"plain": 0.0, "all": 0.5, "solo": 0.6}.get(arm, 0.25) * worse + 0.125 * block["repetition"] * (not plain)
    own: Own = {"training_ms": 2.0 + more + rank, "other_ms": 0.5 if plain else worse - 0.25}
    own["buckets"] = 6 if arm in ("all", "solo") else None
    if block["framework"] == "tensorflow":
        tracing = {"plain": 500.0}.get(arm, 600.0 * worse)
        return own | {"first_ms": tracing, "operators": 962 + 100 * (not plain), "crossings": 0.0 if plain else 8.0}
    calls = {"plain": 491, "all": 539, "solo": 539 + 12 * (size > 1)}.get(arm, 503) + (not well and not plain) * 90
    return own | {
        "aten_calls": calls,
        "python_calls": 1769 + 1000 * worse * (not plain),
        "host_waits": 1,
        "copies": 2.0,
    }


def memory(block: Block, rank: int, size: int, well: bool) -> Own:
    """Copies of the gradients that are held; the last rank has fewer rounds waiting, and is nearer to its limit."""
    ours = block["arm"] != "horovod"
    peak, waiting = (3.0, 1) if rank == size - 1 else (5.0, 4)
    own = {"peak": (peak if well else peak + 1) * ours, "waiting": waiting * ours, "resident": 3.0 - rank}
    left = block["mode"] in ("done", "two") and rank == size - 1
    return own | {"keeps": 0.05 if well else 0.5, "after": 0.02 * rank, "left": left, "serving_most": 1.5}


def sequence_lengths(block: Block, rank: int, size: int, well: bool) -> Own:
    """Each of four ranks has a clip of 30 frames in turn: 30 a step for all together, 15 a step for each."""
    longest = [30 if step % 4 == rank else 10 for step in range(block["steps"] - 2)]
    arm = block["arm"]
    seconds = {"horovod": 0.145 if well else 0.2, "auto": 0.12}.get(arm, 0.1 if well else 0.19)
    score = 0.95 - (0.0 if arm == "horovod" else 0.001 * block["seed"] if well else 0.03)
    return {
        "elapsed": len(longest) * seconds * (1 + block["seed"] / 10) * (1.0 if rank == size - 1 else 0.5),
        "longest": longest,
        "computed": [frames * (block["ms"] or 1.0) / 1e3 for frames in longest],
        "accuracy": None if rank else score,
        "stats": {} if arm == "horovod" else {"staleness": {"0": 9, "2": 3}, "contributors": {"1": 6, "3": 6}},
        "rounds_before": 2,
        "identical": True,
    }


def late_gradients(block: Block, rank: int, size: int, well: bool) -> Own:
    """A simulated training: late gradients cost 3 points, the default remedy nothing, or 1."""
    arm, alone = block["arm"], block["arm"] == "synchronous"
    lost = {"none": 0.03, "extrapolate-2": 0.0 if well else 0.01}.get(arm, 0.0)
    score = (0.98 if well else 0.94) - lost + 0.001 * block["seed"] * (2 if arm == "fresh" else 1)
    return {
        "accuracy": score + 0.001 * (block["seed"] == 2) * (arm == "extrapolate-2"),
        "speedup": 1.0 if alone else 1.5 + 0.1 * block["seed"],
        "staleness": {"0": 8} if alone or arm == "fresh" else {"0": 4, "1": 2, "2": 2},
    }


def hetero(block: Block, rank: int, size: int, well: bool) -> Own:
    """Steps as long as the computation, or as slow as the slow rank's."""
    arm, slow = block["arm"], block["slowdown"]
    slowed = slow > 1 and not well
    pace = block["compute"] * (slow + slowed if rank == size - 1 or arm == "horovod" else 1.0 + slowed)
    pace *= 1.0 + 0.1 * block["repetition"]
    ends = [pace * step for step in range(1, max(2, int(block["window"] / pace) + 1 + (arm != "horovod")))]
    stats = {"steps": len(ends), "averagings": len(ends) // (1 if well else 2), "pulls": len(ends) // 4}
    own = {"ends": ends, "waited": 0.1 * len(ends), "stats": {} if arm == "horovod" else stats, "identical": True}
    return own | {"latency_s": None if arm == "horovod" else 0.1}


def sleeping_rank(block: Block, rank: int, size: int, well: bool) -> Own:
    """A rank of a ring of four sleeps from 2 s on, in its step 3.

    The others of ``sgp`` wait, in steps of 1 s; else they go on, in steps of 1/8 s.
    """
    arm, asleep, opposite = block["arm"], rank == block["sleeper"], (block["sleeper"] + 2) % size
    ends = [i / 8 for i in range(1, 105)] if well else [i / 8 for i in range(1, 17)]
    ends += [] if well else [2 + i / 4 for i in range(1, 45)]
    waits: dict[int, tuple[float, int]] = {}
    if asleep or arm == "sgp":
        ends = [1.0, 2.0, 12.0, 13.0]
    if arm == "sgp" and not asleep:
        waits = {4: (8.0, 1)} if rank == opposite else {3: (9.0, 0)}
        ends = [1.0, 2.0, 3.0, 12.0] if rank == opposite else ends
    if not well and rank == opposite:
        waits[4 if arm == "lsgd" else 3] = (9.0, 3)
    follows = arm == "lsgd"
    apart = {"as it fell asleep": 0.5, "as it woke": 4.0, "after its next step": 3.6 if well else 5.0}
    apart |= {"as it woke": None} if block["repetition"] else {}  # (it led)
    pulls = [3.0 + i / 10 for i in range(10 if asleep and not well else 20)]
    return {
        "slept": 3 if asleep else 0,
        "slept_at": 2.0 if asleep else None,
        "ends": ends,
        "waits": [waits.get(step, (0.01, None))[0] for step in range(1, len(ends) + 1)],
        "waited_for": [waits.get(step, (0.01, None))[1] for step in range(1, len(ends) + 1)],
        "pulls": [-1.0, *pulls, 12.5] if follows else [],
        "apart": (apart if asleep and follows else {}) | {"at the end": 0.6 if follows else None},
        "identical": True,
    }


def exchange_cost(block: Block, rank: int, size: int, well: bool) -> Own:
    """Exchanges; an alltoall takes longer, so does one that is not aligned, and later ranks wait longer."""
    seconds = 0.1 + 0.1 * block["arm"].startswith("alltoall") + 0.1 * block["arm"].endswith("-unaligned")
    return {"seconds": [seconds + 0.1 * rank + 0.02 * block["repetition"]] * block["rounds"]}


def network(block: Block, rank: int, size: int, well: bool) -> Own:
    """Trainings of three steps, the last rank's of which are a little slower."""
    (arm, compression, every), speed = read_name(block["arm"])[:3], 50 / block["bandwidth_mbit"] * (size > 1)
    work, wire = {"horovod": (0.5, 2.4), "ddp": (0.5, 2.4), "easgd": (0.5, 0.0), "sgp": (0.5, 1.4)}.get(
        arm, (0.5, 0.0) if arm == "local-sgd" else (0.62, 0.78)
    )
    wire += 2.4 / every if every else 0.0
    share = {"none": 1.0, "int8": 0.25}.get(compression, 0.5)
    worse = 1.5 if not well and arm in ("sgp", "dpsgd") else 1.0
    score = 0.9 + 0.01 * block["repetition"]
    own = {"seconds": [(work + wire * speed) * share * worse + 0.01 * (rank == size - 1)] * block["steps"]}
    return own | {"sent": 24_000_000, "waited": 0.3, "cpu": 0.6, "accuracy": None if rank else score, "identical": True}


def pull_cost(block: Block, rank: int, size: int, well: bool) -> Own:
    """Pulls of 1 MB: the leader sends twice, and one of the others sends on."""
    root, rounds = block["root"], block["rounds"]
    if block["part"] == "seconds":
        pace, slower = {"lsgd": 0.105 if well else 0.12, "easgd": 0.3, "allreduce": 0.2}, 1 + block["repetition"] / 10
        return {arm: [pace.get(arm, 0.1) * slower * (i + 1) for i in range(rounds)] for arm in block["arms"]}
    own: Own = {"idle": {"received": 5_000, "sent": 3_000, "seconds": 5.0}}
    for arm in block["arms"]:
        received, sent = float(rank != root), 2.0 if rank == root else float(rank == (root + 2) % size)
        received *= 1.75 if arm == "lsgd" and not well else 1.0
        received, sent = (1.5, 1.5) if arm in ("easgd", "allreduce") else (received, sent)
        own[arm] = {"received": rounds * received * 1e6 + 2_000, "sent": rounds * sent * 1e6 + 1_200, "seconds": 2.0}
        own[arm] |= {"counted": rounds * received * 1e6} if arm in LEADERS else {}
    return own


def race(block: Block, rank: int, size: int, well: bool) -> Own:
    """Ours are soon at the target, or never; the last rank takes a quarter of the steps."""
    arm = block["arm"]
    late, soon, never = [[4.0, 0.9], [8.0, 0.96]], [[2.0, 0.9], [4.0, 0.96], [6.0, 0.97]], [[4.0, 0.5], [8.0, 0.94]]
    curve = late if arm == "horovod" else soon if well else never
    return {
        "curve": [] if rank else [[at + block["seed"], score] for at, score in curve],
        "seconds": 10.0,
        "steps": 100 if rank < size - 1 else 25,
        "pulls": None if arm == "horovod" else 4,
        "history": pulls_of(rank) if arm == "lsgd" else [],
        "identical": True,
    }


def time_to_accuracy(block: Block, rank: int, size: int, well: bool) -> Own:
    """Ours are twice as quick, and as accurate, or lose three points; the second rate is the best, or the third."""
    arm = block["arm"]
    ours = arm not in ("horovod", "ddp")
    pace = 1.0 if ours else 2.0 + 0.5 * (arm == "ddp")
    score = 0.9 + 0.002 * block["seed"] % 0.01 + (0.001 if well else -0.03) * ours
    if block["tuning"]:
        best = 0.1 if block["kind"] == "slow-rank" else 0.06
        score -= abs(round(block["lr"] / best, 1) - (1.0 if well else 2.5)) / 10
    curve = [
        [pace * (look + 0.1 * block["seed"]), score * look / block["looks"]] for look in range(1, block["looks"] + 1)
    ]
    steps = block["own_steps"][rank]
    return {"curve": curve, "seconds": pace, "steps": steps, "waited": 0.1, "staleness": {}, "identical": True}


def soak(plan: Block, size: int, well: bool) -> Block:
    """One long job."""
    lost = 0 if well else 1
    notes = [{"round": 10.0 * i, "mb": 300.0 + (min(i, 10) if well else i)} for i in range(101)]
    own = {"elapsed": 10.0, "identical": well, "memory": notes}
    late = {"staleness": {"0": 3, "2": 1}}
    if gossip_of(plan["arm"]):
        stats = {"steps": 900, "averagings": 250, "messages_sent": 250, "messages_left": 1, **late}
        block = {"arm": plan["arm"], "done": plan["rounds"] - lost, "graphs_used": 3}
        block |= {"weights_off": [0.0, 1e-15, lost / 10]}
        ranks = [stats | {"messages_taken": 249 - lost * (rank == 0)} for rank in range(size)]
    else:
        stats, block = {"rounds": 1000, "gradients_produced": 1000, **late}, {"arm": plan["arm"]}
        ranks = [stats | {"gradients_applied": 4000 - lost * (rank == 0)} for rank in range(size)]
    return {**block, "by_rank": [own | {"stats": stats} for stats in ranks]}


def cycles(plan: Block, size: int, well: bool) -> list[Block]:
    """Eight cycles, the second of which is disturbed, all arms alike; on a GPU then what a profiler counts."""
    found, paces = [], {arm: 1.0 if arm in ("horovod", "plain") else 1.01 for arm in plan["arms"]}
    for cycle in range(8):
        for arm, pace in paces.items():
            worse = 0.0 if well or pace == 1.0 else 0.1 * (1 + cycle)
            elapsed = plan["steps"] * 0.05 * (pace + worse) * (1 + (cycle == 1))
            own = {"elapsed": elapsed, "steps": plan["steps"], "fresh": plan["steps"]}
            found.append({"arm": arm, "cycle": cycle, "by_rank": [own] * size})
    traces = {"cudaDeviceSynchronize": 0.0 if well else 1.0, "cudaStreamSynchronize": 2.0}
    return found + [{"arm": arm, "cycle": None, "by_rank": [traces]} for arm in plan["arms"] if "traces" in plan]


def deaths(block: Block, rank: int, size: int, well: bool) -> Own:
    """Deaths cost a tenth of a point, or two points; of those that were to be one does not come to be."""
    died = block["deaths"] and block["deaths"] - (not well)
    lost = bool(died) * (0.001 if well else 0.02) * (1 + block["seed"] % 2)
    return {"accuracy": 0.98 - lost, "deaths_seen": died, "ranks": 4 - 0.1 * died, "stats": {}}


def nemesis(schedule: Schedule, weights: int, well: bool) -> Block:
    """A schedule with a death; or one in which that is known late, and a step is taken again."""
    troubles = schedule.troubles or (Trouble(0, "kill", "step", 3, 0, 0.0),)
    told = history_of(dataclasses.replace(schedule, troubles=troubles), weights)
    for records in told.values() if not well and schedule.kind != HOROVOD else ():
        late = 0.5 if any(record["what"] == "meeting" for record in records) else 0.0
        records.sort(key=lambda record: record["at"])
        for record in records:
            record["at"] += late * (record["what"] in ("meeting", "generation") and record["at"] > 1)
        ended = [record for record in records if record["what"] == "stepped"]
        ended[-1]["batch"] = ended[-2]["batch"]
    return {"schedule": schedule.content(), "history": told}


ROWS: dict[str, Callable[[Block, int, int, bool], Own]] = {
    "timed": timed,
    "timed_keras": timed,
    "accuracy": accuracy,
    "activation": activation,
    "host": host,
    "host_keras": host,
    "profile": profile,
    "profile_keras": profile,
    "memory": memory,
    "sequence_lengths": sequence_lengths,
    "sequence_lengths_keras": sequence_lengths,
    "late_gradients": late_gradients,
    "hetero": hetero,
    "sleeping_rank": sleeping_rank,
    "exchange_cost": exchange_cost,
    "network": network,
    "pull_cost": pull_cost,
    "race": race,
    "time_to_accuracy": time_to_accuracy,
    "deaths": deaths,
}
"""By job: what a rank finds in a block."""


def blocks_of(job: str, size: int, plan: Block, well: bool) -> list[Block]:
    """The blocks that a job writes, as they are read."""
    if job == "nemesis":
        found = [nemesis(Schedule.of(schedule), plan["weights"], well) for schedule in plan["schedules"]]
    elif job.startswith("soak"):
        found = [soak(plan, size, well)]
    elif job in ROWS:
        more = {"within": 0.1} if job == "exchange_cost" else {}
        asked = [{key: value for key, value in block.items() if key != "times"} for block in plan["blocks"]]
        found = [
            {**told, **more, "by_rank": [ROWS[job](block, rank, size, well) for rank in range(size)]}
            for told, block in zip(asked, plan["blocks"], strict=True)
        ]
    else:
        found = cycles(plan, size, well)
    read: list[Block] = json.loads(json.dumps(found))
    return read
