"""Published tensor names and layouts of each model family: one table a family, and the list of tensors that a config's checkpoint holds.

Ours on the left, Hugging Face's on the right; linear weights are [in, out] here and [out, in] there.
"""
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longmoe.configs import ModelConfig
from longmoe.model.depth import flat_plan
from longmoe.model.lm import LongMoE

A_LOG_PADDING = 128
"""Kimi K3 pads A_log with zeros to a multiple of this."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How an array lies in a checkpoint."""
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Shape there of an array of the given shape here."""
    load: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    """(array there, shape here) -> array here, a view."""
    save: Callable[[np.ndarray], np.ndarray]
    """Array here -> array there."""


def _padded(heads: int) -> int:
    return -(-heads // A_LOG_PADDING) * A_LOG_PADDING


def _unpad(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if np.any(x[shape[0]:]):
        raise ValueError(f"A_log: got values behind its {shape[0]} heads that are not zero, wanted padding; the config's num_heads may be too small")
    return x[:shape[0]]


PLAIN = Kind(lambda s: s, lambda x, s: x, lambda x: x)
MATRIX = Kind(lambda s: s[::-1], lambda x, s: x.T, lambda x: x.T)
ROW = Kind(lambda s: (1, *s), lambda x, s: x[0], lambda x: x[None])
CONV = Kind(lambda s: (s[1], 1, s[0]), lambda x, s: x[:, 0].T, lambda x: x.T[:, None])                      # [taps, C] <-> [C, 1, taps]
FLAT = Kind(lambda s: (s[0] * s[1],), lambda x, s: x.reshape(s), lambda x: x.reshape(-1))                   # [H, Dk] <-> [H Dk]
HEAD_ROWS = Kind(lambda s: (s[1] * s[2], s[0]), lambda x, s: x.T.reshape(s), lambda x: x.reshape(x.shape[0], -1).T)   # [R, H, d] <-> [H d, R]
A_LOG_4D = Kind(lambda s: (1, 1, *s, 1), lambda x, s: x.reshape(s), lambda x: x[None, None, :, None])
A_LOG_PADDED = Kind(lambda s: (_padded(s[0]),), _unpad, lambda x: np.pad(x, (0, _padded(x.shape[0]) - x.shape[0])))


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a table: an array here is the tensor `name` there. A name with {e} stands for one tensor an expert."""
    path: str
    """Inside params (a layer's part of it, for a layer's rule)."""
    name: str
    kind: Kind = MATRIX
    part: tuple[Any, ...] = ()
    """What of expert e's array the tensor is: an index behind e."""
    collection: str = "params"
    holds: Callable[[ModelConfig], bool] = lambda config: True
    """Whether the line counts for a config; needed where one array has two names."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A published family: its table, in the order in which tensors are written."""
    name: str
    prefix: str
    """Of every tensor of the text model."""
    embedding: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors beside the text model, which are left alone."""


def _direct_queries(config: ModelConfig) -> bool:
    return config.mla.q_lora_rank is None


_ATTENTION, _FFN = "self_attn", "block_sparse_moe"
_NORMS = (Rule("attn_norm/scale", "input_layernorm.weight", PLAIN), Rule("ffn_norm/scale", "post_attention_layernorm.weight", PLAIN))
_KDA = (
    *(Rule(f"kda/{x}_proj/kernel", f"{_ATTENTION}.{x}_proj.weight") for x in "qkv"),
    *(Rule(f"kda/{x}_conv", f"{_ATTENTION}.{x}_conv1d.weight", CONV) for x in "qkv"),
    Rule("kda/f_a_proj/kernel", f"{_ATTENTION}.f_a_proj.weight"),
    Rule("kda/f_b_proj/kernel", f"{_ATTENTION}.f_b_proj.weight"),
    Rule("kda/dt_bias", f"{_ATTENTION}.dt_bias", FLAT),
    Rule("kda/b_proj/kernel", f"{_ATTENTION}.b_proj.weight"),
    Rule("kda/o_norm", f"{_ATTENTION}.o_norm.weight", PLAIN),
    Rule("kda/o_proj/kernel", f"{_ATTENTION}.o_proj.weight"),
)
_MLA = (
    Rule("mla/q_a_proj/kernel", f"{_ATTENTION}.q_a_proj.weight"),
    Rule("mla/q_a_norm/scale", f"{_ATTENTION}.q_a_layernorm.weight", PLAIN),
    Rule("mla/q_b_proj/kernel", f"{_ATTENTION}.q_b_proj.weight", holds=lambda config: not _direct_queries(config)),
    Rule("mla/q_b_proj/kernel", f"{_ATTENTION}.q_proj.weight", holds=_direct_queries),
    Rule("mla/kv_a_proj/kernel", f"{_ATTENTION}.kv_a_proj_with_mqa.weight"),
    Rule("mla/kv_a_norm/scale", f"{_ATTENTION}.kv_a_layernorm.weight", PLAIN),
    Rule("mla/kv_b_proj", f"{_ATTENTION}.kv_b_proj.weight", HEAD_ROWS),
    Rule("mla/o_proj/kernel", f"{_ATTENTION}.o_proj.weight"),
)
_DENSE = tuple(Rule(f"mlp/{x}_proj/kernel", f"mlp.{x}_proj.weight") for x in ("gate", "up", "down"))
_MOE = (
    Rule("moe/router/kernel", f"{_FFN}.gate.weight"),
    Rule("moe/router/expert_bias", f"{_FFN}.gate.e_score_correction_bias", PLAIN, collection="router_state"),
    Rule("moe/experts_gate_up", f"{_FFN}.experts.{{e}}.w1.weight", part=(slice(None), 0)),
    Rule("moe/experts_gate_up", f"{_FFN}.experts.{{e}}.w3.weight", part=(slice(None), 1)),
    Rule("moe/experts_down", f"{_FFN}.experts.{{e}}.w2.weight"),
    *(Rule(f"moe/shared/{x}_proj/kernel", f"{_FFN}.shared_experts.{x}_proj.weight") for x in ("gate", "up", "down")),
)
_EMBEDDING = (Rule("embedding", "model.embed_tokens.weight", PLAIN),)
_HEAD = (Rule("final_norm/scale", "model.norm.weight", PLAIN), Rule("lm_head", "lm_head.weight"))

KIMI_LINEAR = Family(
    name="kimi_linear", prefix="", embedding=_EMBEDDING, head=_HEAD,
    layer=(
        *_NORMS, *_KDA, *_MLA, *_DENSE, *_MOE,
        Rule("kda/a_log", f"{_ATTENTION}.A_log", A_LOG_4D),
        Rule("kda/g_a_proj/kernel", f"{_ATTENTION}.g_a_proj.weight"),
        Rule("kda/g_b_proj/kernel", f"{_ATTENTION}.g_b_proj.weight"),
    ))
KIMI_K3 = Family(
    name="kimi_k3", prefix="language_model.", embedding=_EMBEDDING, ignored=("vision_tower.", "mm_projector."),
    layer=(
        *_NORMS, *_KDA, *_MLA, *_DENSE, *_MOE,
        Rule("kda/a_log", f"{_ATTENTION}.A_log", A_LOG_PADDED),
        Rule("kda/g_proj/kernel", f"{_ATTENTION}.g_proj.weight"),
        Rule("mla/g_proj/kernel", f"{_ATTENTION}.g_proj.weight"),
        Rule("moe/latent_down/kernel", f"{_FFN}.routed_expert_down_proj.weight"),
        Rule("moe/latent_norm/scale", f"{_FFN}.routed_expert_norm.weight", PLAIN),
        Rule("moe/latent_up/kernel", f"{_FFN}.routed_expert_up_proj.weight"),
        Rule("attn_residual/scale", "self_attention_res_norm.weight", PLAIN),
        Rule("attn_residual/query", "self_attention_res_proj.weight", ROW),
        Rule("ffn_residual/scale", "mlp_res_norm.weight", PLAIN),
        Rule("ffn_residual/query", "mlp_res_proj.weight", ROW),
    ),
    head=(Rule("output_residual/scale", "model.output_attn_res_norm.weight", PLAIN), Rule("output_residual/query", "model.output_attn_res_proj.weight", ROW),
          *_HEAD))
FAMILIES = {family.name: family for family in (KIMI_LINEAR, KIMI_K3)}

Leaf = tuple[str, ...]
"""Keys from {"params", "router_state"} down to an array."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint and the part of an array that it is."""
    name: str
    shape: tuple[int, ...]
    leaf: Leaf
    index: tuple[Any, ...]
    """Of the part inside the array."""
    part_shape: tuple[int, ...]
    kind: Kind
    is_expert: bool

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that it is accepted under: transformers writes a dense layer's feed-forward as block_sparse_moe."""
        return (self.name.replace(".mlp.", f".{_FFN}."),) if ".mlp." in self.name else ()


