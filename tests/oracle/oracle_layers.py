"""Runs the layer cases through the model's own modules and functions, and measures them."""
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from oracle_vectors import BOUNDS, FLOAT64_BOUND, GRADIENT_BOUNDS, Case, Figure, compare, load

from longmoe.configs import KDAConfig, ModelConfig
from longmoe.interop.hf_config import from_hf
from longmoe.interop.hf_names import KIMI_K3, KIMI_LINEAR, Family, Tensor, expand
from longmoe.model.attn_residuals import mix
from longmoe.model.cache import after_tokens, init_layer_cache
from longmoe.model.kda import KDA
from longmoe.model.lm import RUN_ONCE
from longmoe.model.mla import MLA
from longmoe.model.moe import MoE
from pallas_kernels import kda
from pallas_kernels.gated_activation.xla import situ_glu
from pallas_kernels.kda.gates import log_decay
from pallas_kernels.testing import outputs_and_gradients


def bound(kind: str, dtype: str, gradient: bool = False) -> float | None:
    return {"float32": (GRADIENT_BOUNDS if gradient else BOUNDS)[kind], "float64": FLOAT64_BOUND, "bfloat16": None}[dtype]


def recorded(module: nn.Module, variables: Any, *arguments: Any, **keywords: Any) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """module.apply, and (arguments, output) of every call inside it under "path.method" ("path" alone for __call__)."""
    calls: dict[str, tuple[Any, Any]] = {}

    def record(next_call: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        output = next_call(*args, **kwargs)
        method = "" if context.method_name == "__call__" else f".{context.method_name}"
        calls["/".join(context.module.path) + method] = (args, output)
        return output

    with nn.intercept_methods(record):
        output = module.apply(variables, *arguments, **keywords)
    return output, calls


def module_tensors(family: Family, part: str, shapes: Any) -> list[Tensor]:
    """The table's tensors of one part of a layer (kda, mla, moe), for a module whose init has these shapes."""
    flat = {(path[0], part, *path[1:]): shape for path, shape in traverse_util.flatten_dict(shapes).items()}
    config = ModelConfig()                                              # its queries have a latent, as the cases' have
    return [tensor for rule in family.layer if rule.path.startswith(f"{part}/") and rule.holds(config) for tensor in expand(rule, "", (), (), flat)]


def to_variables(tensors: list[Tensor], weights: Mapping[str, np.ndarray], shapes: Any) -> Any:
    """Published weights (names behind self_attn. or block_sparse_moe.) as the module's variables."""
    flat = {path: np.zeros(shape.shape, np.float64) for path, shape in traverse_util.flatten_dict(shapes).items()}
    for tensor in tensors:
        value = weights[tensor.name.split(".", 1)[1]].reshape(tensor.shape)
        flat[(tensor.leaf[0], *tensor.leaf[2:])][tensor.index] = tensor.kind.load(value, tensor.part_shape)
    return traverse_util.unflatten_dict(flat)


def to_published(tensors: list[Tensor], variables: Any) -> dict[str, np.ndarray]:
    flat = traverse_util.flatten_dict(variables)
    return {f"w.{tensor.name.split('.', 1)[1]}": tensor.kind.save(np.asarray(flat[(tensor.leaf[0], *tensor.leaf[2:])])[tensor.index])
            for tensor in tensors}


def measure_module(case: Case, kind: str, dtype: str, module: nn.Module, family: Family, part: str,
                   extra: Callable[[Any, Any], dict[str, Any]]) -> list[Figure]:
    """Output, gradients and what `extra(variables, x)` computes, against the case."""
    x = case.inputs["x"]
    with jax.enable_x64(dtype == "float64"):
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(x.shape, jnp.float32))
        tensors = module_tensors(family, part, shapes)
        variables = to_variables(tensors, case.weights, shapes)
        cast = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)
        state = {name: cast(tree) for name, tree in variables.items() if name != "params"}

        @functools.partial(jax.jit, compiler_options=RUN_ONCE)
        def run(params: Any, x: Any, cotangent: Any) -> tuple[Any, Any, Any]:
            out, pull = jax.vjp(lambda params, x: module.apply({"params": params, **state}, x)[0], params, x)
            return out, pull(cotangent.astype(out.dtype)), extra({"params": params, **state}, x)

        out, (d_params, d_x), others = jax.tree.map(np.asarray, run(cast(variables["params"]), cast(x), cast(case.cotangents["out"])))
    want = {"out": case.best("out"), **{name: case.best(name) for name in others}}
    figures = compare(case.name, dtype, {"out": out, **others}, want, bound(kind, dtype))
    if dtype != "float32":                                              # the other references are float32 themselves
        return [figure for figure in figures if f"{figure.quantity}_f64" in case.outputs]
    got = {f"grad.{name}": value for name, value in to_published([t for t in tensors if t.leaf[0] == "params"], {"params": d_params}).items()} | {
        "grad.x": d_x}
    gradients = {f"grad.{name}": value.reshape(got[f"grad.{name}"].shape) for name, value in case.gradients.items()}
    assert set(gradients) == set(got)
    return figures + compare(case.name, dtype, got, gradients, bound(kind, dtype, gradient=True))


