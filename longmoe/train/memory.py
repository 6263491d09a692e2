"""Memory of a training step on one device: what is always there, and the fullest moment of the loss, of the backward pass and of the optimizer.

Sizes come from the traced code itself (`liveness`): one layer of each kind, the loss and the optimizer. Nothing is compiled or allocated. On a mesh the
tokens, the parameters and the moments are a device's own; what an axis splits inside a layer (heads, hidden widths) is counted whole.
"""
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig, TrainConfig
from longmoe.model.attn_residuals import mix
from longmoe.model.block import Depth, in_pieces, remat_layer
from longmoe.model.costs import parameter_shapes
from longmoe.model.depth import Group, depth_blocks, flat_plan
from longmoe.model.layers import rms_normalize
from longmoe.parallel.rules import matrix_axes, spec_of
from longmoe.train.liveness import Program, filled_buffers, last_reads, live, own_peak, stored
from longmoe.train.losses import chunked_cross_entropy
from longmoe.train.step import KEYS

PHASES = ("loss", "backward", "optimizer")
ORTHOGONALISING = 3
"""Copies of the largest parameter in the model's dtype that Muon's iteration holds, beside the update: its iterate, the next one, a product of the two."""


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device."""
    parts: dict[str, int]
    """At the fullest moment: parameters, optimizer (its moments), state_copy (on a CPU), batch, gradients, saved_activations (kept for the backward pass),
    temporary (of the layer, of the loss or of the optimizer that runs then), loop_buffers (of layers that the backward pass has yet to reach). They
    sum to `peak`."""
    phases: dict[str, int]
    """The most that each of PHASES needs, everything counted."""
    saved_by_layer: dict[str, int]
    """Kind of layer -> what one keeps for its backward pass."""

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def fullest(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)


def compiled_bytes(analysis: Any) -> int:
    """What XLA's memory analysis of a compiled step says that it holds: arguments, temporaries, and results that do not take an argument's place."""
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer, its parameters and its input apart."""
    saved: int
    """Kept from the forward to the backward pass, the layer's output among it."""
    backward: int
    """Most bytes during the backward pass: what is left of `saved`, and the gradients of the parameters, among it."""
    loop_buffers: int
    """What the backward pass's loops fill (grouped matmuls, scans): zeros at first."""


