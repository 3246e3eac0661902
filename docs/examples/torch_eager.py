"""Partial allreduce in torch: handwritten digits; run `horovodrun -np 2 --gloo python docs/examples/torch_eager.py`."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvd_async.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
images, labels = map(torch.tensor, load_digits(return_X_y=True))
train, test, train_labels, test_labels = train_test_split(images.float() / 16, labels, random_state=0)
train, train_labels = train[hvd.rank() :: hvd.size()], train_labels[hvd.rank() :: hvd.size()]  # this rank's share

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.EagerOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    quorum="majority",
)
for _epoch in range(20):
    for batch in torch.randperm(len(train)).split(32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train[batch]), train_labels[batch]).backward()
        optimizer.step()
optimizer.drain()  # every gradient is applied everywhere

accuracy = (model(test).argmax(1) == test_labels).float().mean().item()
distance = optimizer.consensus_distance()  # a collective: every rank calls it
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f} after {optimizer.rounds} rounds; replicas differ by {distance}")
