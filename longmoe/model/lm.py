"""The language model: embedding, depth loop, head; its output, its variables and its caches."""
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from longmoe.configs import ModelConfig
from longmoe.model.attn_residuals import DepthMix
from longmoe.model.block import Depth, LayerAux, SuperBlock, cut, in_pieces, is_cut, join, mean_weights, over_pieces, remat_layer, sources
from longmoe.model.cache import LayerCache, after_tokens, init_layer_cache, valid_tokens
from longmoe.model.depth import Group, flat_plan, plan
from longmoe.model.layers import RMSNorm, float_dtype, precision, start_from
from longmoe.parallel.vocabulary import lookup
from longmoe.shapes import Array, Float, Hidden, SegmentIds, Tokens
from pallas_kernels import document_runs

Variables = Mapping[str, Any]
RUN_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options of a program that runs once, such as initialisation: compiling it well takes longer than running it badly."""


@struct.dataclass
class ModelOutput:
    """What the model returns."""
    logits: Float[Array, "B T V"] | None
    """float32; None with return_hidden."""
    router_stats: Any
    """Integer sums of each MoE layer, laid out like router_state: the leaf expert_bias there is a Statistics here."""
    hidden: Hidden | None = None
    """Normalised input of the head; with return_hidden."""
    cache: Any = None
    """The caches after these tokens; with cache."""
    depth_weights: dict[str, Float[Array, "S"]] | None = None
    """Site name -> mean weight of each depth source over valid tokens; with return_depth_weights."""
    max_logits: Any = None
    """Largest attention logit of each head, float32 [H], laid out like params: the leaf is at the layer's `mla`; with return_max_logits."""
    balance_loss: Float[Array, ""] | None = None
    """Summed over valid tokens and MoE layers, float32; with balancer auxiliary_loss."""


