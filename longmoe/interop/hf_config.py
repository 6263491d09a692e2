"""ModelConfig <-> config.json of each family. What a family cannot express is refused by name, both ways."""
from collections.abc import Mapping, Sequence
from typing import Any

from longmoe.configs import KDAConfig, MLAConfig, ModelConfig, MoEConfig, ResidualConfig

DTYPES = ("float32", "bfloat16", "float64")
LATENT_NORM_EPS = 1e-6
"""Of both families, in every implementation that was compared; config.json has no key for it."""
PARTS = {"kda": KDAConfig, "mla": MLAConfig, "moe": MoEConfig, "residual": ResidualConfig}
MAX_POSITIONS = 1048576
"""Written for readers that ask for a longest sequence; without positions there is none."""

# What a family fixes: field of ModelConfig -> the one value.
FIXED: Mapping[str, Mapping[str, Any]] = {
    "kimi_linear": {"activation": "swiglu", "latent_norm_eps": LATENT_NORM_EPS, "kda.gate": "softplus", "kda.output_gate": "low_rank",
                    "mla.use_output_gate": False, "mla.rope_theta": None, "moe.latent_dim": None, "moe.use_latent_norm": False, "residual.kind": "plain"},
    "kimi_k3": {"activation": "situ", "latent_norm_eps": LATENT_NORM_EPS, "kda.gate": "bounded", "kda.output_gate": "full_rank",
                "mla.use_output_gate": True, "mla.rope_theta": None, "residual.kind": "block"},
}
# The same for keys of config.json (of text_config in kimi_k3), where they are present.
FIXED_KEYS: Mapping[str, Mapping[str, Any]] = {
    "kimi_linear": {"hidden_act": "silu", "mla_use_output_gate": False, "routed_expert_hidden_size": None, "attn_res_block_size": None},
    "kimi_k3": {"hidden_act": "situ", "mla_use_output_gate": True},
}
COMMON_KEYS: Mapping[str, Any] = {
    "tie_word_embeddings": False, "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0, "attention_bias": False, "rope_scaling": None}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


def quantization(ignore: Sequence[str]) -> dict[str, Any]:
    """quantization_config of a checkpoint whose routed experts are MXFP4."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
    return {**MXFP4, "quantization_status": "compressed", "ignore": list(ignore),
            "config_groups": {"group_0": {"targets": ["Linear"], "format": MXFP4["format"], "weights": weights, "input_activations": None,
                                          "output_activations": None}}}


NOT_EXPERTS = ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*block_sparse_moe.gate.*",
               "re:.*routed_expert_(down|up)_proj.*", "lm_head")


def to_hf(config: ModelConfig, is_mxfp4: bool = False) -> tuple[str, dict[str, Any]]:
    """(family, content of config.json). dtype there is that of the activations; the tensors' own dtypes are in the files.

    Raises ValueError with, for each family, the fields that stand against it.
    """
    against = {family: _against(family, config) for family in FIXED}
    fitting = [family for family, reasons in against.items() if not reasons]
    if not fitting:
        lines = "\n".join(f"  {family}: {'; '.join(reasons)}" for family, reasons in against.items())
        raise ValueError(f"model_config: got one that no published family expresses, wanted kimi_linear or kimi_k3; what stands against each:\n{lines}")
    text = _common(config)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if is_mxfp4:
        text["quantization_config"] = quantization(NOT_EXPERTS)
    if fitting[0] == "kimi_linear":
        text |= {"architectures": ["KimiLinearForCausalLM"], "hidden_act": "silu", "model_max_length": MAX_POSITIONS,
                 "use_cache": True, "dtype": config.dtype, **ids}
        return "kimi_linear", text
    linear = text["linear_attn_config"] | {"use_full_rank_gate": True, "gate_lower_bound": config.kda.lower_bound}
    text |= {"hidden_act": "situ", "activation_situ_beta": config.situ_beta, "activation_situ_linear_beta": config.situ_linear_beta,
             "topk_method": "noaux_tc", "routed_expert_hidden_size": config.moe.latent_dim, "latent_moe_use_norm": config.moe.use_latent_norm,
             "mla_use_output_gate": True, "attn_res_block_size": config.residual.block_size, "head_dim": config.kda.head_dim,
             "max_position_embeddings": MAX_POSITIONS, "linear_attn_config": linear, **ids}
    return "kimi_k3", {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text, "dtype": config.dtype,
                       "tie_word_embeddings": False, **ids}


def _against(family: str, config: ModelConfig) -> list[str]:
    """Fields whose value the family cannot express."""
    reasons = []
    for path, wanted in FIXED[family].items():
        got: Any = config
        for name in path.split("."):
            got = getattr(got, name)
        if got != wanted:
            reasons.append(f"{path}: got {got!r}, wanted {wanted!r}")
    moe = config.moe
    if family == "kimi_k3" and moe.latent_dim is None:
        reasons.append("moe.latent_dim: got None, wanted a width")
    if moe.num_shared_experts and moe.shared_expert_dim != moe.expert_dim:
        reasons.append(f"moe.shared_expert_dim: got {moe.shared_expert_dim}, wanted moe.expert_dim={moe.expert_dim}")
    if family == "kimi_linear" and not moe.num_shared_experts:
        reasons.append("moe.num_shared_experts: got 0, wanted 1 or more")
    return reasons


def _common(config: ModelConfig) -> dict[str, Any]:
    mla, moe, kda = config.mla, config.moe, config.kda
    layers = {kind: [i for i, mixer in enumerate(config.mixers, 1) if mixer == kind] for kind in ("kda", "mla")}
    return {
        "model_type": "kimi_linear", "vocab_size": config.vocab_size, "hidden_size": config.width, "num_hidden_layers": config.num_layers,
        "intermediate_size": config.dense_dim, "first_k_dense_replace": config.dense_layers, "moe_layer_freq": 1, "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
        "num_attention_heads": mla.num_heads, "num_key_value_heads": mla.num_heads, "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim, "qk_rope_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim, "mla_use_nope": True,
        "num_experts": moe.num_experts, "num_experts_per_token": moe.experts_per_token, "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_dim, "moe_renormalize": moe.renormalize, "routed_scaling_factor": moe.routed_scale,
        "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "linear_attn_config": {"num_heads": kda.num_heads, "head_dim": kda.head_dim, "short_conv_kernel_size": kda.conv_width,
                               "kda_layers": layers["kda"], "full_attn_layers": layers["mla"]},
    }


class _Keys:
    """Reads keys and gathers what is wrong, so that one error can say all of it."""

    def __init__(self, content: Mapping[str, Any], path: str = ""):
        self.content, self.path = content, path
        self.problems: list[str] = []

    def __call__(self, name: str, kind: type = int) -> Any:
        value = self.content.get(name)
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
            self.problems.append(f"{self.path}{name}: got {value!r}, wanted {kind.__name__}")
            return kind(1)
        return kind(value)

    def optional(self, name: str, kind: type, default: Any = None) -> Any:
        return default if self.content.get(name) is None else self(name, kind)

    def fixed(self, wanted: Mapping[str, Any]) -> None:
        self.problems += [f"{self.path}{name}: got {self.content[name]!r}, wanted {value!r}"
                          for name, value in wanted.items() if self.content.get(name) not in (None, value)]


def from_hf(content: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """(family, config) of a config.json. param_dtype is set to its dtype, which the tensors may overrule.

    Raises ValueError for another model_type, and with every key that is absent or that asks for something else than this model computes.
    """
    family = content.get("model_type")
    if family not in FIXED:
        raise ValueError(f"model_type: got {family!r}, wanted one of {', '.join(map(repr, FIXED))}")
    text = content if family == "kimi_linear" else content.get("text_config", {})
    keys = _Keys(text, "" if family == "kimi_linear" else "text_config.")
    linear = _Keys(text.get("linear_attn_config") or {}, f"{keys.path}linear_attn_config.")
    keys.fixed(COMMON_KEYS | FIXED_KEYS[family] | {"num_key_value_heads": text.get("num_attention_heads")})
    quantized = text.get("quantization_config") or content.get("quantization_config")
    if quantized and quantized.get("format") != MXFP4["format"]:
        keys.problems.append(f"quantization_config.format: got {quantized.get('format')!r}, wanted {MXFP4['format']!r}")
    dtype = next((source[key] for source in (content, text) for key in ("dtype", "torch_dtype") if source.get(key)), "bfloat16")
    if dtype not in DTYPES:
        keys.problems.append(f"dtype: got {dtype!r}, wanted one of {', '.join(DTYPES)}")
    fields = _fields(family, keys, linear)
    if keys.problems or linear.problems:
        raise ValueError(f"config.json: got a {family} config that this model cannot follow: {'; '.join(keys.problems + linear.problems)}")
    parts = {name: kind(**fields.pop(name)) for name, kind in PARTS.items()}
    return family, ModelConfig(**fields, **parts, dtype=dtype, param_dtype=dtype)


def _fields(family: str, keys: _Keys, linear: _Keys) -> dict[str, Any]:
    is_k3 = family == "kimi_k3"
    if is_k3:
        linear.fixed({"use_full_rank_gate": True})
    num_layers = keys("num_hidden_layers")
    kda_layers, mla_layers = linear.content.get("kda_layers", []), linear.content.get("full_attn_layers", [])
    if sorted([*kda_layers, *mla_layers]) != list(range(1, num_layers + 1)):
        linear.problems.append(f"{linear.path}kda_layers, full_attn_layers: got {kda_layers} and {mla_layers}, wanted each of 1 to {num_layers} in one of them")
        mla_layers = []
    # transformers also writes the two lists in a spelling of its own.
    keys.fixed({"layer_types": ["full_attention" if i in mla_layers else "linear_attention" for i in range(1, num_layers + 1)],
                "mlp_layer_types": ["dense" if i < keys("first_k_dense_replace") else "sparse" for i in range(num_layers)]})
    expert_dim = keys("moe_intermediate_size")
    situ = dict(situ_beta=keys("activation_situ_beta", float), situ_linear_beta=keys.optional("activation_situ_linear_beta", float)) if is_k3 else {}
    return dict(
        vocab_size=keys("vocab_size"), width=keys("hidden_size"), num_layers=num_layers, mla_layers=tuple(mla_layers),
        dense_layers=keys("first_k_dense_replace"), dense_dim=keys("intermediate_size"), activation="situ" if is_k3 else "swiglu", **situ,
        norm_eps=keys("rms_norm_eps", float), latent_norm_eps=LATENT_NORM_EPS, init_std=keys.optional("initializer_range", float, 0.02),
        kda=dict(num_heads=linear("num_heads"), head_dim=linear("head_dim"), conv_width=linear("short_conv_kernel_size"),
                 gate="bounded" if is_k3 else "softplus", lower_bound=linear("gate_lower_bound", float) if is_k3 else -5.0,
                 output_gate="full_rank" if is_k3 else "low_rank"),
        mla=dict(num_heads=keys("num_attention_heads"), q_lora_rank=keys.optional("q_lora_rank", int), kv_lora_rank=keys("kv_lora_rank"),
                 nope_dim=keys("qk_nope_head_dim"), rope_dim=keys("qk_rope_head_dim"), v_dim=keys("v_head_dim"), use_output_gate=is_k3),
        moe=dict(num_experts=keys("num_experts"), experts_per_token=keys("num_experts_per_token"),
                 latent_dim=keys("routed_expert_hidden_size") if is_k3 else None, expert_dim=expert_dim,
                 num_shared_experts=keys("num_shared_experts"), shared_expert_dim=expert_dim,
                 use_latent_norm=keys("latent_moe_use_norm", bool) if is_k3 else False, renormalize=keys("moe_renormalize", bool),
                 routed_scale=keys("routed_scaling_factor", float)),
        residual=dict(kind="block", block_size=keys("attn_res_block_size")) if is_k3 else dict(kind="plain"))
