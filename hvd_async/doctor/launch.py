"""Horovod's ``horovodrun``, but that it does not ask first for its transports: ``python -m hvd_async.doctor.launch``.

It imports TensorFlow for each question, 16 s in all; the doctor has asked already.
"""

from __future__ import annotations

if __name__ == "__main__":  # (it starts itself anew for each rank, to watch over it)
    from horovod.runner import launch

    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    launch.run_commandline()
