"""Property tests here have no deadline: a busy machine must not fail them."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