def decode(module: nn.Module, variables: Any, x: Any, cache: Any) -> tuple[Any, Any]:
    """The outputs of x's tokens one at a time, and the cache after them."""
    def step(cache: Any, token: Any) -> tuple[Any, Any]:
        y, found, *_ = module.apply(variables, token[:, None], None, cache)
        return after_tokens(cache, found, jnp.ones((len(token), 1), jnp.int32)), y[:, 0]

    cache, outputs = jax.lax.scan(step, cache, jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(outputs, 0, 1), cache


def measure_kda_layer(name: str, dtype: str) -> list[Figure]:
    """glm5_kda: the bounded gate with a low-rank output gate. The names are Kimi's, A_log without padding."""
    case = load(name)
    shape = case.config
    config = ModelConfig(width=shape["hidden_size"], dtype=dtype, param_dtype=dtype, norm_eps=shape["rms_norm_eps"], kda=KDAConfig(
        num_heads=shape["H"], head_dim=shape["D"], conv_width=shape["conv"], lower_bound=shape["linear_lower_bound"], output_gate="low_rank"))
    module = KDA(config)
    tail = case.outputs["decode_tail"].shape[1]

    def extra(variables: Any, x: Any) -> dict[str, Any]:
        cache = init_layer_cache(config, "kda", x.shape[0], 0)
        (_, after), calls = recorded(module, variables, x, None, cache)
        q, k, v, _ = calls["._convolved"][1]
        heads = (*x.shape[:2], shape["H"], shape["D"])
        params, raw = variables["params"], calls["f_b_proj"][1].reshape(heads).astype(jnp.promote_types(dtype, jnp.float32))
        g = log_decay(raw, "bounded", params["a_log"], params["dt_bias"], shape["linear_lower_bound"])
        core, _ = kda(q.reshape(heads), k.reshape(heads), v.reshape(heads), g, calls["b_proj"][1].astype(g.dtype), beta_logits=True, qk_l2norm=True,
                      lower_bound=shape["linear_lower_bound"])
        _, cache = module.apply(variables, x[:, :-tail], None, cache)
        steps, _ = decode(module, variables, x[:, -tail:], cache)
        return {"log_decay": g, "core_attn_out": core, "after_gated_norm": calls["._gated_norm"][1], "final_state": after.state,
                "decode_tail": steps}

    return measure_module(case, "glm5_kda", dtype, module, KIMI_LINEAR, "kda", extra)


def measure_mla(name: str, dtype: str) -> list[Figure]:
    case = load(name)
    config = _k3_config(case, dtype)
    module, rank = MLA(config), config.mla.kv_lora_rank

    def extra(variables: Any, x: Any) -> dict[str, Any]:
        batch, tokens, _ = x.shape
        _, calls = recorded(module, variables, x)
        empty = init_layer_cache(config, "mla", batch, tokens)
        _, latents, _ = module.apply(variables, x[:, :-5], None, empty)
        cache = after_tokens(empty, latents, jnp.ones(latents.shape[:2], jnp.int32))
        steps, cache = decode(module, variables, x[:, -5:], cache)
        return {"before_o_proj": calls["o_proj"][0][0], "cache_latent_normed": cache.latent[..., :rank], "cache_k_pe": cache.latent[..., rank:],
                "decode_last5": steps}

    return measure_module(case, "gated_mla", dtype, module, KIMI_K3, "mla", extra)


def measure_moe(name: str, dtype: str) -> list[Figure]:
    """Routes are compared first: another expert is no rounding error."""
    case = load(name)
    config = _k3_config(case, dtype)
    module = MoE(config)

    def extra(variables: Any, x: Any) -> dict[str, Any]:
        _, calls = recorded(module, variables, x)
        ids, weights = sorted_routes(calls["router"][1][0])
        return {"router_ids_sorted": ids, "router_weights_sorted": weights, "latent_aggregate": calls["latent_norm"][0][0].reshape(-1, config.moe.latent_dim)}

    figures = measure_module(case, "latent_moe", dtype, module, KIMI_K3, "moe", extra)
    assert dtype == "bfloat16" or all(figure.worst == 0 for figure in figures if figure.quantity == "router_ids_sorted"), "other experts were chosen"
    return figures


def sorted_routes(routing: Any) -> tuple[Any, Any]:
    """(ids, weights) [N, K] with ascending ids, as the vectors store them."""
    ids, weights = (x.reshape(-1, x.shape[-1]) for x in (routing.expert_ids, routing.combine_weights))
    order = jnp.argsort(ids, axis=-1)
    return jnp.take_along_axis(ids, order, -1), jnp.take_along_axis(weights, order, -1)


def _k3_config(case: Case, dtype: str) -> ModelConfig:
    _, config = from_hf({"model_type": "kimi_k3", "text_config": case.config, "dtype": dtype})
    return config


def measure_attnres(name: str, dtype: str) -> list[Figure]:
    case = load(name)

    def run(bank: Any, prefix: Any, res_norm: Any, res_proj: Any) -> tuple[Any, Any]:
        sources = [*jnp.unstack(bank, axis=1), prefix]
        return mix(sources, res_proj[0], res_norm, case.config["eps"])

    cotangents = (case.cotangents["out"], np.zeros_like(case.outputs["probs"]))
    (out, probs), gradients = outputs_and_gradients(run, case.inputs | case.weights, cotangents, jnp.dtype(dtype))
    return _all(case, "attnres_mix", dtype, {"out": out, "probs": probs}, gradients)


def measure_situ(name: str, dtype: str) -> list[Figure]:
    case = load(name)
    run = lambda gate, up: situ_glu(gate, up, case.config["beta"], case.config["linear_beta"])
    out, gradients = outputs_and_gradients(run, case.inputs, case.cotangents["out"], jnp.dtype(dtype))
    return _all(case, "situ_glu", dtype, {"out": out}, gradients)


def _all(case: Case, kind: str, dtype: str, outputs: Mapping[str, Any], gradients: Mapping[str, Any]) -> list[Figure]:
    figures = compare(case.name, dtype, outputs, case.outputs, bound(kind, dtype))
    return figures + compare(case.name, dtype, {f"grad.{n}": g for n, g in gradients.items()}, {f"grad.{n}": g for n, g in case.gradients.items()},
                             bound(kind, dtype, gradient=True))


LAYERS = {"glm5_kda": measure_kda_layer, "gated_mla": measure_mla, "latent_moe": measure_moe, "attnres_mix": measure_attnres, "situ_glu": measure_situ}
