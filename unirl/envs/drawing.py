"""Which library of OpenGL MuJoCo draws with: the environment variable MUJOCO_GL."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

BACK_ENDS = ("egl", "osmesa")
"""Values of MUJOCO_GL that draw without a display, in the order in which they are tried: on a GPU first."""
VARIABLE = "MUJOCO_GL"
WAYS_TO_DRAW = (
    "MuJoCo draws with MUJOCO_GL=egl (libegl1, and a driver) or MUJOCO_GL=osmesa (libosmesa6); unirl doctor says which "
    "of them works here"
)
PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco/>")
renderer = mujoco.Renderer(model, 8, 8)
renderer.update_scene(mujoco.MjData(model))
renderer.render()
"""
PROBE_S = 60.0


@cache
def works(back_end: str) -> bool:
    """True if MuJoCo draws with this value of MUJOCO_GL. A process of its own tries it, which one in vain may crash."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(
            command, env=os.environ | {VARIABLE: back_end}, capture_output=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def choose_back_end() -> None:
    """Set MUJOCO_GL to one that works, for this process and its workers, unless it is set or there is a display.

    Does nothing in a process without MuJoCo.
    """
    if "mujoco" not in sys.modules or VARIABLE in os.environ or "DISPLAY" in os.environ:
        return
    chosen = next(filter(works, BACK_ENDS), None)
    if chosen is not None:
        os.environ[VARIABLE] = chosen
