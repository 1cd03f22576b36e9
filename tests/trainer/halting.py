"""An engine whose run stands still while the training devices sample, so that it can be killed then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.trainer.part_sampling import JOINING_THREAD

HALTS_AT = 3
"""The step that halts."""


class HaltingEngine(ReplicaRolloutEngine):
    """In step HALTS_AT the training devices begin a part and never end it. Later processes of the run do not halt."""

    def __init__(self, pipeline, *, marker: str, forward_batch_size: int = 8) -> None:
        """
        Args:
            marker: a file that is made when the training devices begin the part.
        """
        super().__init__(pipeline, forward_batch_size=forward_batch_size)
        self.marker = Path(marker)

    def sample(self, req):
        while req.step == HALTS_AT and not self.marker.exists():
            if threading.current_thread().name == JOINING_THREAD:
                self.marker.touch()
                threading.Event().wait()
            time.sleep(0.01)  # the other engine leaves parts over
        return super().sample(req)
