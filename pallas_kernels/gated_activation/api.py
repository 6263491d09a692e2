"""`gated_activation`: SiTU-GLU and SwiGLU, of two branches or of the halves of one array."""
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.gated_activation import specs, xla

OPERATOR = register(Operator(name="gated_activation", unmet=specs.UNMET, example=specs.EXAMPLE))


def gated_activation(*branches: Float[Array, "..."], gate: specs.Gate, implementation: Implementation = "auto") -> Float[Array, "... F"]:
    """SiTU-GLU (Kimi K3 report, Stable LatentMoE): beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta); SwiGLU: a sigmoid(a) * b.

    Args:
      branches: a and b [..., F], or one array [..., 2F] whose halves they are; any float dtype, inside float32 (float64 for float64).
      gate: which activation, with its bounds.
      implementation: "auto", a name, or a tuple tried in order.

    Returns the dtype of the branches. Differentiable; the backward pass keeps the branches alone.
    Raises ValueError for arguments that do not fit, UnsupportedError (a ValueError) when a named implementation cannot take the call.
    """
    branches = tuple(map(jnp.asarray, branches))
    specs.check_arguments(branches)
    *before, last = branches[0].shape
    chosen = choose(OPERATOR, implementation, shape=(*before, last if len(branches) == 2 else last // 2), dtype=branches[0].dtype)
    if chosen != "mosaic_gpu":
        return xla.gated_activation(gate, branches)
    # Pallas is a heavy import, and of no use where the kernels cannot run.
    from pallas_kernels.gated_activation import vjp
    return vjp.gated_activation(gate, branches)
