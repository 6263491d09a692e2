"""Experiments are scripts: they import each other from their own folder."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
