"""Fixtures of the transfer tests: see harness.py and peers_by_hand.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import make_config, run_dir, start
from peers_by_hand import joined

__all__ = ["joined", "make_config", "run_dir", "start"]
