"""Every refusal names the argument, what it got and what was wanted."""
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError, kda, kda_segment, kda_step, kernel_report
from pallas_kernels.kda import specs

X = specs.inputs(specs.Shape(2, 8, 2, 4, 6))


@pytest.mark.parametrize("change, words", [
    (dict(beta=X["beta"][:, :4]), ["beta", r"\(2, 4, 2\)", r"\[B, T, H\]", r"\(2, 8, 2\)"]),
    (dict(k=X["k"][..., :3]), ["k:", r"\(2, 8, 2, 3\)", r"\(2, 8, 2, 4\)"]),
    (dict(v=X["v"][0]), ["v:", "4 dimensions"]),
    (dict(g=X["g"].astype(np.int32)), ["g:", "int32", "floating"]),
    (dict(segment_ids=np.ones((2, 8), np.float32)), ["segment_ids", "float32", "integer"]),
    (dict(segment_ids=np.ones((8,), np.int32)), ["segment_ids"]),
    (dict(initial_state=X["initial_state"].swapaxes(2, 3)), ["initial_state", r"\[B, H, Dk, Dv\]"]),
    (dict(gate="clamp"), ["gate", "clamp", "softplus"]),
    (dict(residuals="all"), ["residuals", "recompute"]),
    (dict(lower_bound=0.5), ["lower_bound", "0.5"]),
    (dict(lower_bound=-5.0, gate="softplus"), ["lower_bound", "softplus"]),
    (dict(a_log=np.zeros(2, np.float32)), ["a_log", "log_decay"]),
    (dict(gate="bounded", dt_bias=np.zeros((2, 3), np.float32)), ["dt_bias", r"\[H, Dk\]"]),
    (dict(implementation="triton"), ["implementation", "triton"])])
def test_arguments(change, words):
    with pytest.raises(ValueError) as error:
        kda(**{**X, **change})
    for word in words:
        error.match(word)


def test_step_and_segment_check_too():
    with pytest.raises(ValueError, match="state"):
        kda_step(**{n: X[n][:, 0] for n in ("q", "k", "v", "g", "beta")}, state=X["initial_state"][:1])
    with pytest.raises(ValueError, match="beta"):
        kda_segment(X["k"], X["v"], X["g"], X["beta"][:1])


def test_named_kernel_lists_every_reason():
    with pytest.raises(UnsupportedError) as error:
        kda(**X, implementation="mosaic_gpu")
    for reason in ("Hopper", "lower_bound", "float32, wanted bfloat16", "Dk: got 4, wanted one of .* nearest 64", "Dv: got 6"):
        error.match(reason)
    half = {n: jnp.zeros((1, 4, 1, 64), jnp.bfloat16) for n in "qkvg"} | {"beta": jnp.zeros((1, 4, 1))}
    with pytest.raises(UnsupportedError) as error:
        kda(**half, lower_bound=-9.0, implementation="mosaic_gpu")
    assert "got -9.0" in str(error.value) and "Dk" not in str(error.value) and "dtype" not in str(error.value)
    assert kda(**X, implementation=("mosaic_gpu", "reference"))[0].shape == X["v"].shape
    assert "kda_step" in kernel_report()
