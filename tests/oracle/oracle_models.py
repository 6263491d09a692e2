"""Runs the model cases from their checkpoints, and measures logits, per-layer values, routes, gradients and decoding."""
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle_layers import bound, recorded, sorted_routes
from oracle_vectors import GRADIENT_BOUNDS, Case, Figure, checkpoint, compare, load

from longmoe import LongMoE, generate, init_cache, load_hf, unstack_layers
from longmoe.configs import ModelConfig
from longmoe.interop.hf import published
from longmoe.model.lm import RUN_ONCE
from longmoe.model.router import Routing

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


def measure_model(name: str, dtype: str, scratch: Path) -> Agreement:
    """float32: everything that the case holds. bfloat16: logits, masked too; float64: those of them with a float64 reference."""
    case = load(name)
    kind = "kimi_linear" if name.startswith("kimi_linear") else "k3"
    with jax.enable_x64(dtype == "float64"):
        config, variables = load_hf(checkpoint(name, scratch), dtype=dtype)
        variables = unstack_layers(config, variables)
        config = dataclasses.replace(config, scan_layers=False)         # each layer by its own name
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
    logits = np.asarray(case.best("logits"))
    routes = case.outputs.get("router_ids_sorted")
    return Agreement(figures, routes=1.0 if routes is None else float(np.mean(np.all(got["router_ids_sorted"] == routes, axis=-1))),
                     same_tokens=None if tokens is None else bool(np.array_equal(tokens, case.outputs["gen_tokens"])),
                     top1=float(np.mean(np.argmax(np.asarray(got["logits"], np.float64), -1) == np.argmax(logits, -1))))


def _forward(config: ModelConfig, variables: Any, case: Case, with_gradients: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    tokens = jnp.asarray(case.inputs["tokens"], jnp.int32)
    model = LongMoE(config)

    def loss_of(params: Any) -> tuple[Any, dict[str, Any]]:
        output, calls = recorded(model, {**variables, "params": params}, tokens)
        logp = jax.nn.log_softmax(output.logits[:, :-1])
        loss = -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))
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
