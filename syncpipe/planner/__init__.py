"""The planner, :func:`plan`: the fastest way to run a model on several devices."""

from syncpipe.planner.alternatives import Alternative
from syncpipe.planner.machine import Machine
from syncpipe.planner.planning import NoPlan, Plan, StagePlan, plan

__all__ = [
    "Alternative",
    "Machine",
    "NoPlan",
    "Plan",
    "StagePlan",
    "plan",
]
