"""The demo's model, a stage in each process, on one machine or several.

    torchrun --nproc-per-node 4 train_stages.py          # one machine, four processes

    # two machines, two processes each: the same line on both, with the first one's address
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first:29500 \\
        train_stages.py

It needs scikit-learn, for the demo's data: pip install "syncpipe[demo]".
"""

import os
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from syncpipe.commands.demo import BATCH_SIZE, load_digits, resnet
from syncpipe.distributed import stage

EPOCHS, IMAGES = (1, 768) if "--tiny" in sys.argv else (10, None)
CHUNKS = 8

# With GPUs: one for each process, by its number on its machine.
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
else:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
torch.manual_seed(0)  # all ranks draw the same mini-batches, as long as all have the same seed
digits = load_digits()
data = TensorDataset(digits.train_images[:IMAGES], digits.train_labels[:IMAGES])
batches = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)
layers = resnet(torch.nn.BatchNorm2d)
sample = digits.train_images[: BATCH_SIZE // CHUNKS]
probe = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
mine = stage(layers, [2, 2, 2, 1], sample=sample.to(probe), timeout=120)
schedule = mine.schedule("1f1b", chunks=CHUNKS, loss_fn=F.cross_entropy)
optimizer = torch.optim.AdamW(mine.parameters(), lr=2e-3)
average = AveragedModel(mine, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def accuracy() -> float:
    """Of the last stage's rank; 0 elsewhere."""
    mine.eval()
    right = 0
    for start in (0, BATCH_SIZE):
        output = schedule.eval(digits.test_images[start : start + BATCH_SIZE].to(mine.device))
        if output is not None:
            labels = digits.test_labels[start : start + BATCH_SIZE].to(mine.device)
            right += int((output.argmax(1) == labels).sum())
    mine.train()
    return right / (2 * BATCH_SIZE)


for epoch in range(EPOCHS):
    for images, labels in batches:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        with torch.autocast(mine.device.type, dtype=torch.bfloat16):
            schedule.step(
                images.to(mine.device), target=labels.to(mine.device), losses=losses,
                return_outputs=False, global_loss=True,
            )  # fmt: skip
        mine.clip_grad_norm_(1.0)  # by the norm of the whole model, not of this stage
        optimizer.step()
        average.update_parameters(mine)
    found = accuracy()
    if mine.last is not None:
        print(f"epoch {epoch}: loss {sum(losses):.3f}, test accuracy {found:.1%}", flush=True)

mine.load_state_dict(average.module.state_dict())  # evaluates with the average
found = accuracy()
if mine.last is not None:
    print(f"average of the weights: test accuracy {found:.1%}")

# All ranks write their stages into one folder that all see; any other shape loads it.
folder = [os.environ.get("CHECKPOINT") or tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
dcp.save({"model": mine.state_dict()}, checkpoint_id=folder[0])
dist.destroy_process_group()