def variable_shapes(config: ModelConfig) -> dict[Leaf, jax.ShapeDtypeStruct]:
    """Shapes of all variables of a config. Dtype float32 where it is that whatever param_dtype says (decay gates, biases), else bfloat16."""
    model = LongMoE(dataclasses.replace(config, param_dtype="bfloat16", dtype="bfloat16", implementation="auto"))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}


def tensors(family: Family, config: ModelConfig, shapes: Mapping[Leaf, jax.ShapeDtypeStruct] | None = None) -> list[Tensor]:
    """All tensors of a config's checkpoint, in the order in which they are written. Each element of each array is in exactly one of them."""
    shapes = variable_shapes(config) if shapes is None else shapes
    result = [tensor for rule in family.embedding for tensor in expand(rule, family.prefix, (), (), shapes)]
    places = sorted((layer, group.name, repeat, step, group.repeats) for group in flat_plan(config) for layer, repeat, step in group.layers())
    for layer, name, repeat, step, repeats in places:
        keys, index = ((name,), ()) if repeats == 1 else ((name, f"step_{step}"), (repeat,))
        for rule in family.layer:
            if rule.holds(config):
                result += expand(rule, f"{family.prefix}model.layers.{layer}.", keys, index, shapes)
    result += [tensor for rule in family.head for tensor in expand(rule, family.prefix, (), (), shapes)]
    _check_complete(family, result, shapes)
    return result


