"""How a model is trained: optimizer, checkpoints, logs, and the whole of a run."""
import dataclasses
from typing import Literal

from longmoe.configs.checks import check, positive
from longmoe.configs.data import DataConfig
from longmoe.configs.mesh import MeshConfig
from longmoe.configs.model import ModelConfig
from longmoe.configs.stages import StageConfig


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
        positive(self, "learning_rate", "eps", "loss_chunk", "muon_rms")
        check(self.warmup_steps >= 0, f"OptimConfig.warmup_steps: got {self.warmup_steps}, wanted 0 or more")
        for name in ("beta1", "beta2", "muon_momentum"):
            check(0 <= getattr(self, name) < 1, f"OptimConfig.{name}: got {getattr(self, name)}, wanted a number in [0, 1)")
        check(0 < self.decay_share <= 1, f"OptimConfig.decay_share: got {self.decay_share}, wanted a number in (0, 1]")
        for name in ("weight_decay", "z_loss", "final_learning_rate"):
            check(getattr(self, name) >= 0, f"OptimConfig.{name}: got {getattr(self, name)}, wanted 0 or more")
        for name in ("gradient_clip", "qk_clip"):
            value = getattr(self, name)
            check(value is None or value > 0, f"OptimConfig.{name}: got {value}, wanted None or a positive number")


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
        positive(self, "every", "keep")
        check(self.keep_every is None or self.keep_every > 0, f"CheckpointConfig.keep_every: got {self.keep_every}, wanted None or a positive number")


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
        positive(self, "timeout_seconds")
        check(self.every_seconds >= 0, f"AlertConfig.every_seconds: got {self.every_seconds}, wanted 0 or more")
        check(not self.webhook or self.webhook.startswith(("http://", "https://")),
               f"AlertConfig.webhook: got {self.webhook!r}, wanted an address that begins with http:// or https://")
        for name in ("stall_seconds", "max_violation"):
            value = getattr(self, name)
            check(value is None or value > 0, f"AlertConfig.{name}: got {value}, wanted None or a positive number")


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
    stages: tuple[StageConfig, ...] = ()
    """Stretches of the run whose rows, sources' weights or mesh differ (docs/stages.md), `steps` long together. On the command line `--stages FILE` reads a
    JSON list of them and sets `steps`."""
    accumulation_steps: int = 1
    """Micro-batches that a step's batch is cut into."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    max_skipped_steps: int = 5
    """Steps in a row with gradients that are not finite before the run stops."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, "steps", "accumulation_steps", "log_every", "max_skipped_steps")
        check(self.data.batch_size % self.accumulation_steps == 0,
               f"TrainConfig.accumulation_steps: got {self.accumulation_steps}, wanted a divisor of data.batch_size={self.data.batch_size}")
        for index, stage in enumerate(self.stages):
            _check_stage(self, index, stage)
        steps = self._steps_of(self.stages)
        check(not self.stages or self.steps == steps, f"TrainConfig.steps: got {self.steps} with stages of {steps} steps in all, wanted {steps}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all rows of a step, the same in every stage."""
        return self.data.batch_size * self.data.sequence_length

    def with_stages(self, stages: tuple[StageConfig, ...]) -> "TrainConfig":
        """This config with `stages`, and as many steps as they take together."""
        return dataclasses.replace(self, stages=stages, steps=self._steps_of(stages))

    def _steps_of(self, stages: tuple[StageConfig, ...]) -> int:
        return sum(stage.tokens // self.tokens_per_step for stage in stages)


def _check_stage(cfg: TrainConfig, index: int, stage: StageConfig) -> None:
    name = f"TrainConfig.stages[{index}]"
    check(cfg.tokens_per_step % stage.sequence_length == 0, f"{name}.sequence_length: got {stage.sequence_length}, wanted a divisor of {cfg.tokens_per_step}, "
          "the tokens of a step (data.batch_size * data.sequence_length)")
    check(stage.tokens % cfg.tokens_per_step == 0, f"{name}.tokens: got {stage.tokens:,}, wanted a multiple of {cfg.tokens_per_step:,}, the tokens of a step")
    labels = [source.label for source in cfg.data.sources]
    unknown = sorted({name for name, _ in stage.weights} - set(labels))
    check(not unknown, f"{name}.weights: got {', '.join(unknown)}, wanted names of data.sources ({', '.join(labels) or 'none are listed'})")
    check(cfg.data.task == "text" or not stage.gate.asked, f"{name}.gate: got {', '.join(stage.gate.asked)} with data.task={cfg.data.task!r}, "
          "wanted none: gates are measured on text")
