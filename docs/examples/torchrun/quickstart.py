"""Partial allreduce without Horovod: run `torchrun --nproc-per-node 2 docs/examples/torchrun/quickstart.py`."""

import torch

import hvd_async.torch as hvd

hvd.init()
torch.manual_seed(0)
task = torch.nn.Linear(16, 1)  # every rank learns this function from samples of its own
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = hvd.EagerOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    quorum="majority",
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(1 + hvd.rank())
for step in range(200):
    inputs = torch.randn(32, 16)
    loss = torch.nn.functional.mse_loss(model(inputs), task(inputs).detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0 and hvd.rank() == 0:
        print(f"first step of {hvd.size()} ranks", flush=True)
optimizer.drain()  # every gradient is applied everywhere

distance = optimizer.consensus_distance()  # a collective: every rank calls it
if hvd.rank() == 0:
    print(f"loss {loss.item():.4f} after {optimizer.rounds} rounds; replicas differ by {distance}")
