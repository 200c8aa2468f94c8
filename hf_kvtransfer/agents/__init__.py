"""Agents that several models play by turns: what they need from the library, and how to see what a handoff does."""

from .comparison import Comparison, Outcome, compare
from .protocols import AgentBackend, AgentEnvironment, AgentReply, CacheHandle, CacheUse, ModelRouter
from .retail_desk import RetailDesk
from .routers import FixedRoutes
from .trajectory import Trajectory, Turn, sample_trajectory
from .transformers_backend import TransformersBackend


__all__ = [
    "AgentBackend",
    "AgentEnvironment",
    "AgentReply",
    "CacheHandle",
    "CacheUse",
    "Comparison",
    "FixedRoutes",
    "ModelRouter",
    "Outcome",
    "RetailDesk",
    "Trajectory",
    "TransformersBackend",
    "Turn",
    "compare",
    "sample_trajectory",
]
