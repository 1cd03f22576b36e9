"""How many generated examples a property of damaged input is tried on. `scripts/fuzz.py` sets more of them."""

import os

from hypothesis import HealthCheck, seed, settings

EXAMPLES, SEED = int(os.environ.get("FUZZ_EXAMPLES", "40")), int(os.environ.get("FUZZ_SEED", "0"))
many = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def short(test):
    """Runs a property on EXAMPLES examples, the same ones each time."""
    return seed(SEED)(many(test))
