"""How layers are grouped for scanning: the depth plan, its parameter names, and the two layouts of the variables.

A group is either one layer (`layer_05`) or a run of repeated super-blocks (`layers_04_12`: layers 4 to 11, parameters stacked over the repeats, with
`step_0` ... for the layers of one super-block). Groups never cross an AttnRes block, because the bank of depth sources changes there.
"""
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers start, start + 1, ... start + period * repeats - 1, run as `repeats` super-blocks of `period` layers."""
    start: int
    period: int = 1
    repeats: int = 1

    @property
    def name(self) -> str:
        if self.repeats == 1:
            return f"layer_{self.start:02d}"
        return f"layers_{self.start:02d}_{self.start + self.period * self.repeats:02d}"

    def layers(self) -> list[tuple[int, int, int]]:
        """(layer, repeat, step) in the order of the layers."""
        return [(self.start + repeat * self.period + step, repeat, step) for repeat in range(self.repeats) for step in range(self.period)]


def depth_blocks(config: ModelConfig) -> list[range]:
    """Layers that share a bank of depth sources."""
    size = config.residual.block_size if config.residual.kind == "block" else config.num_layers
    return [range(start, min(start + size, config.num_layers)) for start in range(0, config.num_layers, size)]


def plan(config: ModelConfig, scan: bool | None = None) -> list[list[Group]]:
    """Groups of each depth block. scan None follows config.scan_layers; full attention residuals are never scanned (their sources grow)."""
    scan = config.scan_layers if scan is None else scan
    if not scan or config.residual.kind == "full":
        return [[Group(i) for i in block] for block in depth_blocks(config)]
    return [_scanned(config, block) for block in depth_blocks(config)]


MIN_SAVED = 2
"""Layer bodies that a scan must save: below that, stacking what the backward pass needs costs more than compiling the bodies apart."""


def _scanned(config: ModelConfig, block: range) -> list[Group]:
    """Covers the block greedily from the front with the repetition that spans most layers."""
    kinds = [(config.mixers[i], i < config.dense_layers) for i in range(config.num_layers)]
    groups, start = [], block.start
    while start < block.stop:
        best = Group(start)
        for period in range(1, (block.stop - start) // 2 + 1):
            unit, repeats = kinds[start:start + period], 1
            while (end := start + (repeats + 1) * period) <= block.stop and kinds[end - period:end] == unit:
                repeats += 1
            if (repeats - 1) * period >= MIN_SAVED and repeats * period > best.repeats * best.period:
                best = Group(start, period, repeats)
        groups.append(best)
        start += best.period * best.repeats
    return groups


def flat_plan(config: ModelConfig, scan: bool | None = None) -> list[Group]:
    """All groups in the order of depth."""
    return [group for block in plan(config, scan) for group in block]


def split_layers(config: ModelConfig, tree: Mapping[str, Any], scan: bool | None = None) -> dict[int, Any]:
    """Each layer's own subtree from a tree that is laid out by the plan (params, router_state, router statistics)."""
    layers = {}
    for group in flat_plan(config, scan):
        if group.name not in tree:
            continue
        for layer, repeat, step in group.layers():
            part = tree[group.name]
            if group.repeats > 1:
                if f"step_{step}" not in part:
                    continue
                part = jax.tree.map(lambda x, repeat=repeat: x[repeat], part[f"step_{step}"])
            layers[layer] = part
    return layers


def join_layers(config: ModelConfig, layers: Mapping[int, Any], scan: bool | None = None) -> dict[str, Any]:
    """The inverse of split_layers."""
    tree: dict[str, Any] = {}
    for group in flat_plan(config, scan):
        if group.repeats == 1:
            if group.start in layers:
                tree[group.name] = layers[group.start]
            continue
        steps = {}
        for step in range(group.period):
            parts = [layers[layer] for layer, _, at in group.layers() if at == step and layer in layers]
            if parts:
                steps[f"step_{step}"] = jax.tree.map(lambda *x: jnp.stack(x), *parts)
        if steps:
            tree[group.name] = steps
    return tree


def stack_layers(model_config: ModelConfig, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Per-layer variables (`layer_00`, `layer_01`, ...) -> the layout of scan_layers=True. Variables that are stacked already come back unchanged."""
    return _relayout(model_config, variables, scan=True)


def unstack_layers(model_config: ModelConfig, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of scan_layers=True -> per-layer variables, for scan_layers=False. The names then hold the layer's index."""
    return _relayout(model_config, variables, scan=False)


def _relayout(config: ModelConfig, variables: Mapping[str, Any], scan: bool) -> dict[str, Any]:
    result = {}
    for collection, tree in variables.items():
        names = {group.name for group in flat_plan(config, True)} | {group.name for group in flat_plan(config, False)}
        stacked = all(group.name in tree or group.repeats == 1 for group in flat_plan(config, True))
        layers = split_layers(config, tree, scan=stacked)
        rest = {name: value for name, value in tree.items() if name not in names}
        result[collection] = rest | join_layers(config, layers, scan)
    return result
