"""The train step: one pure function of (state, batch)."""
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longmoe.balancing import balancers
from longmoe.balancing.metrics import dead_experts, load_entropy, max_violation
from longmoe.configs import TrainConfig
from longmoe.model.depth import split_layers
from longmoe.model.lm import LongMoE
from longmoe.parallel.mesh import BATCH_AXES, constrain
from longmoe.shapes import Array
from longmoe.train.losses import chunked_cross_entropy
from longmoe.train.optim import learning_rate, make_optimizer
from longmoe.train.qk_clip import clip_queries_and_keys, layer_maxima
from longmoe.train.state import TrainState, state_shardings

Batch = Mapping[str, Array]
Metrics = dict[str, Array]
ROWS = PartitionSpec(BATCH_AXES, "context")
KEYS = ("tokens", "targets", "loss_weights", "segment_ids")
"""What a step reads of a batch; anything else (source ids) stays on the host."""


class Accumulated(NamedTuple):
    """What a step needs of its batch."""
    grads: Any
    """Of the mean objective, float32."""
    nll: Array
    """Mean negative log-likelihood, nats a trained token."""
    stats: Any
    """Router statistics: integer sums."""
    balance_loss: Array | None
    """Mean over valid tokens, summed over MoE layers; None under balancers that have none."""
    max_logits: Any
    """Largest logit of each MLA head (ModelOutput.max_logits); None without qk_clip."""

    def merge(self, other: "Accumulated") -> "Accumulated":
        """Both micro-batches together: sums, and the larger logits."""
        add = lambda a, b: jax.tree.map(jnp.add, a, b)
        return Accumulated(*map(add, self[:-1], other[:-1]), jax.tree.map(jnp.maximum, self.max_logits, other.max_logits))


def accumulate(cfg: TrainConfig, params: Any, router_state: Any, batch: Batch) -> Accumulated:
    """Gradients and sums of the batch, in cfg.accumulation_steps micro-batches.

    Every micro-batch is weighed by the whole batch's loss weights and valid tokens, so how the batch is cut changes no more than rounding
    (but for a balance loss over the micro-batch).
    """
    share = lambda total: 1 / jnp.where(total > 0, total, 1)
    scale, valid_scale = share(jnp.sum(batch["loss_weights"].astype(jnp.float32))), share(jnp.sum(batch["segment_ids"] > 0))

    def mean_objective(params: Any, part: Batch) -> tuple[Array, tuple[Any, ...]]:
        output = LongMoE(cfg.model).apply({"params": params, "router_state": router_state}, part["tokens"], part["segment_ids"], return_hidden=True,
                                          return_max_logits=cfg.optim.qk_clip is not None)
        objective, nll = chunked_cross_entropy(cfg.model, output.hidden, params["lm_head"], part["targets"], part["loss_weights"],
                                               chunk=cfg.optim.loss_chunk, z_loss=cfg.optim.z_loss)
        objective, balance_loss = objective * scale, output.balance_loss
        if balance_loss is not None:
            balance_loss = balance_loss * valid_scale
            objective = objective + cfg.model.moe.balance_loss * balance_loss
        return objective, (nll * scale, output.router_stats, balance_loss, output.max_logits)

    def one(part: Batch) -> Accumulated:
        (_, sums), grads = jax.value_and_grad(mean_objective, has_aux=True)(params, part)
        return Accumulated(jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), grads), *sums)

    if cfg.accumulation_steps == 1:
        return one(batch)
    # Row i goes to micro-batch i mod accumulation_steps: each device keeps its own rows.
    cut = lambda x: constrain(jnp.moveaxis(x.reshape(-1, cfg.accumulation_steps, *x.shape[1:]), 1, 0), PartitionSpec(None, *ROWS))
    parts = {name: cut(batch[name]) for name in KEYS}
    shapes = jax.eval_shape(one, {name: x[0] for name, x in parts.items()})
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    nothing = nothing._replace(max_logits=jax.tree.map(lambda x: jnp.full(x.shape, jnp.finfo(x.dtype).min, x.dtype), shapes.max_logits))
    sums, _ = jax.lax.scan(lambda sums, part: (sums.merge(one(part)), None), nothing, parts)
    return sums


