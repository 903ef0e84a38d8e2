"""The directory that the kernel runs from."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from harness import PACKAGE, Kernel


def test_sources_are_locked_while_the_kernel_lives(tmp_path: Path) -> None:
    own = tmp_path / "kernel-own"
    shutil.copytree(PACKAGE / "mypr_kernel", own / "mypr_kernel")
    fd = os.open(own, os.O_RDONLY)
    try:
        with Kernel(tmp_path, env={"PYTHONPATH": str(own)}) as k:
            k.run("import asyncio; await asyncio.sleep(0.5)")
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as other kernels do
            fcntl.flock(fd, fcntl.LOCK_UN)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
