"""Measures the network over TensorFlow's collectives, as ``hvd_async doctor`` does over torch's where it is there."""

from __future__ import annotations

from common import Report

from hvd_async.doctor.network import measure
from hvd_async.tensorflow.network_probe import Probe, stop


def main() -> None:
    probe = Probe()
    Report(probe.rank()).put("network", measured=measure(probe).as_json())
    stop()


if __name__ == "__main__":
    main()
