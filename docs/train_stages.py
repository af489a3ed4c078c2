"""The demo's model, a stage in each process: torchrun --nproc-per-node 4 docs/train_stages.py

It needs scikit-learn, for the demo's data: pip install "syncpipe[demo]".
"""

import sys

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from syncpipe.commands.demo import BATCH_SIZE, load_digits, resnet
from syncpipe.distributed import stage

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
CHUNKS = 8

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)  # so that all ranks draw the same mini-batches
digits = load_digits()
data = TensorDataset(digits.train_images, digits.train_labels)
batches = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)
mine = stage(
    resnet(torch.nn.BatchNorm2d), [2, 2, 2, 1], sample=digits.train_images[: BATCH_SIZE // CHUNKS]
)
schedule = mine.schedule("1f1b", chunks=CHUNKS, loss_fn=F.cross_entropy)
optimizer = torch.optim.AdamW(mine.parameters(), lr=2e-3)

for epoch in range(EPOCHS):
    mine.train()
    for images, labels in batches:
        optimizer.zero_grad()
        losses = []
        schedule.step(images, target=labels, losses=losses, return_outputs=False)
        optimizer.step()
    mine.eval()
    right = 0
    for start in (0, BATCH_SIZE):
        output = schedule.eval(digits.test_images[start : start + BATCH_SIZE])
        if output is not None:  # this is the rank of the last stage
            labels = digits.test_labels[start : start + BATCH_SIZE]
            right += int((output.argmax(1) == labels).sum())
    if losses:
        accuracy = right / (2 * BATCH_SIZE)
        print(f"epoch {epoch}: loss {sum(losses):.3f}, test accuracy {accuracy:.1%}", flush=True)

dist.destroy_process_group()
