"""A DDP job with a slow rank: torchrun --nproc-per-node 2 -m hvd_async record --out run slow_ddp.py, then advise."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for _ in range(123):
    x, y = torch.randn(16, 64), torch.randint(10, (16,))
    time.sleep(0.08 if dist.get_rank() == 1 else 0.05)  # reading data; rank 1's disk is slow
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
