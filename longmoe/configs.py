"""Configurations: frozen nested dataclasses, and JSON both ways. Presets are in `longmoe.presets`.

Every field is a flag of the command line under its dotted path (`--model.kda.num-heads 8`).
"""
import dataclasses
import json
import math
import pathlib
import types
import typing
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float64"]
Mixer = Literal["kda", "mla"]


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value > 0, f"{type(config).__name__}.{name}: got {value}, wanted a positive number")


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

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "head_dim", "conv_width")
        _check(self.lower_bound < 0, f"KDAConfig.lower_bound: got {self.lower_bound}, wanted a negative log decay such as -5.0")


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention without positional encoding."""
    num_heads: int = 4
    """Heads H."""
    q_lora_rank: int | None = 48
    """Width of the query latent; None projects queries straight from the input."""
    kv_lora_rank: int = 32
    """Width of the key-value latent: what the cache holds, beside rope_dim."""
    nope_dim: int = 32
    """Query/key columns of a head that come from the latent."""
    rope_dim: int = 16
    """Query/key columns shared by all heads; never rotated."""
    v_dim: int = 32
    """Value width of a head."""
    use_output_gate: bool = True
    """Multiplies the attention output by sigmoid(x W_g), elementwise."""

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim")
        _check(self.q_lora_rank is None or self.q_lora_rank > 0,
               f"MLAConfig.q_lora_rank: got {self.q_lora_rank}, wanted None or a positive number")


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
        _positive(self, "num_experts", "experts_per_token", "expert_dim", "routed_scale", "bias_rate", "load_bias", "balance_loss")
        _check(self.experts_per_token < self.num_experts,
               f"MoEConfig.experts_per_token: got {self.experts_per_token}, wanted less than num_experts={self.num_experts}")
        _check(self.bias_ema is None or 0 <= self.bias_ema < 1, f"MoEConfig.bias_ema: got {self.bias_ema}, wanted None or a number in [0, 1)")
        _check(self.num_shared_experts >= 0, f"MoEConfig.num_shared_experts: got {self.num_shared_experts}, wanted 0 or more")
        _check(self.latent_dim is None or self.latent_dim > 0,
               f"MoEConfig.latent_dim: got {self.latent_dim}, wanted None or a positive number")


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """How a sublayer's input is made from what came before it in depth."""
    kind: Literal["block", "full", "plain"] = "block"
    """block: Block Attention Residuals; full: every sublayer's output is a source; plain: the sum."""
    block_size: int = 4
    """Decoder layers a block; used by kind block only. A multiple of mla_every lets layers be scanned."""

    def __post_init__(self) -> None:
        _positive(self, "block_size")


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
    implementation: Literal["auto", "mosaic_gpu", "xla", "reference"] = "auto"
    """Implementation of the KDA operator and of the grouped matmul (pallas_kernels)."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "width", "num_layers", "dense_dim", "norm_eps", "latent_norm_eps", "init_std", "situ_beta")
        _check(self.mla_every >= 0, f"ModelConfig.mla_every: got {self.mla_every}, wanted 0 or more")
        _check(0 <= self.dense_layers <= self.num_layers,
               f"ModelConfig.dense_layers: got {self.dense_layers}, wanted 0 to num_layers={self.num_layers}")
        outside = [i for i in self.mla_layers or () if not 1 <= i <= self.num_layers]
        _check(not outside, f"ModelConfig.mla_layers: got {outside}, wanted 1-based indices up to num_layers={self.num_layers}")

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


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 (at most one axis) takes what the others leave."""
    data: int = 1
    """Replicates parameters, splits the batch."""
    fsdp: int = -1
    """Splits parameters and the batch."""
    expert: int = 1
    """Splits experts and the batch."""
    tensor: int = 1
    """Splits heads and hidden widths."""
    context: int = 1
    """Splits the sequence."""

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        _check(all(size == -1 or size > 0 for size in sizes.values()), f"MeshConfig: got {sizes}, wanted positive sizes, or -1 on one axis")
        _check(list(sizes.values()).count(-1) <= 1, f"MeshConfig: got {sizes}, wanted -1 on at most one axis")


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of documents (docs/data.md says how each kind is read)."""
    kind: Literal["token_folder", "text", "jsonl", "parquet", "array_record", "hugging_face"] = "token_folder"
    """token_folder: what `longmoe data build` wrote; text: one document a file; jsonl: one a line, also .gz and .zst; hugging_face: a dataset on disk."""
    path: str = ""
    """The folder or file; a folder is read with all its subfolders."""
    name: str = ""
    """Names the source in states, batches and reports, unique in a run; the path's last part where empty."""
    weight: float = 1.0
    """Share of the tokens, relative to the other sources' weights; 0 takes no new document and finishes open ones."""
    content: Literal["text", "messages"] = "text"
    """text: every token is a target; messages: a conversation of [{role, content}, ...], only the assistant's tokens are targets."""
    field: str = ""
    """Field or column that holds the content; where empty, "text" or "messages" as `content` says. * takes the whole record."""
    licence: str = ""
    """Licence of the text, for reports; a token folder brings its own."""
    suffixes: tuple[str, ...] = ()
    """Files of a folder that are read, by the end of their names; where empty, the usual ones of the kind."""

    def __post_init__(self) -> None:
        for name in ("kind", "content"):   # a JSON list of sources comes without tyro's checks
            wanted = typing.get_args(typing.get_type_hints(SourceConfig)[name])
            _check(getattr(self, name) in wanted, f"SourceConfig.{name}: got {getattr(self, name)!r}, wanted one of {', '.join(wanted)}")
        _check(bool(self.path), "SourceConfig.path: got nothing, wanted a folder or a file")
        _check(isinstance(self.weight, int | float) and 0 <= self.weight < math.inf,
               f"SourceConfig.weight: got {self.weight!r}, wanted 0 or a positive number")
        _check(self.content == "text" or self.kind not in ("token_folder", "text"),
               f"SourceConfig.content: got {self.content!r} with kind {self.kind!r}, wanted 'text'; conversations come from records (jsonl, parquet, ...), "
               "and a token folder holds its own masks")
        for name, kinds in (("field", ("jsonl", "parquet", "array_record", "hugging_face")), ("suffixes", ("text", "jsonl", "parquet", "array_record"))):
            _check(not getattr(self, name) or self.kind in kinds,
                   f"SourceConfig.{name}: got {getattr(self, name)!r} with kind {self.kind!r}, which has none; wanted it left empty")

    @property
    def label(self) -> str:
        """`name`, or the path's last part."""
        return self.name or pathlib.PurePath(self.path).name or self.path


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a step's batch is made of."""
    path: str = ""
    """A token folder (`longmoe data build` makes one) as the only source; used by task text."""
    sources: tuple[SourceConfig, ...] = ()
    """Sources that are mixed, in place of `path`. On the command line `--data.sources FILE` reads a JSON list of them."""
    tokenizer: str = ""
    """Tokenizer of the sources that are text: "bytes", a tokenizer.json or a token folder. Where empty, that of the sources that are token folders."""
    task: Literal["text", "associative_recall"] = "text"
    """text: packed documents of `path` or `sources`; associative_recall: generated key-value pairs with queries."""
    sequence_length: int = 256
    """Tokens a row, T."""
    batch_size: int = 16
    """Rows a step over all devices and micro-batches, B."""
    num_pairs: int = 16
    """Key-value pairs a row; used by task associative_recall."""
    prefetch: int = 2
    """Batches made ahead of the step that takes them, by a thread; 0 makes each when it is asked for. Changes no batch."""
    workers: int = 0
    """Grain's threads that read and tokenise ahead for each source; 0 reads without Grain. Changes no batch."""

    def __post_init__(self) -> None:
        _positive(self, "sequence_length", "batch_size", "num_pairs")
        for name in ("prefetch", "workers"):
            _check(getattr(self, name) >= 0, f"DataConfig.{name}: got {getattr(self, name)}, wanted 0 or more")
        _check(not (self.path and self.sources), f"DataConfig.path: got {self.path!r} beside sources, wanted one of the two; "
               "list the folder among the sources")
        labels = [source.label for source in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        _check(not twice, f"DataConfig.sources: got {twice} more than once, wanted a name of its own for each source")
        _check(not self.sources or any(source.weight > 0 for source in self.sources),
               "DataConfig.sources: got no weight above 0, wanted at least one source to take documents from")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Muon for matrices or AdamW for all, a schedule with linear warm-up, and what keeps steps from growing too large."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: matrices by Muon, everything else (embedding, head, router, vectors) by AdamW; adamw: everything by AdamW."""
    muon_rms: float = 0.2
    """Root mean square of Muon's update before the learning rate: 0.2 lets Muon share AdamW's learning rate (Moonlight)."""
    muon_momentum: float = 0.95
    """Momentum of Muon, Nesterov's form."""
    muon_per_head: bool = True
    """Muon takes each head of KDA's q, k, v and of MLA's q_b and kv_b projections (keys and values apart) as a matrix of its own (Kimi K3's
    Per-Head Muon); False takes each projection as one matrix."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to final_learning_rate; wsd stays at the peak and falls linearly to it over the last decay_share; constant."""
    decay_share: float = 0.2
    """Last share of all steps in which schedule wsd falls."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    final_learning_rate: float = 3e-4
    """Learning rate that schedules cosine and wsd end at."""
    warmup_steps: int = 50
    """Steps of linear warm-up from 0."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices; norms, biases, decay gates, convolutions and AttnRes vectors carry none."""
    gradient_clip: float | None = 1.0
    """Largest global gradient norm; None never clips."""
    qk_clip: float | None = None
    """Largest attention logit of an MLA head: after a step whose forward pass exceeded it, the head's query and key weights are scaled down
    (QK-Clip, Kimi K2; 100 there); None never clips and computes nothing for it."""
    z_loss: float = 0.0
    """Factor on the squared log-partition of the logits."""
    loss_chunk: int = 2048
    """Tokens whose logits exist at one time, per device group."""

    def __post_init__(self) -> None:
        _positive(self, "learning_rate", "eps", "loss_chunk", "muon_rms")
        _check(self.warmup_steps >= 0, f"OptimConfig.warmup_steps: got {self.warmup_steps}, wanted 0 or more")
        for name in ("beta1", "beta2", "muon_momentum"):
            _check(0 <= getattr(self, name) < 1, f"OptimConfig.{name}: got {getattr(self, name)}, wanted a number in [0, 1)")
        _check(0 < self.decay_share <= 1, f"OptimConfig.decay_share: got {self.decay_share}, wanted a number in (0, 1]")
        for name in ("weight_decay", "z_loss", "final_learning_rate"):
            _check(getattr(self, name) >= 0, f"OptimConfig.{name}: got {getattr(self, name)}, wanted 0 or more")
        for name in ("gradient_clip", "qk_clip"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"OptimConfig.{name}: got {value}, wanted None or a positive number")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves its state."""
    every: int = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps are kept for good; None keeps only the newest. A checkpoint is made at multiples of `every`."""

    def __post_init__(self) -> None:
        _positive(self, "every", "keep")
        _check(self.keep_every is None or self.keep_every > 0, f"CheckpointConfig.keep_every: got {self.keep_every}, wanted None or a positive number")


@dataclasses.dataclass(frozen=True)
class AlertConfig:
    """When and how a run calls for help. Nothing is sent while command and webhook are empty."""
    command: str = ""
    """Command line (no shell) that gets each alert as JSON on its standard input."""
    webhook: str = ""
    """http(s) address that each alert is POSTed to as JSON."""
    on_skipped: bool = True
    """Alerts on a step whose gradients were not finite."""
    stall_seconds: float | None = None
    """Alerts when no step has ended for so long, compilation apart; longer than a checkpoint takes. None: never."""
    max_violation: float | None = None
    """Alerts when MaxVio of any MoE layer is above this. None: never."""
    every_seconds: float = 600.0
    """Least seconds between two alerts of one kind; those in between are counted in the next."""
    timeout_seconds: float = 30.0
    """Seconds that one delivery may take."""

    def __post_init__(self) -> None:
        _positive(self, "timeout_seconds")
        _check(self.every_seconds >= 0, f"AlertConfig.every_seconds: got {self.every_seconds}, wanted 0 or more")
        _check(not self.webhook or self.webhook.startswith(("http://", "https://")),
               f"AlertConfig.webhook: got {self.webhook!r}, wanted an address that begins with http:// or https://")
        for name in ("stall_seconds", "max_violation"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"AlertConfig.{name}: got {value}, wanted None or a positive number")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Where a run's figures go beside metrics.jsonl, which is always written."""
    tensorboard: bool = False
    """Also writes TensorBoard events into the run's folder tensorboard/ (needs the `log` extra)."""
    wandb_project: str = ""
    """Also logs to this Weights & Biases project (needs the `log` extra); empty: does not."""
    run_index: bool = True
    """Keeps index.html in the folder that holds the run's folder: one line a run."""
    alerts: AlertConfig = AlertConfig()


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that a run is."""
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    steps: int = 1000
    """Optimizer steps in all."""
    accumulation_steps: int = 1
    """Micro-batches that a step's batch is cut into."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    max_skipped_steps: int = 5
    """Steps in a row with gradients that are not finite before the run stops."""
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "steps", "accumulation_steps", "log_every", "max_skipped_steps")
        _check(self.data.batch_size % self.accumulation_steps == 0,
               f"TrainConfig.accumulation_steps: got {self.accumulation_steps}, wanted a divisor of data.batch_size={self.data.batch_size}")


def to_json(config: Any) -> str:
    """Any config of this file as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json[C](kind: type[C], text: str) -> C:
    """The config of class `kind` that `to_json` wrote. ValueError names fields that are unknown."""
    return _from_plain(kind, json.loads(text), kind.__name__)


def _from_plain(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        _check(isinstance(value, dict), f"{path}: got {value!r}, wanted an object with some of {sorted(typing.get_type_hints(kind))}")
        fields = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(fields))
        _check(not unknown, f"{path}: got unknown fields {unknown}, wanted some of {sorted(fields)}")
        return kind(**{name: _from_plain(fields[name], item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(value, list):
        item = next((a for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is tuple for a in typing.get_args(k)[:1]), None)
        return tuple(_from_plain(item, part, f"{path}[{i}]") for i, part in enumerate(value))
    if isinstance(kind, types.UnionType) and float in typing.get_args(kind) and isinstance(value, int):
        return float(value)
    return value
