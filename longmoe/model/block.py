"""One decoder layer, and the super-block that is scanned over depth."""
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from longmoe.configs import ModelConfig
from longmoe.model.attn_residuals import DepthMix
from longmoe.model.cache import LayerCache
from longmoe.model.kda import KDA
from longmoe.model.layers import FeedForward, RMSNorm
from longmoe.model.mla import MLA
from longmoe.model.moe import MoE
from longmoe.parallel.mesh import constrain
from longmoe.shapes import Array, Float, Hidden, Int


@struct.dataclass
class Depth:
    """What a layer reads from the layers before it.

    bank: finished depth sources (block: the embedding and each finished block's sum; full: every sublayer's output; plain: none).
    partial: the running sum of the present block (plain: the residual stream); None where a block opens.
    """
    bank: tuple[Hidden, ...]
    partial: Hidden | None


@struct.dataclass
class LayerAux:
    """By-products of a layer."""
    router_stats: Any
    """The balancer's integer sums; None in a dense layer."""
    cache: LayerCache | None
    depth_weights: Any
    """{"attn": [S], "ffn": [S]}: each source's mean weight over valid tokens; None unless asked for."""
    max_logits: Float[Array, "H"] | None
    """Largest attention logit of each head of an MLA layer; None unless asked for."""
    balance_loss: Float[Array, ""] | None
    """The balance loss of an MoE layer, summed over valid tokens; None under balancers that have none."""


class DecoderLayer(nn.Module):
    """Mixer and feed-forward, each reading its own mixture over depth."""
    config: ModelConfig
    mixer: str
    is_dense: bool
    return_depth_weights: bool = False
    return_max_logits: bool = False

    @nn.compact
    def __call__(self, depth: Depth, skip_partial: Array | None, runs: Int[Array, "B T"] | None,
                 cache: LayerCache | None) -> tuple[Depth, LayerAux]:
        """skip_partial (bool scalar): leaves `partial`, then zero, out of the first mixture: this layer opens a block inside a scan."""
        config = self.config
        h, attn_weights = self._read("attn_residual", depth, skip_partial, runs)
        normed = RMSNorm(config, config.norm_eps, name="attn_norm")(h)
        max_logits = balance_loss = None
        if self.mixer == "kda":
            a, cache = KDA(config, name="kda")(normed, runs, cache)
        else:
            a, cache, max_logits = MLA(config, self.return_max_logits, name="mla")(normed, runs, cache)
        depth = self._write(depth, a)
        h, ffn_weights = self._read("ffn_residual", depth, None, runs)
        normed = RMSNorm(config, config.norm_eps, name="ffn_norm")(h)
        if self.is_dense:
            f, stats = FeedForward(config, config.dense_dim, name="mlp")(normed), None
        else:
            f, stats, balance_loss = MoE(config, name="moe")(normed, runs)
        weights = {"attn": attn_weights, "ffn": ffn_weights} if self.return_depth_weights else None
        return self._write(depth, f), LayerAux(router_stats=stats, cache=cache, depth_weights=weights, max_logits=max_logits, balance_loss=balance_loss)

    def _read(self, name: str, depth: Depth, skip_partial: Array | None, runs: Array | None) -> tuple[Hidden, Array | None]:
        if self.config.residual.kind == "plain":
            return depth.partial, None
        sources = depth.bank if depth.partial is None else (*depth.bank, depth.partial)
        h, weights = DepthMix(self.config, name=name)(sources, skip_partial)
        return h, mean_weights(weights, runs) if self.return_depth_weights else None

    def _write(self, depth: Depth, output: Hidden) -> Depth:
        output = constrain(output)
        if self.config.residual.kind == "full":
            return Depth(bank=(*depth.bank, output), partial=None)
        return depth.replace(partial=output if depth.partial is None else depth.partial + output)


def mean_weights(weights: Array, runs: Array | None) -> Array:
    """Mean of [B, T, S] over valid tokens."""
    valid = jnp.ones(weights.shape[:2]) if runs is None else (runs > 0).astype(weights.dtype)
    return jnp.einsum("bts,bt->s", weights, valid) / jnp.maximum(jnp.sum(valid), 1)


def remat_layer(config: ModelConfig, in_scan: bool) -> type[DecoderLayer]:
    """DecoderLayer under the config's rematerialisation policy. The chosen experts are always kept, so that recomputing cannot change a route."""
    if config.remat == "none":
        return DecoderLayer
    names = jax.checkpoint_policies.save_only_these_names("router_ids")
    if config.remat == "save_matmuls":
        names = jax.checkpoint_policies.save_from_both_policies(names, jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return nn.remat(DecoderLayer, policy=names, prevent_cse=not in_scan)


class SuperBlock(nn.Module):
    """The layers of one period; the body of nn.scan, whose carry is the partial sum alone. The bank is closed over, never carried."""
    config: ModelConfig
    kinds: tuple[tuple[str, bool], ...]
    """(mixer, is_dense) of each layer."""
    opens_block: bool
    """Whether the first repeat opens a depth block: then `is_first` tells it apart."""
    return_depth_weights: bool
    return_max_logits: bool

    @nn.compact
    def __call__(self, partial: Hidden, is_first: Array, caches: Any, bank: tuple[Hidden, ...],
                 runs: Array | None) -> tuple[Hidden, list[LayerAux]]:
        depth, auxiliaries = Depth(bank=bank, partial=partial), []
        layer_class = remat_layer(self.config, in_scan=True)
        for step, (mixer, is_dense) in enumerate(self.kinds):
            layer = layer_class(self.config, mixer, is_dense, self.return_depth_weights, self.return_max_logits, name=f"step_{step}")
            skip = is_first if self.opens_block and step == 0 and self.config.residual.kind == "block" else None
            depth, aux = layer(depth, skip, runs, None if caches is None else caches[step])
            auxiliaries.append(aux)
        return depth.partial, auxiliaries
