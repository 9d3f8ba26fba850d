"""Settings that every test shares."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# No time limit per example: a busy machine is slow, which is no property of the code. Where a change is judged it is
# judged by the same examples every time; elsewhere every run looks at new ones.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Whoever sets logging up in a test, a command for example, leaves it to the next one as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
