"""How large is what each sublayer reads and writes, and the loss's gradient with respect to it?

The model is asked from outside: `flax.linen.intercept_methods` adds a zero to what every mixer and feed-forward returns and notes it down, with the input of
the norm before it. The gradient of the loss with respect to that zero is the gradient with respect to the sublayer's output, along all paths by which
later layers read it: through the sum of a plain residual, or through every mixture of attention residuals. Gradients of parameters, grouped by layer, would
mix this up with the size of the layer's own activations; and `perturb` or `sow` would have to be written into the model.
"""
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.model.depth import unstack_layers
from longmoe.model.lm import RUN_ONCE, LongMoE

Sites = dict[str, jax.Array]
SUBLAYERS = {"kda": "attn", "mla": "attn", "mlp": "ffn", "moe": "ffn"}
NORMS = {"attn_norm": "attn", "ffn_norm": "ffn"}


class Depths(NamedTuple):
    """Site ("layer_03/attn", "layer_03/ffn") -> [B, T, D]; sorted by name they are in the order of depth."""
    inputs: Sites
    """What the sublayer reads, before its norm."""
    outputs: Sites
    gradients: Sites
    """Of the mean loss with respect to `outputs`."""


@functools.cache
def make_probe(model_config: ModelConfig) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Depths]:
    """(variables in either layout, batch) -> Depths, compiled once for each batch shape. Layers are not scanned here: each has sites of its own."""
    model = LongMoE(dataclasses.replace(model_config, scan_layers=False, remat="none"))

    def loss(zeros: Sites, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> tuple[jax.Array, tuple[Sites, Sites]]:
        inputs, outputs = {}, {}

        def note(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: nn.module.InterceptorContext) -> Any:
            path, result = context.module.path, call(*args, **kwargs)
            if context.method_name != "__call__" or len(path) != 2:
                return result
            layer, part = path
            if part in NORMS:
                inputs[f"{layer}/{NORMS[part]}"] = args[0]
            elif part in SUBLAYERS:
                site = f"{layer}/{SUBLAYERS[part]}"
                output, *others = result if isinstance(result, tuple) else (result,)
                outputs[site] = output + zeros[site]
                return (outputs[site], *others) if isinstance(result, tuple) else outputs[site]
            return result

        with nn.intercept_methods(note):
            logits = model.apply(variables, batch["tokens"], batch["segment_ids"]).logits
        nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        weights = batch["loss_weights"]
        return jnp.sum(nll * weights) / jnp.sum(weights), (inputs, outputs)

    @functools.partial(jax.jit, compiler_options=RUN_ONCE)
    def probe(variables: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> Depths:
        zero = jnp.zeros((*batch["tokens"].shape, model_config.width), jnp.dtype(model_config.dtype))
        zeros = {f"layer_{layer:02d}/{kind}": zero for layer in range(model_config.num_layers) for kind in ("attn", "ffn")}
        gradients, (inputs, outputs) = jax.grad(loss, has_aux=True)(zeros, unstack_layers(model_config, variables), batch)
        return Depths(inputs, outputs, gradients)

    return lambda variables, batch: probe(variables, {name: jnp.asarray(batch[name]) for name in ("tokens", "targets", "segment_ids", "loss_weights")})


def depth_norms(depths: Depths, segment_ids: np.ndarray) -> dict[str, list[float]]:
    """One number a sublayer in the order of depth: root mean square of its input and of its output over valid tokens and channels, and the Euclidean norm
    of the gradient over all of them."""
    valid = np.asarray(segment_ids)[..., None] > 0
    flat = lambda sites, name: np.where(valid, np.asarray(sites[name], np.float64), 0)
    rms = lambda sites: [float(np.sqrt(np.square(flat(sites, name)).sum() / (valid.sum() * sites[name].shape[-1]))) for name in sorted(sites)]
    return dict(input_rms=rms(depths.inputs), output_rms=rms(depths.outputs),
                gradient_norm=[float(np.sqrt(np.square(flat(depths.gradients, name)).sum())) for name in sorted(depths.gradients)])
