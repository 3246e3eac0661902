"""A look at a machine: will Horovod and hvd_async work here, and how quick is the network?"""
