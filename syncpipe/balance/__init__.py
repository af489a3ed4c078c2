"""Cut a model into stages: what its layers cost, and the best balance for these costs."""

from syncpipe.balance.balances import (
    balance_by_parameters,
    balance_by_size,
    balance_by_time,
    balance_by_type,
    balance_cost,
    balance_uniform,
    param_scale_of,
)
from syncpipe.balance.estimate import DEVICES, DeviceSpec
from syncpipe.balance.measure import EFFICIENCY, estimated, profile
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile

__all__ = [
    "DEVICES", "EFFICIENCY", "DeviceSpec", "LayerProfile", "Profile", "SkipProfile",
    "balance_by_parameters", "balance_by_size", "balance_by_time", "balance_by_type",
    "balance_cost", "balance_uniform", "estimated", "param_scale_of", "profile",
]  # fmt: skip
