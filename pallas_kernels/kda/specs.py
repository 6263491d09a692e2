"""Static facts of KDA: what each implementation needs, argument checks, and the shapes that tests and benchmarks share."""
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import unmet_on_hopper
from pallas_kernels.kda.chunk import FACTORED_BOUND
from pallas_kernels.kda.gates import GATES, bound_of

RESIDUALS = ("recompute", "save")


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    key: int
    value: int


SHAPES = {
    "test": Shape(2, 130, 2, 16, 24),
    "train_cpu": Shape(8, 256, 4, 32, 32),
    "long_cpu": Shape(1, 2048, 4, 64, 64),
    "k3_layer": Shape(1, 8192, 96, 128, 128),
    "kimi_linear_layer": Shape(1, 8192, 32, 128, 128),
}
"""Named workloads. The last two are one layer of the released models at 8K tokens."""

TEST_LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 130, 257)
PREFIXES = (1, 15, 16, 17, 63, 64, 65)

KERNEL_WIDTHS = (64, 128)
STEP_EXAMPLE = dict(dtypes=(jnp.dtype("bfloat16"),) * 5, state_dtype=jnp.dtype("float32"), key=128, value=128)
EXAMPLE = dict(gate="bounded", lower_bound=None, dtype=jnp.dtype("bfloat16"), g_dtype=jnp.dtype("bfloat16"), key=128, value=128)


def factored(gate: str, lower_bound: float | None) -> bool:
    """Whether diagonal tiles may be dense products: a bound is promised, and its 16th power is a normal float32."""
    bound = bound_of(gate, lower_bound)
    return bound is not None and bound >= FACTORED_BOUND


def _mosaic_gpu_unmet(*, gate: str, lower_bound: float | None, dtype: Any, g_dtype: Any, key: int, value: int) -> list[str]:
    unmet = unmet_on_hopper()
    bound = bound_of(gate, lower_bound)
    if bound is None:
        unmet.append(f"lower_bound: gate={gate!r} promises none, wanted one of at least {FACTORED_BOUND} (such as -5.0)")
    elif bound < FACTORED_BOUND:
        unmet.append(f"lower_bound: got {bound}, wanted at least {FACTORED_BOUND}")
    if dtype != jnp.bfloat16:
        unmet.append(f"dtype of q, k, v: got {jnp.dtype(dtype).name}, wanted bfloat16")
    unmet += _unmet_widths(key, value)
    if g_dtype != jnp.bfloat16 and (key, value) == (128, 128):
        unmet.append(f"dtype of g: got {jnp.dtype(g_dtype).name} with Dk = Dv = 128, wanted bfloat16 (a wider one does not fit in shared memory), "
                     "or Dk or Dv = 64")
    return unmet


def _unmet_widths(key: int, value: int) -> list[str]:
    return [f"{name}: got {width}, wanted one of {list(KERNEL_WIDTHS)}, nearest {min(KERNEL_WIDTHS, key=lambda w: abs(w - width))}"
            for name, width in (("Dk", key), ("Dv", value)) if width not in KERNEL_WIDTHS]


def _nothing_unmet(**facts: Any) -> list[str]:
    return []


def _step_unmet(*, dtypes: tuple[Any, ...], state_dtype: Any, key: int, value: int) -> list[str]:
    unmet = unmet_on_hopper()
    for name, dtype in zip(("q", "k", "v", "g", "beta"), dtypes):
        if dtype not in (jnp.bfloat16, jnp.float32):
            unmet.append(f"dtype of {name}: got {jnp.dtype(dtype).name}, wanted bfloat16 or float32")
    if state_dtype != jnp.float32:
        unmet.append(f"dtype of state: got {jnp.dtype(state_dtype).name}, wanted float32")
    return unmet + _unmet_widths(key, value)


UNMET = dict(mosaic_gpu=_mosaic_gpu_unmet, xla=_nothing_unmet, reference=_nothing_unmet)
STEP_UNMET = UNMET | dict(mosaic_gpu=_step_unmet)


