"""How to run a model on several devices: :func:`plan`."""

from syncpipe.planner.choose import NoPlan, plan
from syncpipe.planner.machine import Machine
from syncpipe.planner.plan import Plan, StagePlan
from syncpipe.planner.replicas import Replicas, replicated
from syncpipe.planner.rivals import Rival

__all__ = ["Machine", "NoPlan", "Plan", "Replicas", "Rival", "StagePlan", "plan", "replicated"]
