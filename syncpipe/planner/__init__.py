"""How to run a model on several devices: :func:`plan`."""

from syncpipe.planner.choose import NoPlan, plan
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.replicas import Replicas, replicated
from syncpipe.planner.report.plan import Plan
from syncpipe.planner.report.rivals import Rival
from syncpipe.planner.report.stages import StagePlan

__all__ = ["Machine", "NoPlan", "Plan", "Replicas", "Rival", "StagePlan", "plan", "replicated"]
