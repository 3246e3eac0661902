"""Measures the network over TensorFlow's collectives, as ``hvd_async doctor`` does over torch's where it is there."""

from __future__ import annotations

from common import Report

from hvd_async.doctor.collectives import HorovodCollectives
from hvd_async.doctor.network import measure
from hvd_async.tensorflow import doctor


def main() -> None:
    with HorovodCollectives(doctor) as collectives:
        Report(collectives.rank()).put("network", measured=measure(collectives).as_json())


if __name__ == "__main__":
    main()
