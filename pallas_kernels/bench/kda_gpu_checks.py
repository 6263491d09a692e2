"""What `kda_gpu` checks before it times anything: accuracy against float64, causality to the bit, calls in a row against one call. Each is a function for a
process of its own, for most of their time is compilation and the reference on a CPU."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import specs
from pallas_kernels.kda.api import kda, kda_step
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

WIDE = ("q", "k", "v", "g")
WHOLE = dict(gate="bounded", beta_logits=True, qk_l2norm=True)


def raw_inputs(shape, seed=0):
    """Float32 numpy arguments, q, k, v, g on bfloat16 values."""
    x = specs.inputs(shape, seed=seed)
    draw = np.random.default_rng(seed + 1)
    x["g"], x["beta"] = draw.normal(size=x["g"].shape), draw.normal(size=x["beta"].shape)
    x["a_log"], x["dt_bias"] = 0.3 * draw.normal(size=shape.heads), draw.normal(size=(shape.heads, shape.key))
    return {n: np.asarray(jnp.asarray(a, jnp.bfloat16 if n in WIDE else jnp.float32), np.float32) for n, a in x.items()}


def call(implementation, narrow=WIDE, **keywords):
    def run(**x):
        if implementation != "reference":
            x = {n: a.astype(jnp.bfloat16) if n in narrow else a for n, a in x.items()}
        return kda(**x, **keywords, implementation=implementation)
    return run


def packed(x):
    tokens = x["q"].shape[1]
    ids = np.searchsorted([0.13 * tokens, 0.37 * tokens, 0.38 * tokens, 0.72 * tokens], np.arange(tokens)) + 1
    ids[int(0.5 * tokens):int(0.5 * tokens) + 9] = 0
    return x | dict(segment_ids=np.broadcast_to(ids, x["q"].shape[:2]).astype(np.int32))


def log_decays(x):
    case = specs.inputs(specs.Shape(*x["q"].shape, x["v"].shape[-1]), "strong_then_weak")
    x = x | dict(g=case["g"], beta=case["beta"])
    return {n: a for n, a in x.items() if n not in ("a_log", "dt_bias")}


def slow_decay(x):
    """So slow that a state is still there after a thousand tokens."""
    return x | dict(g=x["g"] - 6)


SHAPE = specs.Shape(2, 500, 2, 128, 128)
ACCURACY = {
    "everything inside": (SHAPE, WHOLE, None, WIDE),
    "packed, Dv 64": (SHAPE._replace(value=64), WHOLE, packed, WIDE),
    "log decays, Dk 64": (SHAPE._replace(key=64), dict(lower_bound=-5.0), log_decays, WIDE[:3]),
    "one long head in parts": (specs.Shape(1, 64 * 64, 1, 128, 128), WHOLE, slow_decay, WIDE),
}
"""Shape, keywords, what is done to the inputs, which of them are bfloat16."""


def accuracy(case, implementations):
    """RMS ratio of every output and gradient against the float64 recurrence at the rounded inputs, which runs on the CPU."""
    shape, keywords, change, narrow = ACCURACY[case]
    x = raw_inputs(shape) if change is None else change(raw_inputs(shape))
    draw = np.random.default_rng(9)
    cotangents = tuple(np.asarray(jnp.asarray(draw.normal(size=x[n].shape), d), np.float32) for n, d in (("v", jnp.bfloat16), ("initial_state", jnp.float32)))
    with jax.default_device(jax.devices("cpu")[0]):
        want = outputs_and_gradients(call("reference", **keywords), x, cotangents, jnp.float64)
    result = {}
    for name in implementations:
        got = outputs_and_gradients(call(name, narrow, **keywords), x, cotangents)
        again = outputs_and_gradients(call(name, narrow, **keywords), x, cotangents) if name == "mosaic_gpu" else got
        ratios = {n: rms_ratio(got[0][i], want[0][i]) for i, n in enumerate(("o", "state"))} | {f"d {n}": rms_ratio(got[1][n], want[1][n]) for n in want[1]}
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again)))
        result[name] = {n: float(f"{r:.3g}") for n, r in ratios.items()} | dict(two_runs_equal=same)
    return result


def prefixes():
    """For each prefix length, whether outputs and prefix-loss gradients keep every bit when later inputs change."""
    shape = specs.Shape(1, 300, 2, 128, 128)
    x, other = raw_inputs(shape), raw_inputs(shape, seed=50)
    t = np.arange(shape.tokens)

    @jax.jit
    def run(x, cotangent):
        names = [*WIDE, "beta"]
        o, pull = jax.vjp(lambda part: call("mosaic_gpu", **WHOLE)(**{**x, **part})[0], {n: x[n] for n in names})
        return o, pull(cotangent)[0]

    result = {}
    for prefix in (1, 7, 15, 16, 17, 33, 63, 64, 65, 130, 257):
        keep = lambda a, prefix=prefix: (t < prefix).reshape(1, -1, *(1,) * (a.ndim - 2))
        cotangent = jnp.asarray(np.where(keep(x["v"]), x["v"], 0), jnp.bfloat16)
        mixed = x | {n: np.where(keep(x[n]), x[n], other[n]) for n in (*WIDE, "beta")}
        a, b = run(x, cotangent), run(mixed, cotangent)
        result[prefix] = all(np.array_equal(np.asarray(p)[:, :prefix], np.asarray(q)[:, :prefix]) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    return result


def packed_apart():
    """RMS ratios of two packed documents, outputs and gradients, to the same two in calls of their own."""
    x = {n: a for n, a in raw_inputs(specs.Shape(1, 384, 2, 128, 128)).items() if n != "initial_state"}
    run, ids, weight = call("mosaic_gpu", **WHOLE), np.where(np.arange(384) < 150, 1, 2)[None].astype(np.int32), raw_inputs(SHAPE)["v"][:1, :384]
    cut = lambda x, part: {n: a[:, part] if n in (*WIDE, "beta") else a for n, a in x.items()}

    def gradients(outputs):
        o, pull = jax.vjp(jax.jit(outputs), x)
        return dict(pull(jnp.asarray(weight, o.dtype))[0], o=o)

    together = gradients(lambda x: run(**x, segment_ids=ids)[0])
    apart = gradients(lambda x: jnp.concatenate([run(**cut(x, part))[0] for part in (slice(0, 150), slice(150, 384))], axis=1))
    return {n: float(f"{rms_ratio(together[n], apart[n]):.3g}") for n in apart}


def in_a_row(tokens, heads, calls, train):
    """RMS ratios of one call's outputs (and gradients) to those of `calls` calls in a row that hand the state on, decays so slow that it matters."""
    x, do = device_inputs(1, tokens, heads)
    x = x | dict(g=x["g"] - 9)
    run = lambda x, state: kda(**x, initial_state=state, implementation="mosaic_gpu", **WHOLE)
    size = tokens // calls

    def one_after_another(x, state):
        outputs = []
        for i in range(calls):
            o, state = run({n: a[:, i * size:(i + 1) * size] if n in (*WIDE, "beta") else a for n, a in x.items()}, state)
            outputs.append(o)
        return jnp.concatenate(outputs, axis=1), state

    def ratios(a, b):
        ratio = lambda a, b: jnp.sqrt(jnp.mean(jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32))) / jnp.mean(jnp.square(b.astype(jnp.float32))))
        return jax.tree.map(ratio, a, b)

    @jax.jit
    def compare(x, do, state, dstate):
        if not train:
            return dict(zip(("o", "state"), ratios(run(x, state), one_after_another(x, state))))
        found = []
        for function in (run, one_after_another):
            (o, last), pull = jax.vjp(function, x, state)
            dx, dinitial = pull((do, dstate))
            found.append(dict({f"d {n}": a for n, a in dx.items()}, o=o, state=last, **{"d initial_state": dinitial}))
        return ratios(*found)

    states = 0.1 * jax.random.normal(jax.random.key(8), (2, 1, heads, 128, 128))
    return {n: float(f"{r:.3g}") for n, r in compare(x, do, *states).items()}


