from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PYTHON, Kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A fresh kernel, connected and welcomed."""
    with Kernel(tmp_path) as k:
        yield k


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests of a module that do no harm to it."""
    with Kernel(tmp_path_factory.mktemp("shared")) as k:
        yield k


@pytest.fixture(scope="session")
def has_ipython() -> bool:
    return subprocess.run([PYTHON, "-c", "import IPython"], capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def has_matplotlib() -> bool:
    return subprocess.run([PYTHON, "-c", "import matplotlib"], capture_output=True).returncode == 0
