"""Runs the model cases from their checkpoints, and measures logits, per-layer values, routes, gradients and decoding."""
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from oracle_layers import bound, recorded, sorted_routes
from oracle_vectors import GRADIENT_BOUNDS, Case, Figure, checkpoint, compare, load

from longmoe import LongMoE, generate, init_cache, load_hf, unstack_layers
from longmoe.balancing import balancers
from longmoe.configs import ModelConfig
from longmoe.interop.hf import published
from longmoe.model.lm import RUN_ONCE
from longmoe.model.router import Router, Routing

MOVED = "float64, weights an ulp away"
"""The dtype under which a Figure of `measure_conditioning` goes."""
run_once = functools.partial(jax.jit, compiler_options=RUN_ONCE)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What a model case shows beside its figures."""
    figures: list[Figure]
    routes: float
    """Share of (token, layer) pairs whose experts are the reference's; 1 where the case holds no routes."""
    same_tokens: bool | None
    """Greedy continuations; None where the case has none."""
    top1: float
    """Share of positions whose most likely token is the float64 reference's."""


@dataclasses.dataclass(frozen=True)
class Nearness:
    """Logits against the float64 reference: the measures of a Figure, and of an Agreement."""
    worst: float
    rms: float
    top1: float

    @classmethod
    def of(cls, logits: Any, case: Case) -> "Nearness":
        got, want = np.asarray(logits, np.float64), np.asarray(case.best("logits"), np.float64)
        figure, = compare(case.name, "", {"logits": got}, {"logits": want}, None)
        return cls(figure.worst, figure.rms, float(np.mean(np.argmax(got, -1) == np.argmax(want, -1))))


@contextlib.contextmanager
def forced_routes(experts: Mapping[str, np.ndarray]) -> Iterator[None]:
    """While a model is traced in here, its routers choose `experts` (by the router's path, [B, T, K]); their weights come from their own scores."""
    route = balancers.route

    def choose(next_call: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if not isinstance(context.module, Router) or context.method_name != "__call__":
            return next_call(*args, **kwargs)
        chosen = jnp.asarray(experts["/".join(context.module.path)])
        with mock.patch.object(balancers, "route", lambda *inputs: (chosen, route(*inputs)[1])):
            return next_call(*args, **kwargs)

    with nn.intercept_methods(choose):
        yield


def measure_forced(name: str, scratch: Path) -> tuple[Nearness, Nearness]:
    """(bfloat16, float32 with weights that were rounded to bfloat16), both with the experts that the float32 model chooses.

    No expert flips: the first is what rounding does to the numbers, the second what of that is the weights' rounding.
    """
    case = load(name)
    tokens = jnp.asarray(case.inputs["tokens"], jnp.int32)
    (config, exact), (narrow_config, narrow) = (_load(name, dtype, scratch) for dtype in ("float32", "bfloat16"))
    experts = run_once(lambda v: {path: output[0].expert_ids for path, (_, output) in recorded(LongMoE(config), v, tokens)[1].items()
                                  if path.endswith("/router")})(exact)

    def nearness(config: ModelConfig, variables: Any) -> Nearness:
        with forced_routes(jax.tree.map(np.asarray, experts)):
            return Nearness.of(run_once(lambda v: LongMoE(config).apply(v, tokens).logits)(variables), case)

    return nearness(narrow_config, narrow), nearness(config, jax.tree.map(lambda x: x.astype(jnp.float32), narrow))


def measure_conditioning(name: str, scratch: Path, draws: int = 3) -> list[Figure]:
    """How far logits and gradients move in float64 when each weight moves by at most one float32 unit in the last place.

    Largest figures of the draws. It is the size of error that float32 arithmetic without a fault of its own has.
    """
    case = load(name)
    tokens = jnp.asarray(case.inputs["tokens"], jnp.int32)
    with jax.enable_x64(True):
        config, variables = _load(name, "float64", scratch)

        def loss_of(params: Any) -> tuple[Any, Any]:
            logits = LongMoE(config).apply({**variables, "params": params}, tokens).logits
            return _loss(logits, tokens), logits

        gradient = run_once(jax.grad(loss_of, has_aux=True))

        def tensors(params: Any) -> dict[str, np.ndarray]:
            gradients, logits = jax.tree.map(np.asarray, gradient(params))
            named = published(config, {**variables, "params": gradients})
            return {"logits": logits, **{f"grad.{t.name}": t.kind.save(part) for t, part in named if "e_score_correction_bias" not in t.name}}

        exact, figures = tensors(variables["params"]), []
        for seed in range(draws):
            draw = np.random.default_rng(seed)
            moved = jax.tree.map(lambda x: x * (1 + draw.integers(-1, 2, x.shape) * 2.0 ** -23), variables["params"])  # noqa: B023
            figures.append(compare(name, MOVED, tensors(moved), exact, None))
    return [max(quantity, key=lambda figure: figure.worst) for quantity in zip(*figures)]


def _load(name: str, dtype: str, scratch: Path) -> tuple[ModelConfig, Any]:
    """The case's model with each layer by its own name."""
    config, variables = load_hf(checkpoint(name, scratch), dtype=dtype)
    return dataclasses.replace(config, scan_layers=False), unstack_layers(config, variables)


def measure_model(name: str, dtype: str, scratch: Path) -> Agreement:
    """float32: everything that the case holds. bfloat16: logits, masked too; float64: those of them with a float64 reference."""
    case = load(name)
    kind = "kimi_linear" if name.startswith("kimi_linear") else "k3"
    with jax.enable_x64(dtype == "float64"):
        config, variables = _load(name, dtype, scratch)
        got, gradients = _forward(config, variables, case, with_gradients=dtype == "float32" and bool(case.gradients))
        if "masked_tokens" in case.inputs:
            got["masked_logits"] = _masked(config, variables, case)
        tokens = None
        if dtype == "float32" and "gen_prompt" in case.inputs:
            got["gen_logits"], tokens = _continue(config, variables, case)
    names = [n for n in got if dtype == "float32" or f"{n}_f64" in case.outputs or (dtype == "bfloat16" and n.endswith("logits"))]
    figures = compare(name, dtype, got, {n: case.best(n) for n in names}, bound(kind, dtype))
    if gradients:
        # expert_bias gets no gradient; the case stores it as it is, or not at all.
        want = {f"grad.{n}": g for n, g in case.gradients.items() if "e_score_correction_bias" not in n}
        assert set(want) == {n for n in gradients if "e_score_correction_bias" not in n}
        figures += compare(name, dtype, gradients, want, GRADIENT_BOUNDS[kind])
    if dtype == "float32":
        left = {n.removesuffix("_f64") for n in case.outputs if not n.startswith("dequantised.")} - set(got) - {"gen_tokens"}
        assert not left, f"{name}: not compared: {left}"
    routes = case.outputs.get("router_ids_sorted")
    return Agreement(figures, routes=1.0 if routes is None else float(np.mean(np.all(got["router_ids_sorted"] == routes, axis=-1))),
                     same_tokens=None if tokens is None else bool(np.array_equal(tokens, case.outputs["gen_tokens"])),
                     top1=Nearness.of(got["logits"], case).top1)


def _loss(logits: Any, tokens: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1))


