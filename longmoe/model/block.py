"""One decoder layer, whole rows or piece by piece, and the super-block that is scanned over depth."""
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from longmoe.configs import ModelConfig
from longmoe.model.attn_residuals import DepthMix
from longmoe.model.cache import KDACache, KDACarry, LatentRow, LayerCache, init_carry
from longmoe.model.kda import KDA
from longmoe.model.layers import FeedForward, RMSNorm
from longmoe.model.mla import MLA
from longmoe.model.moe import MoE
from longmoe.parallel.mesh import axis_size, constrain
from longmoe.shapes import Array, Float, Hidden, Int


@struct.dataclass
class Depth:
    """What a layer reads from the layers before it: hidden states [B, T, D], or cut into pieces (`cut`) from the embedding to the last mixture.

    bank: finished depth sources (block: the embedding and each finished block's sum; full: every sublayer's output; plain: none).
    partial: the running sum of the present block (plain: the residual stream); None where a block opens.
    """
    bank: tuple[Hidden, ...]
    partial: Hidden | None


Piece = tuple[Depth, Array | None, Array]
"""Of rows: what is read over depth, the documents, the token that it begins with."""


@struct.dataclass
class LayerAux:
    """By-products of a layer."""
    router_stats: Any
    """The balancer's integer sums; None in a dense layer."""
    cache: KDACache | KDACarry | Float[Array, "B T R"] | None
    """What the mixer hands on: memory after the tokens, or in an MLA layer the tokens' latents; None without a cache."""
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

    def setup(self) -> None:
        config = self.config
        if config.residual.kind != "plain":
            self.attn_residual, self.ffn_residual = DepthMix(config), DepthMix(config)
        self.attn_norm, self.ffn_norm = RMSNorm(config, config.norm_eps), RMSNorm(config, config.norm_eps)
        if self.mixer == "kda":
            self.kda = KDA(config)
        else:
            self.mla = MLA(config, self.return_max_logits)
        if self.is_dense:
            self.mlp = FeedForward(config, config.dense_dim)
        else:
            self.moe = MoE(config)

    def __call__(self, depth: Depth, skip_partial: Array | None, runs: Int[Array, "B T"] | None,
                 cache: LayerCache | None) -> tuple[Depth, LayerAux]:
        """skip_partial (bool scalar): leaves `partial`, then zero, out of the first mixture: this layer opens a block inside a scan."""
        return self._pieces(depth, skip_partial, runs) if is_cut(depth) else self._whole(depth, skip_partial, runs, cache)

    def _whole(self, depth: Depth, skip_partial: Array | None, runs: Array | None, cache: LayerCache | KDACarry | None,
               row: LatentRow | None = None) -> tuple[Depth, LayerAux]:
        """All tokens of `depth` at one time: whole rows, or a piece of them behind `cache` (a KDACarry) or of `row`."""
        normed, attn_weights = self._mixer_input(depth, skip_partial, runs)
        max_logits = balance_loss = None
        if self.mixer == "kda":
            a, cache = self.kda(normed, runs, cache)
        else:
            a, cache, max_logits = self.mla(normed, runs, cache, row)
        depth = self._write(depth, a)
        h, ffn_weights = self._read("ffn_residual", depth, None, runs)
        normed = self.ffn_norm(h)
        if self.is_dense:
            f, stats = self.mlp(normed), None
        else:
            f, stats, balance_loss = self.moe(normed, runs)
        weights = {"attn": attn_weights, "ffn": ffn_weights} if self.return_depth_weights else None
        return self._write(depth, f), LayerAux(router_stats=stats, cache=cache, depth_weights=weights, max_logits=max_logits, balance_loss=balance_loss)

    def _mixer_input(self, depth: Depth, skip_partial: Array | None, runs: Array | None) -> tuple[Hidden, Array | None]:
        h, weights = self._read("attn_residual", depth, skip_partial, runs)
        return self.attn_norm(h), weights

    def _pieces(self, depth: Depth, skip_partial: Array | None, runs: Array | None) -> tuple[Depth, LayerAux]:
        """`_whole` on one piece after another. A KDA layer hands its state on; in an MLA layer each piece attends to the latents of the row, which are made
        first. Each piece is recomputed by itself in the backward pass."""
        count, batch, size, _ = jax.tree.leaves(depth)[0].shape
        pieces = (depth, None if runs is None else cut(runs, size), size * jnp.arange(count))
        latent = None
        if self.mixer == "mla":
            latent = join(over_pieces(self.config, DecoderLayer._latents)(self, None, pieces, skip_partial)[1])
        carry = init_carry(self.config, batch) if self.mixer == "kda" else None
        _, (written, stats, max_logits) = over_pieces(self.config, DecoderLayer._piece)(self, carry, pieces, (skip_partial, latent, runs))
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), stats)
        return Depth(bank=(*depth.bank, *written.bank), partial=written.partial), LayerAux(
            router_stats=total, cache=None, depth_weights=None, max_logits=None if max_logits is None else jnp.max(max_logits, axis=0), balance_loss=None)

    def _latents(self, _: None, piece: Piece, skip_partial: Array | None) -> tuple[None, Array]:
        depth, runs, start = piece
        normed, _ = self._mixer_input(depth, skip_partial, runs)
        return None, self.mla(normed, runs, None, LatentRow(latent=None, runs=None, start=start))[0]

    def _piece(self, carry: KDACarry | None, piece: Piece,
               rows: tuple[Array | None, Array | None, Array | None]) -> tuple[KDACarry | None, tuple[Depth, Any, Array | None]]:
        """-> the carry behind the piece; what was written to the depth, the router's statistics, the largest logits."""
        (depth, runs, start), (skip_partial, latent, row_runs) = piece, rows
        row = None if latent is None else LatentRow(latent=latent, runs=row_runs, start=start)
        after, aux = self._whole(depth, skip_partial, runs, carry, row)
        return aux.cache, (after.replace(bank=after.bank[len(depth.bank):]), aux.router_stats, aux.max_logits)

    def _read(self, name: str, depth: Depth, skip_partial: Array | None, runs: Array | None) -> tuple[Hidden, Array | None]:
        if self.config.residual.kind == "plain":
            return depth.partial, None
        h, weights = getattr(self, name)(sources(depth), skip_partial)
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


