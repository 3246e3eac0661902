"""Accelerate, a process a rank: `torchrun --nproc-per-node 2 docs/examples/recipes/accelerate_loop.py`."""

import os

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import hvd_async.torch as hvd

hvd.init()
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # torchrun's: Accelerate would put DDP around the model
    os.environ.pop(name, None)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
images, labels = map(torch.tensor, load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1347, 450], torch.Generator().manual_seed(0))  # alike on all ranks
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=16, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.EagerOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    quorum="majority",
    backward_passes_per_step=accelerator.gradient_accumulation_steps,
    round_transform=lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),  # accelerator.clip_... is too late
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20 * len(loader) // 2)
model, prepared, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            prepared.step()
            schedule.step()
            prepared.zero_grad()
optimizer.drain()  # every gradient is applied everywhere

inputs, targets = test[:]
accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
distance = optimizer.consensus_distance()  # a collective: every rank calls it
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f} after {optimizer.rounds} rounds; replicas differ by {distance}")
