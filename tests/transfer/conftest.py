"""Fixtures of the transfer tests: see harness.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import make_config, run_dir, start

__all__ = ["make_config", "run_dir", "start"]
