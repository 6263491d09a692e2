"""Reading a prompt and decoding behind it with the kernels, against one pass over all tokens: more rows and heads than a kernel has blocks, prompts of unequal
lengths, scanned layers. Without experts: rounding in bfloat16 would send tokens to others."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longmoe.configs import KDAConfig, MLAConfig, ModelConfig
from longmoe.model.lm import LongMoE, init_cache, init_variables
from pallas_kernels.testing import rms_ratio

pytestmark = pytest.mark.gpu
NEW = 12


@pytest.mark.parametrize("rows,width", [(44, 300), (8, 1500)])
def test_decoded_logits_are_those_of_the_pass(rows, width):
    model = LongMoE(ModelConfig(
        vocab_size=512, width=256, num_layers=9, dense_layers=9, dense_dim=512, init_std=0.05, kda=KDAConfig(num_heads=8, head_dim=128),
        mla=MLAConfig(num_heads=8, q_lora_rank=64, kv_lora_rank=64, nope_dim=64, rope_dim=32, v_dim=64)))
    variables, draw = init_variables(model.model_config, jax.random.key(0)), np.random.default_rng(0)
    lengths = draw.integers(width // 2, width + 1, rows)
    tokens = draw.integers(0, 512, (rows, width + NEW)).astype(np.int32)
    following = np.take_along_axis(tokens, lengths[:, None] + np.arange(NEW), axis=1)

    @jax.jit
    def decoded(variables, prompt, following):
        valid = (jnp.arange(width) < lengths[:, None]).astype(jnp.int32)
        first = model.apply(variables, prompt, valid, cache=init_cache(model.model_config, rows, width + NEW))

        def step(cache, token):
            output = model.apply(variables, token[:, None], cache=cache)
            return output.cache, output.logits[:, 0]

        return first.logits, jnp.moveaxis(jax.lax.scan(step, first.cache, following.T)[1], 0, 1)

    prompt, after = (np.asarray(x, np.float32) for x in decoded(variables, tokens[:, :width], following))
    whole = np.asarray(jax.jit(model.apply)(variables, tokens).logits, np.float32)
    for row, length in enumerate(lengths):
        assert rms_ratio(prompt[row, :length], whole[row, :length]) < 0.08
        assert max(rms_ratio(after[row, i], whole[row, length + i]) for i in range(NEW)) < 0.1
