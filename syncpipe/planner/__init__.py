"""How to run a model on several devices: :func:`plan`."""

from syncpipe.planner.alternatives import Alternative
from syncpipe.planner.machine import Machine
from syncpipe.planner.planning import NoPlan, Plan, StagePlan, plan
from syncpipe.planner.replicas import replicated

__all__ = [
    "Alternative",
    "Machine",
    "NoPlan",
    "Plan",
    "StagePlan",
    "plan",
    "replicated",
]