class LongMoE(nn.Module):
    """The text model as a pure function of its variables {"params", "router_state"}."""
    model_config: ModelConfig

    def __post_init__(self) -> None:
        _check_config(self.model_config)
        super().__post_init__()

    @nn.compact
    def __call__(self, tokens: Tokens, segment_ids: SegmentIds | None = None, *, cache: Any = None, return_hidden: bool = False,
                 return_depth_weights: bool = False, return_max_logits: bool = False) -> ModelOutput:
        """tokens int32 [B, T]; segment_ids int32 [B, T], 0 = padding, None = one document a row.

        cache: from init_cache or an earlier call; every row is then one document and segment_ids only marks padding (as 0) behind its tokens.
        ValueError for other shapes and dtypes, and for ids outside the vocabulary where they are known: inside a compiled function their rows are NaN.
        """
        config = self.model_config
        _check_tokens(tokens, segment_ids, config.vocab_size)
        if return_max_logits and cache is not None:
            raise ValueError("return_max_logits: got a cache too, wanted a pass without one; largest logits are a training pass's")
        asked = dict(return_depth_weights=return_depth_weights, return_max_logits=return_max_logits)
        runs = None if segment_ids is None else document_runs(segment_ids)
        table = self.param("embedding", nn.initializers.normal(config.init_std), (config.vocab_size, config.width), jnp.dtype(config.param_dtype))
        embedded = lookup(table, tokens).astype(config.dtype)
        if cache is None and not return_depth_weights and in_pieces(config, tokens.shape[1]):
            embedded = cut(embedded, config.token_chunk)
        depth = Depth(bank=(embedded,) if config.residual.kind == "full" else (), partial=None if config.residual.kind == "full" else embedded)
        auxiliaries = {}
        for block in plan(config):
            if config.residual.kind == "block":
                depth = Depth(bank=(*depth.bank, depth.partial), partial=None)
            for group in block:
                run = self._run_layer if group.repeats == 1 else self._run_scanned
                depth, auxiliaries[group.name] = run(group, depth, runs, None if cache is None else cache[group.name], asked)
        hidden, output_weights = self._output(depth, runs, return_depth_weights)
        head_init = start_from(table.T) if config.init == "mimetic" else nn.initializers.normal(config.init_std)
        head = self.param("lm_head", head_init, (config.width, config.vocab_size), jnp.dtype(config.param_dtype))
        weights = _depth_weights(config, auxiliaries, output_weights) if return_depth_weights and config.residual.kind != "plain" else None
        return ModelOutput(
            logits=None if return_hidden else project(config, hidden, head), hidden=hidden if return_hidden else None,
            router_stats=_by_layer(auxiliaries, _stats_at_bias), depth_weights=weights, balance_loss=_balance_loss(auxiliaries),
            max_logits=_by_layer(auxiliaries, lambda aux: None if aux.max_logits is None else {"mla": aux.max_logits}) if return_max_logits else None,
            cache=None if cache is None else _after_tokens(cache, auxiliaries, tokens, segment_ids))

    def _run_layer(self, group: Group, depth: Depth, runs: Array | None, cache: Any, asked: Mapping[str, bool]) -> tuple[Depth, LayerAux]:
        mixer, is_dense = self._kind(group.start)
        layer = remat_layer(self.model_config, in_scan=False, depth=depth)(self.model_config, mixer, is_dense, **asked, name=group.name)
        return layer(depth, None, runs, cache)

    def _run_scanned(self, group: Group, depth: Depth, runs: Array | None, caches: Any, asked: Mapping[str, bool]) -> tuple[Depth, list[LayerAux]]:
        kinds = tuple(self._kind(group.start + step) for step in range(group.period))
        scanned = nn.scan(SuperBlock, variable_axes={"params": 0, "router_state": 0}, split_rngs={"params": True},
                          in_axes=(0, 0, nn.broadcast, nn.broadcast), length=group.repeats)
        opens = depth.partial is None
        body = scanned(self.model_config, kinds, opens, **asked, name=group.name)
        partial = jnp.zeros_like(depth.bank[-1]) if opens else depth.partial
        partial, auxiliaries = body(partial, jnp.arange(group.repeats) == 0, caches, depth.bank, runs)
        return depth.replace(partial=partial), auxiliaries

    def _kind(self, layer: int) -> tuple[str, bool]:
        return self.model_config.mixers[layer], layer < self.model_config.dense_layers

    def _output(self, depth: Depth, runs: Array | None, return_depth_weights: bool) -> tuple[Hidden, Array | None]:
        """The head's input, and the last mixture's mean weights where they are asked for."""
        if is_cut(depth):
            body = lambda model, carry, piece, rows: (carry, model._last_mixture(piece)[0])
            return join(over_pieces(self.model_config, body)(self, None, sources(depth), None)[1]), None
        hidden, weights = self._last_mixture(sources(depth))
        return hidden, mean_weights(weights, runs) if return_depth_weights and weights is not None else None

    def _last_mixture(self, sources: tuple[Hidden, ...]) -> tuple[Hidden, Array | None]:
        config, weights = self.model_config, None
        h = sources[-1]
        if config.residual.kind != "plain":
            h, weights = DepthMix(config, name="output_residual")(sources)
        return RMSNorm(config, config.norm_eps, name="final_norm")(h), weights


def project(config: ModelConfig, hidden: Float[Array, "... D"], head: Float[Array, "D V"]) -> Float[Array, "... V"]:
    """Logits in float32 from operands of the model's dtype."""
    return jnp.matmul(hidden, head.astype(hidden.dtype), precision=precision(config), preferred_element_type=float_dtype(config))


def _check_config(model_config: Any) -> None:
    if not isinstance(model_config, ModelConfig):
        inside = ", which is its .model" if isinstance(getattr(model_config, "model", None), ModelConfig) else ""
        raise ValueError(f"model_config: got a {type(model_config).__name__}, wanted a ModelConfig{inside}")


def init_variables(model_config: ModelConfig, key: Array) -> dict[str, Any]:
    """{"params", "router_state"} of a fresh model, in the layout that model_config.scan_layers asks for. ValueError for what is no config or no key."""
    _check_config(model_config)
    if not isinstance(key, jax.Array):
        raise ValueError(f"key: got {key!r}, wanted a key such as jax.random.key(0)")
    with random_numbers_by_kernel():
        return _init_variables(model_config, key)