def device_inputs(batch, tokens, heads, width=128):
    """(arguments of the whole operator in bfloat16, a gradient of o), drawn on the device."""
    keys = jax.random.split(jax.random.key(0), 8)
    new = lambda i, *s: jax.random.normal(keys[i], s, jnp.bfloat16)
    wide = (batch, tokens, heads, width)
    return dict(q=new(0, *wide), k=new(1, *wide), v=new(2, *wide), g=new(3, *wide), beta=new(4, batch, tokens, heads),
                a_log=0.1 * jax.random.normal(keys[6], (heads,)), dt_bias=0.1 * jax.random.normal(keys[7], (heads, width))), new(5, *wide)


def decode_accuracy():
    """RMS ratios of one step against the float64 recurrence, for every gate and width."""
    cases = (("bounded", 128, 128), ("softplus", 64, 64), ("log_decay", 128, 64), ("bounded", 64, 128))
    return {f"{gate} {key}x{value}": one_step_accuracy(gate, key, value) for gate, key, value in cases}


def one_step_accuracy(gate, key, value):
    x = raw_inputs(specs.Shape(5, 1, 3, key, value))
    x = {n: a[:, 0] if n in (*WIDE, "beta") else a for n, a in x.items()}
    if gate == "log_decay":
        x = {n: np.abs(a) * (-1 if n == "g" else 1) for n, a in x.items() if n not in ("a_log", "dt_bias")}
    state = x.pop("initial_state")

    def run(implementation, x, state):
        return kda_step(**x, state=state, gate=gate, beta_logits=gate != "log_decay", qk_l2norm=True, implementation=implementation)

    got = jax.jit(partial(run, "mosaic_gpu"))({n: jnp.asarray(a, jnp.bfloat16) if n in WIDE else a for n, a in x.items()}, state)
    with jax.enable_x64():
        want = run("reference", {n: jnp.asarray(a, jnp.float64) for n, a in x.items()}, jnp.asarray(state, jnp.float64))
    return dict(o=rms_ratio(got[0], want[0]), state=rms_ratio(got[1], want[1]))
