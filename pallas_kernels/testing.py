"""Measures for checking an operator against a reference: used by the tests and the benchmarks of every operator."""
import numpy as np


def rms_ratio(got, want) -> float:
    """RMS(got - want) / RMS(want) in float64, over any array-likes of one shape. 0 for empty arrays; the plain RMS(got) where want is all zero.

    NaN or infinity anywhere gives nan or inf, so that `rms_ratio(...) < bound` fails.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"got has shape {got.shape}, want has shape {want.shape}")
    if not want.size:
        return 0.0
    error, size = (float(np.sqrt(np.mean(np.square(x)))) for x in (got - want, want))
    return error / size if size else error
