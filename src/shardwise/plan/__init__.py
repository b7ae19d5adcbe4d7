"""Planning, before any GPU is asked for. Imports no torch."""

from shardwise.plan.ledger import Ledger
from shardwise.plan.planner import Answer, Plan, plan
from shardwise.plan.search import Candidate

__all__ = ["Answer", "Candidate", "Ledger", "Plan", "plan"]
