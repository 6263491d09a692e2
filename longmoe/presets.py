"""The named configurations: functions that return a TrainConfig."""
from longmoe.configs import DataConfig, KDAConfig, MeshConfig, MLAConfig, ModelConfig, MoEConfig, OptimConfig, ResidualConfig, TrainConfig


def nano() -> TrainConfig:
    """Two CPU cores, minutes: every part of the recipe at 2M parameters. For tests, notebooks and the demo.

    Starts mimetic, so that it uses its context within minutes; the bias of a step of few documents is averaged over steps.
    """
    model = ModelConfig(dtype="float32", init_std=0.04, init="mimetic", moe=MoEConfig(bias_ema=0.9))
    return TrainConfig(model=model, optim=OptimConfig(learning_rate=6e-3, muon_rms=0.3))


def small() -> TrainConfig:
    """One 80 GB GPU: 0.81B parameters, 172M active."""
    model = ModelConfig(
        vocab_size=32768, width=768, num_layers=17, dense_dim=3584,
        kda=KDAConfig(num_heads=8, head_dim=128),
        mla=MLAConfig(num_heads=8, q_lora_rank=192, kv_lora_rank=128, nope_dim=64, rope_dim=32, v_dim=64),
        moe=MoEConfig(num_experts=112, experts_per_token=8, latent_dim=384, expert_dim=320, num_shared_experts=2, shared_expert_dim=320),
        remat="full")
    return TrainConfig(
        model=model, data=DataConfig(sequence_length=8192, batch_size=8), steps=20_000, log_every=10,
        optim=OptimConfig(learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=200, loss_chunk=8192))


def base() -> TrainConfig:
    """Eight 80 GB GPUs: 5.9B parameters, 0.74B active."""
    model = ModelConfig(
        vocab_size=65536, width=1280, num_layers=25, dense_dim=6016,
        kda=KDAConfig(num_heads=16, head_dim=128),
        mla=MLAConfig(num_heads=16, q_lora_rank=272, kv_lora_rank=256, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(num_experts=224, experts_per_token=8, latent_dim=640, expert_dim=512, num_shared_experts=2, shared_expert_dim=512),
        remat="full")
    return TrainConfig(
        model=model, mesh=MeshConfig(expert=8, fsdp=-1), data=DataConfig(sequence_length=8192, batch_size=64), steps=50_000,
        accumulation_steps=2, log_every=10,
        optim=OptimConfig(learning_rate=8e-4, final_learning_rate=8e-5, warmup_steps=500, loss_chunk=8192))


def kimi_linear_48b() -> TrainConfig:
    """Kimi-Linear-48B-A3B's architecture: softplus decay, plain residual, full-width experts, ungated MLA."""
    model = ModelConfig(
        vocab_size=163840, width=2304, num_layers=27, dense_dim=9216, activation="swiglu",
        kda=KDAConfig(num_heads=32, head_dim=128, gate="softplus", output_gate="low_rank"),
        mla=MLAConfig(num_heads=32, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, use_output_gate=False),
        moe=MoEConfig(num_experts=256, experts_per_token=8, latent_dim=None, expert_dim=1024, num_shared_experts=1, shared_expert_dim=1024,
                      use_latent_norm=False, routed_scale=2.446),
        residual=ResidualConfig(kind="plain"), param_dtype="bfloat16", remat="full")
    return TrainConfig(
        model=model, mesh=MeshConfig(expert=8, fsdp=-1), data=DataConfig(sequence_length=4096, batch_size=512), steps=100_000,
        accumulation_steps=4, log_every=10,
        optim=OptimConfig(learning_rate=1.1e-3, final_learning_rate=1.1e-4, warmup_steps=1000, schedule="wsd", muon_per_head=False, qk_clip=100.0,
                          loss_chunk=8192))


def kimi_k3() -> TrainConfig:
    """Kimi K3's text model: 2.78T parameters, 104.2B active. Planned and lowered here, not trained."""
    model = ModelConfig(
        vocab_size=163840, width=7168, num_layers=93, dense_dim=33792,
        kda=KDAConfig(num_heads=96, head_dim=128),
        mla=MLAConfig(num_heads=96, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(num_experts=896, experts_per_token=16, latent_dim=3584, expert_dim=3072, num_shared_experts=2,
                      shared_expert_dim=3072),
        residual=ResidualConfig(kind="block", block_size=12), param_dtype="bfloat16", remat="full")
    return TrainConfig(
        model=model, mesh=MeshConfig(expert=8, fsdp=-1), data=DataConfig(sequence_length=8192, batch_size=1024), steps=500_000,
        accumulation_steps=1, log_every=10,
        optim=OptimConfig(learning_rate=2e-4, final_learning_rate=2e-5, warmup_steps=5000, qk_clip=100.0, loss_chunk=8192))


PRESETS = {preset.__name__: preset for preset in (nano, small, base, kimi_linear_48b, kimi_k3)}
