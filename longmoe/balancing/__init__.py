"""Keeping experts evenly loaded: pure functions on arrays, no Flax. `quantile` decides the bias, `metrics` says how even the load is."""