def sources(depth: Depth) -> tuple[Hidden, ...]:
    """What a mixture over depth chooses from."""
    return depth.bank if depth.partial is None else (*depth.bank, depth.partial)


def in_pieces(config: ModelConfig, tokens: int) -> bool:
    """Whether rows of so many tokens are cut (ModelConfig.token_chunk)."""
    return config.token_chunk is not None and tokens > config.token_chunk and axis_size("context") == 1


def is_cut(depth: Depth) -> bool:
    return jax.tree.leaves(depth)[0].ndim == 4


def cut(x: Array, size: int) -> Array:
    """[B, T, ...] -> [T / size, B, size, ...]: the loop over pieces then copies nothing, forwards or backwards. ValueError where size does not divide T."""
    if x.shape[1] % size:
        raise ValueError(f"token_chunk: got {size} for rows of {x.shape[1]} tokens, wanted a divisor of their length")
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def join(x: Array) -> Array:
    """The inverse of cut."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def over_pieces(config: ModelConfig, body: Callable[..., Any]) -> Callable[..., Any]:
    """body(module, carry, piece, rows) -> (carry, results) as a loop over pieces, recomputed piece by piece in the backward pass unless remat is "none"."""
    body = body if config.remat == "none" else nn.remat(body, policy=remat_policy(config), prevent_cse=False)
    return nn.scan(body, variable_broadcast=("params", "router_state"), split_rngs={"params": False}, in_axes=(0, nn.broadcast))


def remat_policy(config: ModelConfig) -> Callable[..., bool]:
    """What is kept under config.remat. The chosen experts always are, so that recomputing cannot change a route."""
    names = jax.checkpoint_policies.save_only_these_names("router_ids")
    if config.remat == "save_matmuls":
        return jax.checkpoint_policies.save_from_both_policies(names, jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return names


def remat_layer(config: ModelConfig, in_scan: bool, depth: Depth) -> type[DecoderLayer]:
    """DecoderLayer under the config's rematerialisation policy, for what it will read: where that is cut, each piece has it."""
    if config.remat == "none" or is_cut(depth):
        return DecoderLayer
    return nn.remat(DecoderLayer, policy=remat_policy(config), prevent_cse=not in_scan)


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
        layer_class = remat_layer(self.config, in_scan=True, depth=depth)
        for step, (mixer, is_dense) in enumerate(self.kinds):
            layer = layer_class(self.config, mixer, is_dense, self.return_depth_weights, self.return_max_logits, name=f"step_{step}")
            skip = is_first if self.opens_block and step == 0 and self.config.residual.kind == "block" else None
            depth, aux = layer(depth, skip, runs, None if caches is None else caches[step])
            auxiliaries.append(aux)
        return depth.partial, auxiliaries
