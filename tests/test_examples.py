"""Tests with examples that hypothesis draws hold for many new ones, too."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_many_new_examples_hold() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis and not slow", "--hypothesis-profile", "explore"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
