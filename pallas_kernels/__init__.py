"""Operators for ultra-long-context sparse models, which import jax only: Kimi Delta Attention and its short convolution, causal attention, the grouped MoE
matmul, its gated activation and its top-k.

    from pallas_kernels import kda
    o, final_state = kda(q, k, v, g, beta, lower_bound=-5.0)     # [B, T, H, D], token-first
"""
from pallas_kernels.attention.api import attention, chosen_attention
from pallas_kernels.attention.visible import first_visible
from pallas_kernels.dispatch import UnsupportedError, kernel_report, use_implementation
from pallas_kernels.gated_activation.api import gated_activation
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.kda.api import kda, kda_segment, kda_step
from pallas_kernels.kda.documents import document_runs
from pallas_kernels.short_conv.api import short_conv
from pallas_kernels.top_k.api import top_k

__all__ = ["UnsupportedError", "attention", "chosen_attention", "document_runs", "first_visible", "gated_activation", "grouped_matmul", "kda", "kda_segment",
           "kda_step", "kernel_report", "short_conv", "top_k", "use_implementation"]
