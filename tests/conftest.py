"""What holds for all tests: one thread for each process, and patience.

Tiny models run fastest on one thread, and sums then have one order everywhere. Property tests have no deadline and
nothing is too slow for them: a busy machine must not fail them. Ctrl-C is heard, also where a shell has begun the tests
in the background and has it ignored.
"""

import os
import signal
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give torch its one thread again, whatever a library has set meanwhile."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
