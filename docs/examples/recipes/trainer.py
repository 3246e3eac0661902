"""Hugging Face's Trainer, a process a rank: `torchrun --nproc-per-node 2 docs/examples/recipes/trainer.py`."""

import os
import tempfile

import hvd_async.torch as hvd

hvd.declare_torchvision_operators()  # does nothing where torchvision fits torch; before what imports it

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification
from transformers import get_cosine_schedule_with_warmup as cosine

hvd.init()
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # torchrun's: the Trainer would put DDP around the model
    os.environ.pop(name, None)
torch.manual_seed(0)
images, labels = map(torch.tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
samples = [
    {"pixel_values": image.reshape(1, 8, 8) / 16, "labels": label}
    for image, label in zip(images[order].float(), labels[order], strict=True)
]
share, test = samples[:1344][hvd.rank() :: hvd.size()], samples[1344:]  # shares of one size, the same test on all

config = ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=1,
                   num_attention_heads=2, intermediate_size=64, num_labels=10)  # fmt: skip
model = ViTForImageClassification(config)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.EagerOptimizer(
    torch.optim.AdamW(model.parameters(), lr=5e-3),
    named_parameters=model.named_parameters(),
    quorum="majority",
    round_transform=lambda params: torch.nn.utils.clip_grad_norm_(
        params, 1.0
    ),  # of what is applied; max_grad_norm is this rank's
)


class Drain(TrainerCallback):
    """Applies every gradient everywhere before weights are looked at."""

    def on_step_end(self, args, state, control, **kwargs):
        """Before evaluations and checkpoints by steps."""
        if control.should_evaluate or control.should_save:
            optimizer.drain()

    def on_epoch_end(self, args, state, control, **kwargs):
        """Before those by epochs."""
        optimizer.drain()


epochs, batch = 10, 16
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),  # of rank 0 alone, which saves
    num_train_epochs=epochs,
    per_device_train_batch_size=batch,
    per_device_eval_batch_size=512,
    max_grad_norm=0.0,
    eval_strategy="epoch",
    save_strategy="epoch" if hvd.rank() == 0 else "no",
    save_total_limit=1,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    logging_strategy="no",
    dataloader_pin_memory=False,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=share,
    eval_dataset=test,
    compute_metrics=lambda result: {"accuracy": (result.predictions.argmax(1) == result.label_ids).mean().item()},
    optimizers=(optimizer, cosine(optimizer, 40, epochs * len(share) // batch)),
    callbacks=[Drain()],
)
trainer.train()

accuracy, distance = trainer.evaluate()["eval_accuracy"], optimizer.consensus_distance()  # the latter a collective
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f} after {optimizer.rounds} rounds; replicas differ by {distance}")
