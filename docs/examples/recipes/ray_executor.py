"""Horovod's ranks as actors of Ray, which starts them: `python docs/examples/recipes/ray_executor.py`."""

import ray
from horovod.ray import RayExecutor


def train():
    """Train a perceptron on handwritten digits; runs in each actor, a rank."""
    import torch
    from sklearn.datasets import load_digits

    import hvd_async.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]
    own = slice(hvd.rank(), 1347, hvd.size())  # this rank's share; what comes after 1347 is for the test

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        quorum="majority",
    )
    for _epoch in range(20):
        for batch in torch.randperm(len(images[own])).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[own][batch]), labels[own][batch]).backward()
            optimizer.step()
    optimizer.drain()
    accuracy = (model(images[1347:]).argmax(1) == labels[1347:]).float().mean().item()
    result = hvd.rank(), accuracy, optimizer.rounds, optimizer.consensus_distance()
    hvd.shutdown()  # an actor lives on
    return result


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)  # or address="auto", on a cluster that runs
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2, cpus_per_worker=1)
    executor.start()
    results = executor.run(train)
    executor.shutdown()
    ray.shutdown()
    _, accuracy, rounds, distance = min(results)
    print(f"ranks {sorted(result[0] for result in results)}")
    print(f"test accuracy {accuracy:.3f} after {rounds} rounds; replicas differ by {distance}")
