"""Times the mixture-of-experts layer of a model and what it is made of on this machine. Writes JSON after each layer.

    longmoe bench moe [--out moe.json] [--layers train_64 k3_896] [--rival MODULE:FUNCTION]

Forward + backward, bfloat16 on a GPU (float32 on a CPU), random tokens through the layer's own router. `matmuls_ms` are the same matrix products alone, in
both directions: grouped (both experts' matrices, with the group sizes that the router gave), and dense (latent, shared, router). What is left of
`layer_ms` is selection, permutation, combination, activation and norms. `rms` is the layer's output against float32 in the `reference` implementation.
--rival: a function (lhs, rhs, group_sizes) to time in the grouped matmul's place, such as another library's ragged dot.
"""
import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from longmoe.configs import ModelConfig, MoEConfig
from longmoe.model import moe as moe_layer
from longmoe.model.router import Router
from pallas_kernels.bench import command, commit
from pallas_kernels.testing import median_ms, rms_ratio


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row of the benchmark."""
    tokens: int
    model: ModelConfig


def _layer(tokens: int, experts: int, per_token: int, width: int, latent: int, expert_dim: int) -> Layer:
    moe = MoEConfig(num_experts=experts, experts_per_token=per_token, latent_dim=latent, expert_dim=expert_dim, num_shared_experts=2,
                    shared_expert_dim=expert_dim)
    return Layer(tokens, ModelConfig(width=width, moe=moe, param_dtype="float32", init_std=0.02))


LAYERS = {
    "train_64": _layer(32768, 64, 8, 1024, 512, 512),
    "k3_896": _layer(8192, 896, 16, 2048, 1024, 896),
    "cpu": _layer(1024, 16, 2, 64, 32, 64),
}


def main(arguments: list[str] | None = None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(prog="longmoe bench moe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("moe.json"))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["train_64", "k3_896"] if on_gpu else ["cpu"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rival", default="", metavar="MODULE:FUNCTION")
    options = parser.parse_args(arguments)
    rival = _function(options.rival) if options.rival else None
    report = dict(commit=commit(), jax=jax.__version__, python=platform.python_version(), device=jax.devices()[0].device_kind,
                  command=command("moe", arguments), kernels=pallas_kernels.kernel_report().splitlines(), rows=[])
    for name in options.layers:
        row = dict(layer=name) | measure(LAYERS[name], "bfloat16" if on_gpu else "float32", options.repeats, rival)
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(layer: Layer, dtype: str, repeats: int, rival: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Milliseconds of the layer and of its parts, forward + backward, and the output's accuracy."""
    model = dataclasses.replace(layer.model, dtype=dtype)
    module = moe_layer.MoE(model)
    x = jax.random.normal(jax.random.key(0), (1, layer.tokens, model.width), dtype)
    cotangent = jax.random.normal(jax.random.key(1), x.shape, dtype)
    variables = jax.jit(module.init)(jax.random.key(2), x)
    state = {"router_state": variables["router_state"]}

    def run(params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        out, pull = jax.vjp(lambda params, x: module.apply({"params": params} | state, x)[0], params, x)
        return out, pull(cotangent)

    timed = lambda function, *values: round(median_ms(jax.jit(function), *values, inner=3, outer=repeats)[0], 4)
    values = (variables["params"], x, cotangent)
    result = dict(dataclasses.asdict(model.moe) | dict(tokens=layer.tokens, width=model.width), layer_ms=timed(run, *values))
    result |= _parts(model, variables, x, timed)
    result["matmuls_ms"] = round(result["grouped_ms"] + result["dense_ms"], 4)
    result["matmuls_share"] = round(result["matmuls_ms"] / result["layer_ms"], 4)
    if rival is not None:
        with _grouped_matmul(lambda lhs, rhs, sizes, **_: rival(lhs, rhs, sizes)):
            result["rival_layer_ms"] = timed(lambda *values: run(*values), *values)
    result["rms"] = float(f"{rms_ratio(jax.jit(run)(*values)[0], _exact(model, variables, x)):.3g}")
    return result


def _parts(model: ModelConfig, variables: Any, x: jax.Array, timed: Callable[..., float]) -> dict[str, float]:
    """Times of the layer's matrix products alone, and of its router with selection."""
    moe, params = model.moe, variables["params"]
    router = Router(model)
    route = lambda x: router.apply({"params": params["router"], "router_state": variables["router_state"]["router"]}, x)[0]
    ids = jax.jit(route)(x).expert_ids.reshape(-1)
    sizes = jnp.sum(ids[:, None] == jnp.arange(moe.num_experts), axis=0, dtype=jnp.int32)
    gate_up = params["experts_gate_up"].reshape(moe.num_experts, -1, 2 * moe.expert_dim).astype(x.dtype)
    down = params["experts_down"].astype(x.dtype)
    rows = jax.random.normal(jax.random.key(3), (ids.size, moe.latent_dim), x.dtype)
    hidden = jax.random.normal(jax.random.key(4), (ids.size, moe.expert_dim), x.dtype)
    grouped = functools.partial(_both_ways, functools.partial(pallas_kernels.grouped_matmul, implementation=model.implementation))
    product = lambda a, b: _both_ways(lambda a, b: jnp.matmul(a, b), a, b)
    flat, latent = x.reshape(-1, model.width), jax.random.normal(jax.random.key(5), (x.shape[1], moe.latent_dim), x.dtype)
    shared = jax.random.normal(jax.random.key(6), (x.shape[1], moe.num_shared_experts * moe.shared_expert_dim), x.dtype)
    kernel = lambda *path: functools.reduce(lambda tree, key: tree[key], path, params)["kernel"].astype(x.dtype)
    dense = [(flat, kernel("latent_down")), (latent, kernel("latent_up")), (flat, kernel("shared", "gate_proj")), (flat, kernel("shared", "up_proj")),
             (shared, kernel("shared", "down_proj"))]
    return dict(grouped_ms=timed(lambda *a: (grouped(a[0], a[1], sizes), grouped(a[2], a[3], sizes)), rows, gate_up, hidden, down),
                dense_ms=timed(lambda pairs: [product(*pair) for pair in pairs], dense), router_ms=timed(route, x))


def _both_ways(function: Callable[..., jax.Array], a: jax.Array, b: jax.Array, *rest: jax.Array) -> Any:
    """The product and both gradients."""
    out, pull = jax.vjp(lambda a, b: function(a, b, *rest), a, b)
    return out, pull(out)


def _exact(model: ModelConfig, variables: Any, x: jax.Array) -> jax.Array:
    """The layer in float32, by the operators' references, with the experts that the layer itself chooses."""
    wide = dataclasses.replace(model, dtype="float32", implementation="reference")
    return jax.jit(lambda x: moe_layer.MoE(wide).apply(variables, x)[0])(x.astype(jnp.float32))


@contextlib.contextmanager
def _grouped_matmul(function: Callable[..., jax.Array]) -> Iterator[None]:
    """The layer traced inside uses `function` for its grouped matmuls."""
    before = pallas_kernels.grouped_matmul
    pallas_kernels.grouped_matmul = function
    try:
        yield
    finally:
        pallas_kernels.grouped_matmul = before


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"rival: got {name!r}, wanted MODULE:FUNCTION, as in `jax.lax:ragged_dot`")
    return getattr(importlib.import_module(module), attribute)
