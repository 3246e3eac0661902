"""Checks of a machine: will Horovod and hvd_async work here, and how fast is the network?"""
