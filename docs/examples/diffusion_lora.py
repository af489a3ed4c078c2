"""LoRA adapters for the UNet of Stable Diffusion: a pipe of diffusers' model, and DDPM's loss.

    python diffusion_lora.py                                     # a small UNet, made here
    python diffusion_lora.py --model runwayml/stable-diffusion-v1-5

The data is made here too: digits as latents, their labels as the "text". In a script of your own
latents come from the VAE, and the text from its encoder; both run without a pipe, beforehand.

It needs: pip install syncpipe diffusers peft scikit-learn
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from sklearn.datasets import load_digits
from torch import Tensor

from syncpipe import Pipe, sequential

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a name on the hub, or a folder, with the folder unet in it")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
STEPS, BATCH = (2, 8) if args.tiny else (60, 32)
SMALL = {
    "block_out_channels": (16,), "down_block_types": ["CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D"], "mid_block_type": None,
} if args.tiny else {
    "block_out_channels": (64, 128), "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
DEVICES = None if torch.accelerator.is_available() else ["cpu:0", "cpu:1"]  # None: all there are

torch.manual_seed(0)
if args.model:
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet")
else:
    unet = UNet2DConditionModel(
        sample_size=8, layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        cross_attention_dim=32, **SMALL,
    )  # fmt: skip
unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)

digits = load_digits()
latents = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1).repeat(1, 4, 1, 1)
texts = torch.randn(10, 7, unet.config.cross_attention_dim)[torch.tensor(digits.target)]


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """The arguments of the UNet, with noise at a random time for each sample; and that noise."""
    rows = torch.randint(len(latents), (BATCH,))
    noise = torch.randn(BATCH, *latents.shape[1:])
    times = torch.randint(noise_scheduler.config.num_train_timesteps, (BATCH,))
    noisy = noise_scheduler.add_noise(latents[rows], noise, times)
    return {"sample": noisy, "timestep": times, "encoder_hidden_states": texts[rows]}, noise


def loss_fn(output, noise: Tensor) -> Tensor:
    return F.mse_loss(output.sample, noise)


sample, _ = batch()
layers = sequential(unet, **{name: value[:3] for name, value in sample.items()})
pipe = Pipe(layers, "parameters", devices=DEVICES, chunks=4, checkpoint="never")
print(f"{len(pipe)} layers")
optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-3)
for step in range(STEPS):
    input, noise = batch()
    optimizer.zero_grad()
    input = {name: value.to(pipe.devices[0]) for name, value in input.items()}
    loss = pipe.train_batch(input, noise, loss_fn=loss_fn)
    optimizer.step()
    if step % max(1, STEPS // 6) == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss:.4f}")

unet.save_lora_adapter(tempfile.mkdtemp())  # as diffusers does, for unet.load_lora_adapter
