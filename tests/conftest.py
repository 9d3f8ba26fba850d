"""Settings that every test shares."""

from hypothesis import settings

# No time limit per example: a busy machine is slow, which is no property of the code.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