def _forward(config: ModelConfig, variables: Any, case: Case, with_gradients: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    tokens = jnp.asarray(case.inputs["tokens"], jnp.int32)
    model = LongMoE(config)

    def loss_of(params: Any) -> tuple[Any, dict[str, Any]]:
        output, calls = recorded(model, {**variables, "params": params}, tokens)
        loss = _loss(output.logits, tokens)
        return loss, {"logits": output.logits, **({"loss": loss[None]} if "loss" in case.outputs else {}), **_inside(config, calls, case)}

    if not with_gradients:
        return jax.tree.map(np.asarray, run_once(loss_of)(variables["params"])[1]), {}
    (_, got), gradients = run_once(jax.value_and_grad(loss_of, has_aux=True))(variables["params"])
    named = published(config, {**variables, "params": gradients})
    return jax.tree.map(np.asarray, got), {f"grad.{tensor.name}": tensor.kind.save(part) for tensor, part in named}


def _inside(config: ModelConfig, calls: dict[str, tuple[Any, Any]], case: Case) -> dict[str, Any]:
    """The values between the layers that the case holds, under its names."""
    layers = [f"layer_{i:02d}" for i in range(config.num_layers)]
    depths = [calls[layer][1][0] for layer in layers]
    attention = [calls[f"{layer}/{mixer}"][1][0] for layer, mixer in zip(layers, config.mixers)]
    feed_forward = [calls[f"{layer}/mlp"][1] if i < config.dense_layers else calls[f"{layer}/moe"][1][0] for i, layer in enumerate(layers)]
    routings: list[Routing] = [calls[f"{layer}/moe/router"][1][0] for layer in layers[config.dense_layers:]]
    ids, weights = zip(*map(sorted_routes, routings))
    partials = [depth.partial for depth in depths]
    everything = {
        "embedding": lambda: calls["layer_00"][0][0].partial, "hidden_after_layer": lambda: jnp.stack(partials),
        "prefix_after_layer": lambda: jnp.stack(partials), "final_bank": lambda: jnp.stack(depths[-1].bank, axis=2),
        "attn_site_mix": lambda: jnp.stack([calls[f"{layer}/attn_norm"][0][0] for layer in layers]),
        "mlp_site_mix": lambda: jnp.stack([calls[f"{layer}/ffn_norm"][0][0] for layer in layers]),
        "attn_out": lambda: jnp.stack(attention), "ffn_out": lambda: jnp.stack(feed_forward), "output_mix": lambda: calls["final_norm"][0][0],
        "router_ids_sorted": lambda: jnp.stack(ids), "router_weights_sorted": lambda: jnp.stack(weights)}
    return {name: make() for name, make in everything.items() if name in case.outputs}


def _masked(config: ModelConfig, variables: Any, case: Case) -> np.ndarray:
    """Left-padded rows; padded positions are zero in the reference."""
    tokens, mask = (jnp.asarray(case.inputs[name], jnp.int32) for name in ("masked_tokens", "attention_mask"))
    logits = run_once(lambda v: LongMoE(config).apply(v, tokens, mask).logits)(variables)
    return np.asarray(logits * mask[..., None])


def _continue(config: ModelConfig, variables: Any, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Logits of each step of cached decoding along the reference's tokens, and what `generate` chooses by itself."""
    model = LongMoE(config)
    prompt, follow = (jnp.asarray(x, jnp.int32) for x in (case.inputs["gen_prompt"], case.outputs["gen_tokens"]))
    steps = follow.shape[1]

    def run(variables: Any) -> Any:
        first = model.apply(variables, prompt, cache=init_cache(config, prompt.shape[0], prompt.shape[1] + steps))

        def step(cache: Any, token: Any) -> tuple[Any, Any]:
            output = model.apply(variables, token[:, None], cache=cache)
            return output.cache, output.logits[:, 0]

        _, rest = jax.lax.scan(step, first.cache, follow.T[:-1])
        return jnp.concatenate([first.logits[:, -1:], jnp.moveaxis(rest, 0, 1)], axis=1)

    return np.asarray(run_once(run)(variables)), np.asarray(generate(model, variables, prompt, max_new_tokens=steps))


MODELS = ("kimi_linear", "k3")
