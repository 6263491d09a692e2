"""Measurements of a trained model: held-out text beside n-gram lines, ablations, recall, and the report."""
