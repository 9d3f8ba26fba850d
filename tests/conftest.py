"""Settings that every test shares."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

# No time limit per example: a busy machine is slow, which is no property of the code. Where a change is judged it is
# judged by the same examples every time; elsewhere every run looks at new ones.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")


INTEGRATION = Path(__file__).parent / "integration"
FIRST_SIGHT = ("test_quickstart.py", "test_service.py")
"""Files of integration tests that the quick tests have too: a change that breaks everything is seen at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts whole services is an integration test, without anybody having to say so."""
    for item in items:
        if INTEGRATION in item.path.parents and item.path.name not in FIRST_SIGHT:
            item.add_marker("integration")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Whoever sets logging up in a test, a command for example, leaves it to the next one as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
