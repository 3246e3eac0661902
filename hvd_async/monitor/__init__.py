"""Live view of a job: its optimizers' counts, sampled while it trains, for TensorBoard, Prometheus and warnings."""

from hvd_async.monitor.monitor import Monitor, WaitReport
from hvd_async.monitor.sample import Sample

__all__ = ["Monitor", "Sample", "WaitReport"]
