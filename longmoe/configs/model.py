"""What a model is: its mixers, experts, residuals and sizes."""
import dataclasses
from typing import Literal

from longmoe.configs.checks import check, positive

Dtype = Literal["float32", "bfloat16", "float64"]
Mixer = Literal["kda", "mla"]


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (Kimi K3 report eq. 1-6)."""
    num_heads: int = 4
    """Heads H."""
    head_dim: int = 32
    """Key width Dk and value width Dv of a head, and the rank of the decay gate's projection."""
    conv_width: int = 4
    """Taps of the causal depthwise convolution after the q, k, v projections."""
    gate: Literal["bounded", "softplus"] = "bounded"
    """Log decay: bounded is lower_bound * sigmoid(exp(a_log) * z), softplus is -exp(a_log) * softplus(z)."""
    lower_bound: float = -5.0
    """Lower bound of the log decay; used by the bounded gate only."""
    output_gate: Literal["full_rank", "low_rank"] = "full_rank"
    """Output gate's projection: one matrix (Kimi K3), or two of rank head_dim (Kimi Linear)."""
    dt_min: float = 0.001
    """Shortest step at the start; dt_bias is the inverse softplus of steps that are log-uniform up to dt_max (Mamba-2). A channel first forgets by about
    lower_bound * step a token, 1 in 200 tokens at 0.001: below it some remember further back from the first step on."""
    dt_max: float = 0.1
    """Longest step at the start."""

    def __post_init__(self) -> None:
        positive(self, "num_heads", "head_dim", "conv_width", "dt_min")
        check(self.dt_min <= self.dt_max, f"KDAConfig.dt_max: got {self.dt_max} with dt_min={self.dt_min}, wanted no less")
        check(self.lower_bound < 0, f"KDAConfig.lower_bound: got {self.lower_bound}, wanted a negative log decay such as -5.0")


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention, without positional encoding unless rope_theta is set."""
    num_heads: int = 4
    """Heads H."""
    q_lora_rank: int | None = 48
    """Width of the query latent; None projects queries straight from the input."""
    kv_lora_rank: int = 32
    """Width of the key-value latent: what the cache holds, beside rope_dim."""
    nope_dim: int = 32
    """Query/key columns of a head that come from the latent."""
    rope_dim: int = 16
    """Query/key columns whose keys all heads share; rotated by position where rope_theta is set."""
    v_dim: int = 32
    """Value width of a head."""
    use_output_gate: bool = True
    """Multiplies the attention output by sigmoid(x W_g), elementwise."""
    rope_theta: float | None = None
    """Base of rotary position embedding on the rope_dim columns; None rotates nothing (NoPE, as in Kimi K3), and the order comes from KDA and causality."""

    def __post_init__(self) -> None:
        positive(self, "num_heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim")
        check(self.q_lora_rank is None or self.q_lora_rank > 0,
               f"MLAConfig.q_lora_rank: got {self.q_lora_rank}, wanted None or a positive number")
        check(self.rope_theta is None or self.rope_theta > 0, f"MLAConfig.rope_theta: got {self.rope_theta}, wanted None or a positive number")
        check(self.rope_theta is None or self.rope_dim % 2 == 0,
              f"MLAConfig.rope_dim: got {self.rope_dim} with rope_theta={self.rope_theta}, wanted an even number of columns to rotate in pairs")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE: full-width sigmoid router, experts in a latent space, norm after aggregation, shared experts."""
    num_experts: int = 16
    """Routed experts E."""
    experts_per_token: int = 2
    """Experts that a token goes to, K."""
    latent_dim: int | None = 64
    """Latent width Z that experts read and write; None keeps experts at the model's width."""
    expert_dim: int = 64
    """Hidden width F of a routed expert."""
    num_shared_experts: int = 1
    """Shared experts, fused into one feed-forward of width num_shared_experts * shared_expert_dim."""
    shared_expert_dim: int = 64
    """Hidden width of one shared expert."""
    use_latent_norm: bool = True
    """RMSNorm on the aggregated latent, before the up projection."""
    renormalize: bool = True
    """Divides the chosen scores by their sum."""
    routed_scale: float = 1.0
    """Factor on the combine weights (no effect under use_latent_norm, which removes it)."""
    balancer: Literal["quantile", "sign", "auxiliary_loss", "load_ema", "none"] = "quantile"
    """How load is kept even. quantile, sign and load_ema update expert_bias once a step (longmoe.balancing.balancers); auxiliary_loss adds a
    term to the objective and none does nothing: both leave the bias as it is."""
    bias_ema: float | None = None
    """Share of the old bias in the new one; used by quantile (None: 0, each step's own; more helps small batches of few documents) and by
    load_ema (None: 0.9)."""
    bias_rate: float = 1e-3
    """What a step adds to the bias of an expert below the mean load and takes from one above it; used by sign."""
    load_bias: float = 0.5
    """Distance between the biases that the idlest and the busiest expert are drawn to; used by load_ema."""
    balance_loss: float = 1e-2
    """Factor on the balance loss, a trained token and MoE layer; used by auxiliary_loss."""
    balance_loss_over: Literal["sequence", "batch"] = "sequence"
    """Tokens whose load is to be even: those of each row, or those of a micro-batch over all devices (it then matters how a batch is cut);
    used by auxiliary_loss."""

    def __post_init__(self) -> None:
        positive(self, "num_experts", "experts_per_token", "expert_dim", "routed_scale", "bias_rate", "load_bias", "balance_loss")
        check(self.experts_per_token < self.num_experts,
               f"MoEConfig.experts_per_token: got {self.experts_per_token}, wanted less than num_experts={self.num_experts}")
        check(self.bias_ema is None or 0 <= self.bias_ema < 1, f"MoEConfig.bias_ema: got {self.bias_ema}, wanted None or a number in [0, 1)")
        check(self.num_shared_experts >= 0, f"MoEConfig.num_shared_experts: got {self.num_shared_experts}, wanted 0 or more")
        check(self.latent_dim is None or self.latent_dim > 0,
               f"MoEConfig.latent_dim: got {self.latent_dim}, wanted None or a positive number")


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """How a sublayer's input is made from what came before it in depth."""
    kind: Literal["block", "full", "plain"] = "block"
    """block: Block Attention Residuals; full: every sublayer's output is a source; plain: the sum."""
    block_size: int = 4
    """Decoder layers a block; used by kind block only. A multiple of mla_every lets layers be scanned."""

    def __post_init__(self) -> None:
        positive(self, "block_size")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The text model."""
    vocab_size: int = 4096
    """Rows of the embedding and of the (untied) head, V."""
    width: int = 128
    """Model width D."""
    num_layers: int = 5
    """Decoder layers L."""
    mla_every: int = 4
    """Every mla_every-th layer is MLA, the others KDA; 0 leaves MLA out, 1 makes every layer MLA."""
    use_final_mla: bool = True
    """The last layer is MLA whatever the period says (not when mla_every is 0)."""
    mla_layers: tuple[int, ...] | None = None
    """MLA layers by 1-based index; overrides mla_every and use_final_mla."""
    dense_layers: int = 1
    """Leading layers whose feed-forward is dense."""
    dense_dim: int = 512
    """Hidden width of a dense feed-forward."""
    activation: Literal["situ", "swiglu"] = "situ"
    """Gated activation of every feed-forward."""
    situ_beta: float = 4.0
    """Bound of the gate branch of SiTU-GLU."""
    situ_linear_beta: float | None = 25.0
    """Bound of the linear branch of SiTU-GLU; None leaves it linear."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm but the latents'."""
    latent_norm_eps: float = 1e-6
    """Epsilon of MLA's latent norms."""
    init_std: float = 0.02
    """Standard deviation of every linear layer and of the embedding at initialisation."""
    init: Literal["normal", "mimetic"] = "normal"
    """normal: every matrix drawn by itself (Kimi K3). mimetic: KDA starts as a memory from each token to the one after it, and the head reads what the
    embedding wrote, so that a small model copies from its context within minutes (after Trockman et al., 2024, arXiv 2410.11135)."""
    kda: KDAConfig = KDAConfig()
    mla: MLAConfig = MLAConfig()
    moe: MoEConfig = MoEConfig()
    residual: ResidualConfig = ResidualConfig()
    dtype: Dtype = "bfloat16"
    """Dtype of activations and of weights in matmuls. Gates, norms' statistics, softmaxes, routing and recurrent state stay float32."""
    param_dtype: Dtype = "float32"
    """Dtype in which parameters are stored."""
    scan_layers: bool = True
    """Runs repeated layers as one scanned body (parameters stacked, see stack_layers)."""
    remat: Literal["none", "full", "save_matmuls"] = "none"
    """What the backward pass recomputes: nothing, everything but each layer's input and the routing, or all but matmul results."""
    token_chunk: int | None = None
    """Tokens of a row that a layer works on at one time in training and scoring; None: all. Longer rows are cut into so many (they must be a multiple), and
    what a layer needs besides its input and output no longer grows with the row: for rows of 100,000 tokens and more. Rows that the mesh axis `context` shares
    out, and passes that ask for depth weights, are not cut."""
    implementation: Literal["auto", "mosaic_gpu", "xla", "reference"] = "auto"
    """Implementation of the KDA operator and of the grouped matmul (pallas_kernels)."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "width", "num_layers", "dense_dim", "norm_eps", "latent_norm_eps", "init_std", "situ_beta")
        check(self.token_chunk is None or self.token_chunk > 0, f"ModelConfig.token_chunk: got {self.token_chunk}, wanted None or a positive number")
        check(self.token_chunk is None or self.moe.balancer != "auxiliary_loss",
              f"ModelConfig.token_chunk: got {self.token_chunk} with moe.balancer='auxiliary_loss', wanted None: that loss is over whole rows")
        check(self.mla_every >= 0, f"ModelConfig.mla_every: got {self.mla_every}, wanted 0 or more")
        check(0 <= self.dense_layers <= self.num_layers,
               f"ModelConfig.dense_layers: got {self.dense_layers}, wanted 0 to num_layers={self.num_layers}")
        outside = [i for i in self.mla_layers or () if not 1 <= i <= self.num_layers]
        check(not outside, f"ModelConfig.mla_layers: got {outside}, wanted 1-based indices up to num_layers={self.num_layers}")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Each layer's token mixer, "kda" or "mla"."""
        return tuple("mla" if self._is_mla(i) else "kda" for i in range(1, self.num_layers + 1))

    def _is_mla(self, index: int) -> bool:
        if self.mla_layers is not None:
            return index in self.mla_layers
        if self.mla_every == 0:
            return False
        return index % self.mla_every == 0 or (self.use_final_mla and index == self.num_layers)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.dense_layers
