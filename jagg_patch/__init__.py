"""JAGG for GRPO trainers of diffusion and flow models: W backward passes become 2.

`install` puts it into a trainer at run time; `group_backward` is the method as a plain function.
"""

__version__ = "0.6.0"

from .config import JaggConfig
from .errors import JaggError
from .install import install
from .method.folding import group_backward
from .method.plan import alphas, plan_groups

__all__ = ["JaggConfig", "JaggError", "alphas", "group_backward", "install", "plan_groups"]
