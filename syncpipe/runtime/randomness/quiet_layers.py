"""The layers of PyTorch that are known not to draw."""

from __future__ import annotations

from torch import nn

__all__ = ["never_draws"]

_QUIET: frozenset[type] = frozenset(
    {
        nn.Linear, nn.Bilinear, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding,
        nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
        nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        nn.LocalResponseNorm, nn.RMSNorm, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU,
        nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh,
        nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
        nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.PixelShuffle,
        nn.PixelUnshuffle, nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d,
        nn.ReplicationPad2d, nn.Sequential,
    }
)  # fmt: skip


def never_draws(module: nn.Module) -> bool:
    """Whether a layer is made of PyTorch's own modules that never draw, without any hook."""
    return (
        type(module) in _QUIET
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and all(never_draws(child) for child in module.children())
    )
