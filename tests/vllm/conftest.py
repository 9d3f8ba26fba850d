"""Real engines are started only when they are asked for: `pytest -m vllm tests/vllm`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out of runs that did not name its marker."""
    return None if "vllm" in (config.option.markexpr or "") else True
