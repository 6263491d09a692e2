"""The Hopper kernels of grouped_matmul on a real GPU: the cases that the interpreter runs, and those that only a GPU is fast enough for."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import cases
from pallas_kernels.testing import rms_ratio

pytestmark = pytest.mark.gpu
BOUNDS = {"bfloat16": 3e-3, "float16": 6e-4, "float32": 2e-5}


def run(arguments, out_dtype):
    lhs, rhs, sizes, dout = arguments

    @jax.jit
    def both(lhs, rhs, sizes, dout):
        multiply = lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, preferred_element_type=out_dtype, implementation="mosaic_gpu")
        out, vjp = jax.vjp(multiply, lhs, rhs)
        return out, *vjp(dout.astype(out.dtype))
    return [np.asarray(x) for x in both(lhs, rhs, sizes, dout)]


@pytest.mark.parametrize("dtype,out_dtype", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("case", cases.CASES | cases.ON_HARDWARE)
def test_values_gradients_and_nan(case, dtype, out_dtype):
    """Clean, and with the longest group NaN: both twice, equal to the bit."""
    shape = (cases.CASES | cases.ON_HARDWARE)[case]
    for poisoned in (None, int(np.argmax(shape[3]))):
        arguments, want = cases.inputs(*shape, dtype=dtype, poisoned=poisoned)
        got, again = run(arguments, out_dtype), run(arguments, out_dtype)
        for name, g, a, w in zip(("out", "dlhs", "drhs"), got, again, want):
            assert g.dtype == jnp.dtype(out_dtype if name == "out" else dtype)
            np.testing.assert_array_equal(g.view(np.uint8), a.view(np.uint8), err_msg=name)
            np.testing.assert_array_equal(np.isnan(g), np.isnan(w), err_msg=name)
            assert rms_ratio(np.nan_to_num(g.astype(np.float64)), np.nan_to_num(w)) < BOUNDS[g.dtype.name], (name, poisoned)


def test_auto_takes_the_kernel():
    arguments, _ = cases.inputs(*cases.CASES["around 64"])
    automatic = jax.jit(lambda *x: grouped_matmul(*x))(*arguments[:3])
    np.testing.assert_array_equal(np.asarray(automatic), run(arguments, None)[0])
