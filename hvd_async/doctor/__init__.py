"""Looks at a machine: will Horovod and hvd_async work here, how quick is the network, and what is to be mended."""
