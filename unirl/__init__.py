"""UniRL: reinforcement learning post-training for generative models.

import unirl
result = unirl.Run("diffusion/sd3_trainside", scale="toy", num_rollouts=3).train()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.api import Run, TrainingResult

# MKL, which multiplies matrices for torch on x86 CPUs, reads this at its first call. Without STRICT, it may choose
# another order of summation for each number of rows and threads: a row has other bits in a batch of another size.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.2.0"
__all__ = ["Run", "TrainingResult", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is first used, so that `import unirl` takes milliseconds."""
    if name in ("Run", "TrainingResult"):
        from unirl import api

        return vars(api)[name]
    raise AttributeError(f"module 'unirl' has no attribute {name!r}")
