"""planned.py is found by its bare name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