def check_arrays(wanted: Mapping[str, tuple[Any, tuple[str, ...]]]) -> dict[str, int]:
    """Checks ranks, shapes and floating dtypes of named arrays against named dimensions; None is passed over. -> size of each dimension.

    A dimension's size is that of the first array that has it. ValueError names the argument, what it has and what was wanted.
    """
    sizes: dict[str, int] = {}
    for name, (array, dimensions) in wanted.items():
        if array is None:
            continue
        shape = jnp.shape(array)
        layout = "[" + ", ".join(dimensions) + "]"
        if len(shape) != len(dimensions):
            raise ValueError(f"{name}: got shape {shape}, wanted {layout}, {len(dimensions)} dimensions")
        for dimension, size in zip(dimensions, shape):
            sizes.setdefault(dimension, size)
        expected = tuple(sizes[dimension] for dimension in dimensions)
        if shape != expected:
            raise ValueError(f"{name}: got shape {shape}, wanted {layout} = {expected}")
        kind = jnp.integer if name == "segment_ids" else jnp.floating
        if not jnp.issubdtype(jnp.result_type(array), kind):
            raise ValueError(f"{name}: got dtype {jnp.result_type(array)}, wanted {'an integer' if kind is jnp.integer else 'a floating'} type")
    return sizes


def check_gate(gate: str, a_log: Any, dt_bias: Any, lower_bound: float | None) -> None:
    if gate not in GATES:
        raise ValueError(f"gate: got {gate!r}, wanted one of {list(GATES)}")
    if gate == "log_decay":
        for name, value in (("a_log", a_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name}: got an array with gate='log_decay', which has no parameters; wanted None, or gate='bounded' or 'softplus'")
    if lower_bound is None:
        return
    if gate == "softplus":
        raise ValueError(f"lower_bound: got {lower_bound!r} with gate='softplus', which is unbounded; wanted None, or gate='bounded'")
    if not isinstance(lower_bound, numbers.Real) or not lower_bound < 0 or not math.isfinite(lower_bound):
        raise ValueError(f"lower_bound: got {lower_bound!r}, wanted a finite negative Python number or None")


BOUNDED_GATES = ("random", "strong", "zero", "zero_first", "strong_first", "strong_then_weak", "beta_0_or_1")
"""Log decays in [-5, 0]: random; all -5; all 0; alternating 0, -5 and -5, 0; 32 tokens near -5 then 32 near 0; random with beta 0 or 1."""
UNBOUNDED_GATES = ("deep", "pinned")
"""Log decays without a bound: between 0 and -40 with most of them weak; every fourth token at -40."""


def gate_case(name: str, tokens: int, heads: int, key: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """-> log decays [T, H, Dk] and beta [T, H], float32, for a name of BOUNDED_GATES or UNBOUNDED_GATES."""
    draw = np.random.default_rng(seed)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    shape, t = (tokens, heads, key), np.arange(tokens)[:, None, None]
    random = -5 * sigmoid(draw.normal(size=shape))
    beta = sigmoid(draw.normal(size=shape[:2]))
    g = dict(random=lambda: random, strong=lambda: np.full(shape, -5.0), zero=lambda: np.zeros(shape),
             zero_first=lambda: np.where(t % 2 == 0, 0.0, -5.0), strong_first=lambda: np.where(t % 2 == 0, -5.0, 0.0),
             strong_then_weak=lambda: np.where(t % 64 < 32, -4.9, -0.02) + 0.02 * random, beta_0_or_1=lambda: random,
             deep=lambda: -40 * draw.uniform(size=shape) ** 4, pinned=lambda: np.where(t % 4 == 3, -40.0, random))[name]()
    if name == "beta_0_or_1":
        beta = np.round(beta)
    return np.broadcast_to(g, shape).astype(np.float32), beta.astype(np.float32)


def inputs(shape: Shape, gate: str | tuple[str, ...] = "random", seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 arguments q, k, v, g, beta, initial_state of `kda`: unit q and k, log decays by `gate_case`, one name for each row if a tuple."""
    draw = np.random.default_rng(seed)
    batch, tokens, heads, key, value = shape
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    names = (gate,) * batch if isinstance(gate, str) else gate
    rows = [gate_case(name, tokens, heads, key, seed + i) for i, name in enumerate(names)]
    arrays = dict(q=unit(draw.normal(size=(batch, tokens, heads, key))), k=unit(draw.normal(size=(batch, tokens, heads, key))),
                  v=draw.normal(size=(batch, tokens, heads, value)), g=np.stack([g for g, _ in rows]), beta=np.stack([b for _, b in rows]),
                  initial_state=draw.normal(size=(batch, heads, key, value)))
    return {name: x.astype(np.float32) for name, x in arrays.items()}
