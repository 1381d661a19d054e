"""Graph to search space: size classes, configs, constraints, defaults."""

from __future__ import annotations

from sparselift.rewrites import SizeClass
from sparselift.space.classes import size_classes
from sparselift.space.config import ClassConfig, Config, config_problems, equivalence_of, memory_bytes, setup_s
from sparselift.space.constraints import Constraints, Rejection, constraint_problems, settings_at
from sparselift.space.search import Dimension, SearchSpace

__all__ = ["ClassConfig", "Config", "Constraints", "Dimension", "Rejection", "SearchSpace", "SizeClass", "config_problems",
           "constraint_problems", "equivalence_of", "memory_bytes", "settings_at", "setup_s", "size_classes"]