@functools.partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _init_variables(model_config: ModelConfig, key: Array) -> dict[str, Any]:
    return LongMoE(model_config).init(key, jnp.zeros((1, 8), jnp.int32))


@contextlib.contextmanager
def random_numbers_by_kernel(use: bool = True) -> Iterator[None]:
    """What is lowered inside draws the same bits, on a GPU with one kernel a draw where there are some hundred operations else.

    For programs that draw a model's arrays once, where compiling is what takes the time: a fifth of it is left. Only on one device: the kernel would draw
    whole arrays on each. The setting is the process's: no other thread should lower anything meanwhile.
    """
    name = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, name)
    jax.config.update(name, use or before)
    try:
        yield
    finally:
        jax.config.update(name, before)


def init_cache(model_config: ModelConfig, batch: int, capacity: int) -> dict[str, Any]:
    """Empty caches of all layers for `batch` rows of at most `capacity` tokens, laid out by the depth plan."""
    caches: dict[str, Any] = {}
    for group in flat_plan(model_config):
        steps = [init_layer_cache(model_config, model_config.mixers[group.start + step], batch, capacity) for step in range(group.period)]
        caches[group.name] = steps[0] if group.repeats == 1 else [
            jax.tree.map(lambda x: jnp.broadcast_to(x, (group.repeats, *x.shape)), step) for step in steps]  # noqa: B023
    return caches


def _check_tokens(tokens: Array, segment_ids: Array | None, vocab_size: int) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: got {tokens.dtype}{list(tokens.shape)}, wanted integers [B, T]")
    if not isinstance(tokens, jax.core.Tracer) and tokens.size and getattr(tokens, "is_fully_addressable", True):
        ids = np.asarray(tokens)                                        # a constant of a program that is being traced is known too
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"tokens: got ids from {low} to {high}, wanted 0 to {vocab_size - 1}, the model's vocabulary")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(f"segment_ids: got shape {list(segment_ids.shape)}, wanted that of tokens, {list(tokens.shape)}")


def _after_tokens(cache: Any, auxiliaries: Mapping[str, Any], tokens: Tokens, segment_ids: SegmentIds | None) -> dict[str, Any]:
    """All layers' caches behind `tokens`."""
    valid = valid_tokens(tokens, segment_ids)
    one = lambda before, aux: after_tokens(before, aux.cache, valid)
    return {name: jax.tree.map(one, cache[name], aux, is_leaf=lambda x: isinstance(x, LayerCache)) for name, aux in auxiliaries.items()}


def _by_layer(auxiliaries: Mapping[str, Any], pick: Callable[[LayerAux], Any]) -> dict[str, Any]:
    """What `pick` takes from each layer, laid out like the variables; layers that it takes None from are left out."""
    result: dict[str, Any] = {}
    for name, aux in auxiliaries.items():
        if isinstance(aux, LayerAux):
            if (picked := pick(aux)) is not None:
                result[name] = picked
        elif steps := {f"step_{i}": picked for i, step in enumerate(aux) if (picked := pick(step)) is not None}:
            result[name] = steps
    return result


def _stats_at_bias(aux: LayerAux) -> dict[str, Any] | None:
    """A layer's statistics under the path of its bias in router_state."""
    return None if aux.router_stats is None else {"moe": {"router": {"expert_bias": aux.router_stats}}}


def _balance_loss(auxiliaries: Mapping[str, Any]) -> Array | None:
    losses = [jnp.sum(loss) for loss in jax.tree.leaves(_by_layer(auxiliaries, lambda aux: aux.balance_loss))]
    return functools.reduce(jnp.add, losses) if losses else None


def _depth_weights(config: ModelConfig, auxiliaries: Mapping[str, Any], output: Array) -> dict[str, Array]:
    sites = {}
    for group in flat_plan(config):
        for layer, repeat, step in group.layers():
            weights = auxiliaries[group.name].depth_weights if group.repeats == 1 else jax.tree.map(
                lambda x, repeat=repeat: x[repeat], auxiliaries[group.name][step].depth_weights)
            for site, value in weights.items():
                sites[f"layer_{layer:02d}/{site}"] = value
    return sites | {"output": output}
