"""PyTorch Lightning, a process a rank: `torchrun --nproc-per-node 2 docs/examples/recipes/lightning.py`."""

import tempfile

import hvd_async.torch as hvd

hvd.declare_torchvision_operators()  # does nothing where torchvision fits torch; before what imports it

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

hvd.init()
pl.seed_everything(0, verbose=False)


class Digits(pl.LightningModule):
    """A perceptron for handwritten digits."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, _):
        """The loss of this rank's batch."""
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, _):
        """Log the accuracy of the drained model, which is the same on all ranks."""
        self.log("accuracy", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        """An optimizer of hvd_async and a scheduler."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)
        optimizer = hvd.EagerOptimizer(
            optimizer,
            named_parameters=self.named_parameters(),
            named_buffers=self.named_buffers(),
            quorum="majority",
            round_transform=lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),  # Trainer's clips too late
        )
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


class Drain(pl.Callback):
    """Applies every gradient everywhere before weights are looked at: ModelCheckpoint comes after it."""

    def on_validation_start(self, trainer, module):
        """Before evaluation."""
        module.optimizers(use_pl_optimizer=False).drain()

    def on_train_epoch_end(self, trainer, module):
        """Before a checkpoint."""
        module.optimizers(use_pl_optimizer=False).drain()


images, labels = map(torch.tensor, load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1347, 450], torch.Generator().manual_seed(0))  # alike on all ranks
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())  # Lightning tells it the epoch
model, folder = Digits(), hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0)
trainer = pl.Trainer(
    accelerator="cpu",  # or accelerator="gpu", devices=[hvd.local_rank()]
    devices=1,
    max_epochs=10,
    callbacks=[Drain()],
    default_root_dir=folder,
    enable_checkpointing=hvd.rank() == 0,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(train, batch_size=32, sampler=sampler), DataLoader(test, batch_size=450))

optimizer = model.optimizers(use_pl_optimizer=False)
accuracy, distance = trainer.callback_metrics["accuracy"], optimizer.consensus_distance()  # the latter a collective
if hvd.rank() == 0:
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    saved_alike = all(torch.equal(saved["state_dict"][name], value) for name, value in model.state_dict().items())
    print(f"the checkpoint has {saved['global_step']} steps and the model's weights: {saved_alike}")
    print(f"test accuracy {accuracy:.3f} after {optimizer.rounds} rounds; replicas differ by {distance}")