def training_memory(cfg: TrainConfig, platform: Literal["gpu", "cpu"] = "gpu") -> TrainingMemory:
    """What a step of this config holds on one device of its mesh; -1 in the mesh counts as 1.

    platform: on a CPU, XLA copies the donated train state before it writes the new one in its place.
    """
    model, axes = cfg.model, {name: max(size, 1) for name, size in dataclasses.asdict(cfg.mesh).items()}
    rows = -(-cfg.data.batch_size // (cfg.accumulation_steps * axes["data"] * axes["fsdp"] * axes["expert"]))
    tokens = -(-cfg.data.sequence_length // axes["context"])
    shapes = parameter_shapes(model)
    own = {name: math.prod(leaf.shape) // _split(name, axes) for name, leaf in shapes}
    parameters = sum(own[name] * leaf.dtype.itemsize for name, leaf in shapes)
    optimizer = sum(own[name] * leaf.dtype.itemsize * _moments(cfg, name) for name, leaf in shapes)
    gradients = dict.fromkeys((name.split("/")[0] for name in own), 0)
    for name, count in own.items():
        gradients[name.split("/")[0]] += 4 * count
    all_gradients = sum(gradients.values())
    copied = parameters + optimizer if platform == "cpu" else 0
    batch = len(KEYS) * 4 * rows * tokens * cfg.accumulation_steps
    kinds = {kind: layer_memory(model, *kind, rows, tokens) for kind in dict.fromkeys(_kind(model, i) for i in range(model.num_layers))}
    saved = [kinds[_kind(model, i)].saved for i in range(model.num_layers)]
    # XLA lays out the zeros of all layers outside scans early, in one go.
    ahead = [0 if group.repeats > 1 else kinds[_kind(model, layer)].loop_buffers for group in flat_plan(model) for layer, _, _ in group.layers()]
    hidden = rows * tokens * model.width * jnp.dtype(model.dtype).itemsize
    summed = all_gradients if cfg.accumulation_steps > 1 else 0         # those of the micro-batches before
    moments = {
        "loss": dict(gradients=summed, saved_activations=hidden + sum(saved) + output_memory(model, rows, tokens).saved,
                     temporary=loss_memory(cfg, rows, tokens), loop_buffers=sum(ahead)),
        "backward": max((_backward(model, group, kinds, saved, gradients, hidden, tokens) | dict(loop_buffers=sum(ahead[:group.start]))
                         for group in flat_plan(model)), key=lambda parts: sum(parts.values())),
        # All gradients are there until their norm is known; parameters are then written one after another.
        "optimizer": dict(gradients=all_gradients, saved_activations=0, loop_buffers=0,
                          temporary=(4 + ORTHOGONALISING * jnp.dtype(model.dtype).itemsize) * max(
                              (count for name, count in own.items() if _moments(cfg, name) == 1), default=0))}
    moments["backward"]["gradients"] += summed
    phases = {phase: parameters + optimizer + copied + batch + sum(parts.values()) for phase, parts in moments.items()}
    always = dict(parameters=parameters, optimizer=optimizer, state_copy=copied, batch=batch)
    return TrainingMemory(always | moments[max(phases, key=phases.__getitem__)], phases,
                          {f"{mixer} and {'dense' if is_dense else 'experts'}": layer.saved for (mixer, is_dense), layer in kinds.items()})


def _backward(model: ModelConfig, group: Group, kinds: dict[Any, LayerMemory], saved: list[int], gradients: dict[str, int], hidden: int,
              tokens: int) -> dict[str, int]:
    """The backward pass through `group`: what layers before it keep, the gradients of those after it, the fullest of its layers."""
    # A scan's stacks, of what is kept and of the gradients, are whole from its beginning to its end.
    scanned, end = group.repeats > 1, group.start + group.period * group.repeats
    after = sum(size for name, size in gradients.items() if name not in {g.name for g in flat_plan(model) if g.start < end})
    sources = next(n for n, block in enumerate(depth_blocks(model), 1) if group.start in block) if model.residual.kind == "block" else 0
    fullest = max(kinds[_kind(model, layer)].backward for layer, _, _ in group.layers())
    # A loop over pieces gives the gradients of all sources whole before they are added to those of later layers; `layer_memory` has one source.
    of_sources = (sources + 1 + (max(sources - 1, 0) if in_pieces(model, tokens) else 0)) * hidden
    return dict(gradients=after + (gradients[group.name] if scanned else 0), saved_activations=hidden + sum(saved[:end if scanned else group.start]),
                temporary=fullest + of_sources)


@functools.cache
def layer_memory(model: ModelConfig, mixer: str, is_dense: bool, rows: int, tokens: int) -> LayerMemory:
    """Bytes of one layer on `rows` x `tokens`."""
    hidden = _hidden(model, rows, tokens)
    depth = Depth(bank=(hidden,) if model.residual.kind != "plain" else (), partial=None if model.residual.kind == "full" else hidden)
    layer = remat_layer(model, in_scan=False, depth=depth)(model, mixer, is_dense)
    runs = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    variables = jax.eval_shape(lambda key, depth, runs: layer.init(key, depth, None, runs, None), jax.random.key(0), depth, runs)
    params, rest = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}

    def run(params: Any, depth: Depth, rest: Any, runs: Any) -> Any:
        after, aux = layer.apply({"params": params, **rest}, depth, None, runs, None)
        return after.bank[-1] if after.partial is None else after.partial, aux.router_stats

    return _both_passes(run, (params, depth), (rest, runs), hidden)


def output_memory(model: ModelConfig, rows: int, tokens: int) -> LayerMemory:
    """Bytes of what is between the last layer and the head: the last mixture over depth and the norm."""
    hidden = _hidden(model, rows, tokens)
    scale = jax.ShapeDtypeStruct((model.width,), jnp.dtype(model.param_dtype))
    sources = (hidden,) * (1 if model.residual.kind == "plain" else 1 + len(depth_blocks(model)))

    def run(sources: Any, query: Any, weights: Any, scale: Any) -> Any:
        def on_piece(sources: Any) -> Any:
            h = sources[0] if model.residual.kind == "plain" else mix(sources, query, weights, model.norm_eps)[0]
            return rms_normalize(h, scale, model.norm_eps)

        return jax.lax.map(jax.checkpoint(on_piece), sources) if hidden.ndim == 4 else on_piece(sources), ()

    return _both_passes(run, (sources, scale, scale, scale), (), hidden)


def _hidden(model: ModelConfig, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
    """Hidden states as the layers hand them on."""
    size = model.token_chunk
    shape = (rows, tokens) if not in_pieces(model, tokens) else (tokens // size, rows, size)
    return jax.ShapeDtypeStruct((*shape, model.width), jnp.dtype(model.dtype))


def _both_passes(run: Callable[..., tuple[Any, Any]], arguments: tuple[Any, ...], fixed: tuple[Any, ...], hidden: Any) -> LayerMemory:
    """Bytes of run(*arguments, *fixed) -> (hidden, other results), and of its derivative in `arguments`."""
    forward = lambda arguments, fixed: jax.vjp(lambda *arguments: run(*arguments, *fixed), *arguments, has_aux=True)
    jaxpr, (_, pull, others) = jax.make_jaxpr(forward, return_shape=True)(arguments, fixed)
    back = jax.make_jaxpr(lambda pull, gradient: pull(gradient))(pull, hidden)
    program = Program()
    inputs = [program.value(var.aval) for var in jaxpr.jaxpr.invars]
    results = program.add(jaxpr.jaxpr, inputs)
    boundary, (output, *residuals) = len(program.ops), results[:len(results) - len(jax.tree.leaves(others))]
    inputs.append(program.value(jax.core.ShapedArray(hidden.shape, hidden.dtype)))
    outputs = [output, *program.add(back.jaxpr, [*residuals, inputs[-1]])]
    kept = stored(program, outputs)
    end, held = last_reads(program, kept, outputs), live(program, inputs, outputs)
    before = {at for op in program.ops[:boundary] for at in op.writes} & kept - set(inputs)
    return LayerMemory(saved=sum(program.size[at] for at in before if end.get(at, -1) >= boundary), backward=max(held[boundary:], default=0),
                       loop_buffers=filled_buffers(program, boundary))


def loss_memory(cfg: TrainConfig, rows: int, tokens: int) -> int:
    """Most bytes of the loss and its gradients: a chunk of logits, and the head's gradient, among it."""
    model, like = cfg.model, jax.ShapeDtypeStruct
    loss = functools.partial(chunked_cross_entropy, model, chunk=cfg.optim.loss_chunk, z_loss=cfg.optim.z_loss)
    return own_peak(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        like((rows, tokens, model.width), jnp.dtype(model.dtype)), like((model.width, model.vocab_size), jnp.dtype(model.param_dtype)),
        like((rows, tokens), jnp.int32), like((rows, tokens), jnp.float32)).jaxpr)


def _kind(model: ModelConfig, layer: int) -> tuple[str, bool]:
    return model.mixers[layer], layer < model.dense_layers


def _moments(cfg: TrainConfig, name: str) -> int:
    """Moments of a parameter: Muon's momentum, or Adam's two."""
    return 1 if cfg.optim.optimizer == "muon" and matrix_axes(name) is not None else 2


def _split(name: str, axes: dict[str, int]) -> int:
    """Devices that share out a parameter."""
    return math.prod(axes[axis] for entry in spec_of(name) if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry))