def expand(rule: Rule, prefix: str, keys: Leaf, index: tuple[int, ...], shapes: Mapping[Leaf, jax.ShapeDtypeStruct]) -> Iterator[Tensor]:
    """The tensors that a rule stands for under `prefix`: parts `index` of the array under `keys`. None where `shapes` has no such array."""
    leaf = (rule.collection, *keys, *rule.path.split("/"))
    if leaf not in shapes:                                              # a part that this layer, or this config, does not have
        return
    shape = shapes[leaf].shape[len(index):]
    if "{e}" not in rule.name:
        yield Tensor(prefix + rule.name, rule.kind.shape(shape), leaf, index, shape, rule.kind, False)
        return
    part = tuple(size for axis, size in enumerate(shape[1:]) if axis >= len(rule.part) or rule.part[axis] == slice(None))
    for e in range(shape[0]):
        yield Tensor(prefix + rule.name.format(e=e), rule.kind.shape(part), leaf, (*index, e, *rule.part), part, rule.kind, True)


def _check_complete(family: Family, found: list[Tensor], shapes: Mapping[Leaf, jax.ShapeDtypeStruct]) -> None:
    covered = dict.fromkeys(shapes, 0)
    for tensor in found:
        covered[tensor.leaf] += int(np.prod(tensor.part_shape))
    off = ["/".join(leaf) for leaf, count in covered.items() if count != int(np.prod(shapes[leaf].shape))]
    if off:
        raise ValueError(f"family: got {family.name}, whose table does not cover these arrays once: {off}; add them to the table, or choose another family")
