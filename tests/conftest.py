"""Settings that every test shares."""

import os

from hypothesis import settings

# No time limit per example: a busy machine is slow, which is no property of the code. Where a change is judged it is
# judged by the same examples every time; elsewhere every run looks at new ones.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")
