"""How much the fuzz tests try: a little in `make test`, EXAMPLES each in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large)

# The short run tries the same examples each time, so that a red suite is the change's fault.
settings.register_profile(
    "short", max_examples=4, derandomize=True, deadline=None, suppress_health_check=SLOW
)
settings.register_profile(
    "long",
    max_examples=int(os.environ.get("EXAMPLES", "2500")),
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW,
)
settings.load_profile(os.environ.get("FUZZ", "short"))
