"""Makes `plait_bench` importable, as `run.py` does for itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