def apply_updates(cfg: TrainConfig, state: TrainState, sums: Accumulated) -> tuple[TrainState, Metrics]:
    """One optimizer step, QK-Clip and one solve of the balancer; where the gradients are not finite, the state with its step counted up and nothing else
    changed."""
    grads = sums.grads
    rate = learning_rate(cfg, state.step)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = make_optimizer(cfg.optim, cfg.model).update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda u: -rate * u, updates)
    params = jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), state.params, updates)
    if cfg.optim.qk_clip is not None:
        params = clip_queries_and_keys(cfg.model, params, sums.max_logits, cfg.optim.qk_clip)
    router_state = jax.tree.map(lambda bias, counts: balancers.update(cfg.model.moe, counts, bias), state.router_state, sums.stats)
    finite = jnp.isfinite(grad_norm)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    new = state.replace(step=state.step + 1, params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state),
                        router_state=keep(router_state, state.router_state))
    metrics = dict(grad_norm=grad_norm, param_norm=optax.tree.norm(new.params), learning_rate=rate,
                   update_norm=jnp.where(finite, optax.tree.norm(updates), 0), skipped=(~finite).astype(jnp.int32))
    return new, metrics


def _layer_metrics(cfg: TrainConfig, sums: Accumulated) -> Metrics:
    layers = split_layers(cfg.model, sums.stats)
    loads = [layers[layer]["moe"]["router"]["expert_bias"].load for layer in sorted(layers)]
    load = jnp.stack(loads) if loads else jnp.zeros((0, cfg.model.moe.num_experts), jnp.int32)
    metrics = dict(max_violation=max_violation(load), dead_experts=dead_experts(load), load_entropy=load_entropy(load), expert_load=load)
    if sums.balance_loss is not None:
        metrics["balance_loss"] = sums.balance_loss / max(1, cfg.model.num_moe_layers)
    if sums.max_logits:
        metrics["max_logit"] = jnp.max(layer_maxima(cfg.model, sums.max_logits), axis=-1)
    return metrics


def make_train_step(cfg: TrainConfig, mesh: Mesh) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """step(state, batch) -> (state, metrics): pure, jitted, donates the state.

    batch: tokens, targets int32 [B, T], loss_weights float32 [B, T], segment_ids int32 [B, T]; B a multiple of cfg.accumulation_steps.
    metrics: loss (nats a trained token), grad_norm, param_norm, update_norm, learning_rate, tokens (trained), skipped (0 or 1); max_violation,
    dead_experts, load_entropy [MoE layers], expert_load int32 [MoE layers, E]; with balancer auxiliary_loss balance_loss (mean over MoE layers, 1 is
    even); with qk_clip max_logit [MLA layers].
    """
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_batch(cfg, mesh, batch)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            batch = {name: constrain(batch[name], ROWS) for name in KEYS}
            sums = accumulate(cfg, state.params, state.router_state, batch)
            new, metrics = apply_updates(cfg, state, sums)
            metrics |= dict(loss=sums.nll, tokens=jnp.sum(batch["loss_weights"] > 0), **_layer_metrics(cfg, sums))
        new = jax.lax.with_sharding_constraint(new, state_shardings(mesh, new))
        return new, jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, PartitionSpec()))

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(cfg, mesh))


def compiler_options(cfg: TrainConfig, mesh: Mesh) -> dict[str, Any] | None:
    """For GPUs. Dense products go to cuBLAS: XLA's own kernels for them are no faster here, and to choose one it compiles and times many for each product.

    Where rows are cut into pieces, the results of every loop over them begin as copies of one array of zeros, and copy_fusion would make all of those at once,
    before the first loop: at a million tokens a hundred gigabytes that are held from then on.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return None
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
    if cfg.model.token_chunk is not None and cfg.data.sequence_length > cfg.model.token_chunk:
        options["xla_disable_hlo_passes"] = "copy_fusion"
    return options


def _check_batch(cfg: TrainConfig, mesh: Mesh, batch: Batch) -> None:
    missing = sorted(set(KEYS) - set(batch))
    if missing:
        raise ValueError(f"batch: got {sorted(batch)}, wanted also {missing}")
    shapes = {name: tuple(batch[name].shape) for name in KEYS}
    if len(set(shapes.values())) != 1 or len(shapes["tokens"]) != 2:
        raise ValueError(f"batch: got shapes {shapes}, wanted one shape [B, T] for all")
    rows, tokens = shapes["tokens"]
    if rows % cfg.accumulation_steps:
        raise ValueError(f"batch: got {rows} rows, wanted a multiple of accumulation_steps={cfg.accumulation_steps}")
    split = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows // cfg.accumulation_steps % split:
        raise ValueError(f"batch: got {rows} rows in {cfg.accumulation_steps} micro-batches on a mesh {dict(mesh.shape)} whose axes "
                         f"{', '.join(BATCH_AXES)} split each over {split} devices; wanted data.batch_size a multiple of {split * cfg.accumulation_steps}, "
                         "or a mesh whose other axes take the devices")
    if tokens % mesh.shape["context"]:
        raise ValueError(f"batch: got {tokens} tokens a row, wanted a multiple of mesh.context={mesh.shape['context']}")
