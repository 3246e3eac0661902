"""A trainer that only counts, and jobs of it with ranks as threads."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

from hvd_async.runner.course import Position
from hvd_async.runner.loop import Run
from hvd_async.runner.options import parse
from hvd_async.runner.report import OptimizerCounts, Replicas
from hvd_async.runner.trainer import World


class Job:
    """Ranks as threads. `gather` checks that all ranks call the same one, and fails rather than hang."""

    def __init__(self, size):
        self.size, self.barrier, self.values = size, threading.Barrier(size), {}

    def world(self, rank):
        def gather(value, name):
            self.values[rank] = (name, value)
            self.barrier.wait(timeout=20)
            rows = [self.values[other] for other in range(self.size)]
            self.barrier.wait(timeout=20)
            assert {row[0] for row in rows} == {name}
            return [row[1] for row in rows]

        return World(rank, self.size, gather)


class Clock:
    """A second for each training step, and what is slept."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds


class Counter:
    """A trainer that learns nothing: its loss is 1 / (1 + epochs met), its accuracy is given.

    `calls` has what the loop asked for, in order; distances: of the ranks at each epoch's end, if they gossip.
    """

    checkpoint_suffix, opening = ".txt", None

    def __init__(self, clock, size, right=(1.0,), pace=1, distances=()):
        """pace: rounds that this rank sees at each of its steps."""
        self.clock, self.size, self.right, self.pace, self.distances = clock, size, list(right), pace, distances
        self.rates, self.sizes, self.drains, self.seen, self.calls = [], [], 0, [], []

    def begin_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")

    def train_step(self, batch, rate):
        self.clock.now += 1.0
        self.rates.append(rate)
        self.sizes.append(len(batch))
        self.seen.append(batch.images.tobytes())
        return 1 / (1 + self.drains)

    @property
    def rounds(self):
        return self.pace * len(self.rates)

    def drain(self):
        self.drains += 1
        self.calls.append("drain")

    @contextlib.contextmanager
    def consensus(self):
        self.drains += 1
        self.calls.append("consensus")
        yield
        self.calls.append("own")

    def consensus_distance(self):
        if not self.distances:
            return None
        self.clock.now += 64.0
        return self.distances[self.drains]

    def correct(self, batch):
        if self.calls[-1:] != ["test"]:
            self.calls.append("test")
        return round(self.right[min(self.drains, len(self.right)) - 1] * len(batch))

    def save(self, path, position):
        self.calls.append("save")
        path.write_text(json.dumps(astuple(position)))

    def restore(self, path, world):
        return Position(*json.loads(path.read_text())) if path.exists() else None

    def counts(self):
        return OptimizerCounts.synchronous(len(self.rates), self.size, 0.0)

    def replicas(self):
        return Replicas(True, 0.0, 0.0)


def run_all(size, *line, right=(1.0,), paces=(), distances=(), stops=None):
    """(summaries, trainers) of a whole job with digits at 8 x 8.

    stops: the steps after which each rank is asked to stop; without it nobody can be asked.
    """
    job, options = Job(size), parse("torch", ["--image-size", "8", *line])

    def rank(index):
        clock = Clock()
        trainer = Counter(clock, size, right, paces[index] if paces else 1, distances)
        asked = (lambda: len(trainer.rates) >= stops[index]) if stops else None
        run = Run(options, job.world(index), asked=asked, clock=lambda: clock.now, sleep=clock.sleep)
        return run.fit(trainer), trainer

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(rank, range(size)))
    return [summary for summary, _ in results], [trainer for _, trainer in results]
