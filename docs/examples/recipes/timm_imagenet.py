"""timm's train.py in short: `horovodrun -np 2 --gloo python docs/examples/recipes/timm_imagenet.py`."""

import pathlib
import tempfile

import hvd_async.torch as hvd

hvd.declare_torchvision_operators()  # does nothing where torchvision fits torch; before what imports it

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import Mixup, create_dataset, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, accuracy
from torch.utils.data import DataLoader, DistributedSampler

CLASSES, PIXELS, EPOCHS = 4, 32, 5


def draw(folder, per_class, random):
    """Write a folder of images as ImageNet's: stripes of four directions in noise."""
    across, down = np.meshgrid(*[np.arange(PIXELS)] * 2)
    for label, phase in enumerate((across, down, across + down, across - down)):
        (folder / str(label)).mkdir(parents=True)
        for number in range(per_class):
            stripes = 127 + 60 * np.sin(phase * 0.8 + random.uniform(0, 6)) + random.normal(0, 30, (PIXELS, PIXELS))
            pixels = np.repeat(stripes[..., None], 3, axis=2).clip(0, 255).astype("uint8")
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")


hvd.init()
torch.manual_seed(hvd.rank())
root = pathlib.Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0))
if hvd.rank() == 0:
    draw(root / "train", 96, np.random.default_rng(0))
    draw(root / "validation", 20, np.random.default_rng(1))
hvd.allreduce(torch.zeros(1), name="images are there")

# timm's create_loader(distributed=True) asks torch.distributed: DataLoader and a sampler by Horovod's rank here
train = create_dataset(
    "", root / "train", transform=create_transform(PIXELS, is_training=True, hflip=0, scale=(0.7, 1))
)
test = create_dataset("", root / "validation", transform=create_transform(PIXELS, crop_pct=1.0))
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=16, sampler=sampler, num_workers=0, drop_last=True)
mixup = Mixup(mixup_alpha=0.2, num_classes=CLASSES)

model = timm.create_model("test_resnet", num_classes=CLASSES)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # before channels_last, which Horovod does not broadcast
model = model.to(memory_format=torch.channels_last)
ema = ModelEmaV3(model, decay=0.9)
optimizer = hvd.EagerOptimizer(
    create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=1e-4),  # two groups: no decay of biases and norms
    named_parameters=model.named_parameters(),
    named_buffers=model.named_buffers(),
    quorum="majority",
    round_transform=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 2.0),  # dispatch_clip_grad's place
)
optimizer.register_step_post_hook(lambda *_: ema.update(model))  # once a round: the same average on all ranks
scheduler = CosineLRScheduler(optimizer, t_initial=EPOCHS, warmup_t=1, warmup_lr_init=0.01)
loss_function = SoftTargetCrossEntropy()


@torch.no_grad()
def validate(network):
    """Return the top-1 accuracy in percent."""
    network.eval()
    scores = [
        accuracy(network(inputs.to(memory_format=torch.channels_last)), labels)[0].item()
        for inputs, labels in DataLoader(test, batch_size=80)
    ]
    network.train()
    return sum(scores) / len(scores)


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    scheduler.step(epoch)
    for inputs, labels in loader:
        inputs, targets = mixup(inputs.to(memory_format=torch.channels_last), labels)
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):  # on GPUs: "cuda", bfloat16
            loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
    optimizer.drain()  # before validation and checkpoints; averages batch norm's statistics
    for name, buffer in ema.module.named_buffers():  # and the averaged model's: timm's --dist-bn reduce
        if buffer.is_floating_point():
            buffer.copy_(hvd.allreduce(buffer, name=name))

distance = optimizer.consensus_distance()  # a collective: every rank calls it
averages = torch.cat([value.flatten().double() for value in ema.module.state_dict().values()])
apart = (averages - hvd.broadcast(averages, root_rank=0, name="averages")).abs().max()
apart = hvd.allreduce(apart, op=hvd.Max, name="apart").item()
if hvd.rank() == 0:
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": ema.module.state_dict(),
                "optimizer": optimizer.state_dict(), "epoch": EPOCHS}, root / "last.pth.tar")  # fmt: skip
    print(f"of the averaged weights {validate(ema.module):.1f}%, which differ by {apart} between ranks")
    top1 = validate(model) / 100
    print(f"test accuracy {top1:.3f} after {optimizer.rounds} rounds; replicas differ by {distance}")
