"""Property tests have no deadline and nothing is too slow for them: a busy machine must not fail them."""

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
