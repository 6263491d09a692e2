"""What the tests of every operator's kernels share."""
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@pytest.fixture
def no_races():
    """For kernels that run in the interpreter with `detect_races`: fails on a race, and leaves no shared memory behind for the next test."""
    yield
    try:
        assert not gpu_callbacks.get_races().races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
