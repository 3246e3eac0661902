"""Leaders in torch: handwritten digits; run `horovodrun -np 2 --gloo python docs/examples/torch_leader.py`."""

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
optimizer = hvd.LeaderOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    algorithm="lsgd",
)
for _epoch in range(20):
    for batch in torch.randperm(len(train)).split(32):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train[batch]), train_labels[batch])
        loss.backward()
        optimizer.record_loss(loss)  # the rank with the lowest mean loss leads
        optimizer.step()
optimizer.drain()  # every replica has the leader's weights

accuracy = (model(test).argmax(1) == test_labels).float().mean().item()
distance, led = optimizer.consensus_distance(), optimizer.stats().led  # the first a collective: every rank calls it
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f}; pulls led by rank: {led}; replicas differ by {distance}")
