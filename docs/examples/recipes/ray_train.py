"""Ray Train's workers as ranks, without Horovod: `python docs/examples/recipes/ray_train.py`."""

import tempfile

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train():
    """Train a perceptron on a task of its own; runs in each worker, which has a default process group by now."""
    import torch

    import hvd_async.torch as hvd

    hvd.init()  # the ranks are the workers
    torch.manual_seed(0)
    centers = 2 * torch.randn(10, 64)
    labels = torch.arange(1797) % 10
    inputs = centers[labels] + torch.randn(1797, 64)  # alike on all ranks
    own = slice(hvd.rank(), 1347, hvd.size())  # this rank's share; what comes after 1347 is for the test

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        quorum="majority",
    )
    torch.manual_seed(1 + hvd.rank())
    for _epoch in range(5):
        for batch in torch.randperm(len(inputs[own])).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[own][batch]), labels[own][batch]).backward()
            optimizer.step()
    optimizer.drain()
    accuracy = (model(inputs[1347:]).argmax(1) == labels[1347:]).float().mean().item()
    distance = optimizer.consensus_distance()
    ranks = sorted(hvd.allgather_object(hvd.rank()))
    hvd.shutdown()  # before Ray ends the process group
    found = {"accuracy": accuracy, "rounds": optimizer.rounds, "distance": distance, "ranks": ranks}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        first = ray.train.get_context().get_world_rank() == 0
        ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if first else None)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)  # or address="auto", on a cluster that runs
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        found = trainer.fit().metrics
    ray.shutdown()
    print(f"ranks {found['ranks']}")
    print(
        f"test accuracy {found['accuracy']:.3f} after {found['rounds']} rounds; replicas differ by {found['distance']}"
    )
