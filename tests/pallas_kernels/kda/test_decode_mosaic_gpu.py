"""The decoding kernel in the interpreter, with race detection, against the plain recurrence in float64."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, kda_step
from pallas_kernels.kda import decode, mosaic_gpu_decode
from pallas_kernels.testing import rms_ratio


@pytest.fixture
def interpreter(monkeypatch, no_races):
    """The kernel runs in the interpreter; fails on a race, and leaves no shared memory behind for the next test."""
    monkeypatch.setattr(mosaic_gpu_decode, "step", partial(mosaic_gpu_decode.step, interpret=plgpu.InterpretGPUParams(detect_races=True)))


def arguments(key, value, gate, dtype, parameters=True):
    draw = np.random.default_rng(key + value)
    normal = lambda *shape: draw.normal(size=shape)
    x = dict(q=3 * normal(2, 3, key), k=normal(2, 3, key), v=normal(2, 3, value), g=2 * normal(2, 3, key), beta=normal(2, 3))
    if gate == "log_decay":
        x["g"], x["beta"] = -np.abs(x["g"]), 1 / (1 + np.exp(-x["beta"]))
    x = {name: jnp.asarray(array, dtype) for name, array in x.items()} | dict(state=jnp.asarray(normal(2, 3, key, value), jnp.float32))
    if gate != "log_decay":
        x |= dict(a_log=jnp.asarray(normal(3), jnp.float32), dt_bias=jnp.asarray(normal(3, key), jnp.float32)) if parameters else {}
    return x


def recurrence(call, x):
    with jax.enable_x64():
        return decode._recurrence(call, *(None if array is None else jnp.asarray(array, jnp.float64) for array in x))


ORDER = ("q", "k", "v", "g", "beta", "state", "a_log", "dt_bias")
CASES = [(128, 128, "bounded", "bfloat16", True), (64, 64, "softplus", "float32", True), (128, 64, "log_decay", "bfloat16", False),
         (64, 128, "bounded", "float32", False)]


@pytest.mark.parametrize("key,value,gate,dtype,parameters", CASES)
def test_is_the_recurrence(key, value, gate, dtype, parameters, interpreter):
    x = arguments(key, value, gate, dtype, parameters)
    x = [x.get(name) for name in ORDER]
    call = mosaic_gpu_decode.Call(gate, -5.0 if gate == "bounded" else None, gate != "log_decay", gate != "log_decay", 0.3)
    o, state = mosaic_gpu_decode.step(call, *x)
    want_o, want_state = recurrence(call, x)
    assert o.dtype == dtype and state.dtype == jnp.float32
    assert rms_ratio(state, want_state) < 3e-7
    assert rms_ratio(o, want_o) < (4e-3 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("blocks", [1, 4])
def test_blocks_go_from_item_to_item(blocks, interpreter, monkeypatch):
    """12 items: more than a block has stages, and 4 blocks with 3 each."""
    monkeypatch.setattr(mosaic_gpu_decode, "BLOCKS", blocks)
    x = [arguments(64, 128, "bounded", "float32")[name] for name in ORDER]
    call = mosaic_gpu_decode.Call("bounded", -5.0, True, True, 0.3)
    for got, want in zip(mosaic_gpu_decode.step(call, *x), recurrence(call, x)):
        assert rms_ratio(got, want) < 1e-6


def test_gradient(interpreter):
    """Of the rule that surrounds the kernel, float32 against float64."""
    x = arguments(64, 64, "bounded", "float32")
    x = tuple(x[name] for name in ORDER)
    call = mosaic_gpu_decode.Call("bounded", -5.0, True, True, 0.125)
    loss = lambda run, x: sum(jnp.sum(jnp.sin(y.astype(y.dtype))) for y in run(call, *x))
    got = jax.grad(partial(loss, decode._kernel))(x)
    with jax.enable_x64():
        want = jax.grad(partial(loss, decode._recurrence))(tuple(jnp.asarray(array, jnp.float64) for array in x))
    for name, a, b in zip(ORDER, got, want):
        assert rms_ratio(a, b) < 2e-6, name


def test_writes_its_results_and_not_its_operands():
    """Where XLA fuses the call with the slices of a scan over layers, operand and result are two buffers, whatever was promised."""
    x = [arguments(64, 64, "bounded", "float32")[name] for name in ORDER]
    call = mosaic_gpu_decode.Call("bounded", -5.0, True, True, 0.125)
    mapped, = (eqn for eqn in jax.make_jaxpr(partial(mosaic_gpu_decode.step, call))(*x).eqns if eqn.primitive.name == "custom_vmap_call")
    kernel, = mapped.params["call"].eqns
    inside, = kernel.params["jaxprs"]
    place = {var: i for i, var in enumerate(inside.invars)}
    written = {place[effect.input] for effect in inside.effects if isinstance(effect, state_types.WriteEffect)}
    assert written == {len(kernel.invars), len(kernel.invars) + 1}


def test_members_of_a_vmap_are_calls(interpreter):
    x = [arguments(64, 64, "bounded", "float32")[name] for name in ORDER]
    members = [jnp.stack([array, array / 2, -array]) for array in x[:-1]]
    step = partial(mosaic_gpu_decode.step, mosaic_gpu_decode.Call("bounded", -5.0, True, True, 0.125))
    got = jax.vmap(step, in_axes=(0,) * 7 + (None,))(*members, x[-1])
    for member in range(3):
        for all_of_them, alone in zip(got, step(*(array[member] for array in members), x[-1])):
            np.testing.assert_array_equal(all_of_them[member], alone)


def test_refusals():
    x = arguments(64, 64, "log_decay", "float16") | dict(state=jnp.zeros((2, 3, 64, 64), jnp.bfloat16))
    with pytest.raises(UnsupportedError) as error:
        kda_step(**x, implementation="mosaic_gpu")
    for reason in ("Hopper", "dtype of q: got float16", "dtype of state: got bfloat16, wanted float32"):
        error.match(reason)
