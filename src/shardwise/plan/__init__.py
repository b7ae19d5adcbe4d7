"""Planning: memory and traffic of a layout, without a GPU. Imports no torch."""

from shardwise.plan.ledger import Ledger
from shardwise.plan.planner import ModePlan, Plan, plan
from shardwise.plan.search import Candidate

__all__ = ["Candidate", "Ledger", "ModePlan", "Plan", "plan"]
