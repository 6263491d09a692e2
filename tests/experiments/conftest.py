"""The experiments are scripts that import each other by bare names, as they do when they are run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
