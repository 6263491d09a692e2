"""Decoding far past the prompt, on many prompts, and what a token costs at a long context."""
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import VOCAB, tiny_model

import longmoe
from longmoe.inference.engine import Decoding, decode
from longmoe.inference.sampling import Sampling
from longmoe.model.lm import LongMoE, init_cache, init_variables
from pallas_kernels.testing import rms_ratio

LENGTHS = np.array([200, 63, 129])
PROMPT, NEW = 200, 64


@pytest.fixture(scope="module")
def case():
    model = LongMoE(tiny_model())
    variables = init_variables(model.model_config, jax.random.key(5))
    return model, variables, np.asarray(jax.random.randint(jax.random.key(6), (3, PROMPT + NEW), 0, VOCAB))


@pytest.fixture(scope="module")
def teacher_forced(case):
    """(prefill and then one token at a time) -> logits of the prompt and of the NEW tokens after it, for prompts padded to the given width."""
    model, variables, tokens = case

    @jax.jit
    def run(prompt, lengths, following):
        cache = init_cache(model.model_config, 3, PROMPT + 2 * NEW)
        valid = (jnp.arange(prompt.shape[1]) < lengths[:, None]).astype(jnp.int32)
        first = model.apply(variables, prompt, valid, cache=cache)

        def step(cache, token):
            output = model.apply(variables, token[:, None], cache=cache)
            return output.cache, output.logits[:, 0]

        return first.logits, jnp.moveaxis(jax.lax.scan(step, first.cache, following.T)[1], 0, 1)

    following = np.take_along_axis(tokens, LENGTHS[:, None] + np.arange(NEW), axis=1)

    def padded(width, filler):
        prompt = np.full((3, width), filler, np.int32)
        for row, length in enumerate(LENGTHS):
            prompt[row, :length] = tokens[row, :length]
        return run(prompt, LENGTHS, following)

    return padded


@pytest.fixture(scope="module")
def decoded(teacher_forced):
    return teacher_forced(PROMPT, 0)


@pytest.mark.slow
def test_64_tokens_after_a_ragged_batch_of_200_equal_the_forward_pass(case, decoded):
    model, variables, tokens = case
    whole = jax.jit(model.apply)(variables, tokens).logits
    for row, length in enumerate(LENGTHS):
        assert rms_ratio(decoded[0][row, :length], whole[row, :length]) < 1e-5
        assert rms_ratio(decoded[1][row], whole[row, length:length + NEW]) < 1e-5
        # Each token by itself: an error that grew with the distance would hide in the mean over all.
        assert rms_ratio(decoded[1][row, -1], whole[row, length + NEW - 1]) < 1e-5


@pytest.mark.slow
def test_what_pads_the_prompts_changes_no_bit(teacher_forced, decoded):
    for got, want in zip(teacher_forced(PROMPT, 7), decoded):
        valid = np.ones(got.shape[:2], bool) if got.shape[1] == NEW else np.arange(PROMPT) < LENGTHS[:, None]
        np.testing.assert_array_equal(np.asarray(got)[valid], np.asarray(want)[valid])


@pytest.mark.exhaustive
def test_more_padding_changes_nothing(teacher_forced, decoded):
    assert rms_ratio(teacher_forced(PROMPT + 41, 3)[1], decoded[1]) < 1e-5


@pytest.mark.exhaustive
def test_greedy_equals_recomputation_for_100_prompts(case):
    model, variables, _ = case
    rows, width, new = 100, 40, 12
    draw = np.random.default_rng(8)
    lengths = draw.integers(1, width + 1, rows)
    text = np.where(np.arange(width + new) < lengths[:, None], draw.integers(0, VOCAB, (rows, width + new)), 0).astype(np.int32)
    got = np.asarray(longmoe.generate(model, variables, text[:, :width], max_new_tokens=new, prompt_lengths=lengths))
    apply = jax.jit(lambda tokens: jnp.argmax(model.apply(variables, tokens).logits, axis=-1))
    for i in range(new):
        text[np.arange(rows), lengths + i] = np.asarray(apply(text))[np.arange(rows), lengths + i - 1]
    np.testing.assert_array_equal(got, np.take_along_axis(text, lengths[:, None] + np.arange(new), axis=1))


@pytest.mark.exhaustive
def test_a_token_costs_the_same_after_256_and_after_4096():
    """All layers KDA: what they keep has one size. One program, states of both contexts in turn, the median of the pairs' ratios of times."""
    config = dataclasses.replace(longmoe.presets.nano().model, mla_every=0)
    model = LongMoE(config)
    variables = init_variables(config, jax.random.key(0))
    chunk, new = 256, 16
    read = jax.jit(lambda tokens, cache: model.apply(variables, tokens, cache=cache, return_hidden=True).cache)
    tokens = jax.random.randint(jax.random.key(1), (1, 4096), 0, config.vocab_size)
    # The capacity is asked for as if MLA layers had to hold it all.
    cache, caches = init_cache(config, 1, 4096 + new), {}
    for end in range(chunk, 4096 + 1, chunk):
        cache = read(tokens[:, end - chunk:end], cache)
        caches[end] = cache
    keys = jax.random.split(jax.random.key(2), new)

    def seconds(context):
        state = jax.block_until_ready(Decoding(token=jnp.zeros(1, jnp.int32), cache=jax.tree.map(jnp.copy, caches[context]), ended=jnp.zeros(1, bool)))
        begin = time.perf_counter()
        jax.block_until_ready(decode(model, Sampling(), None, variables, state, keys))
        return time.perf_counter() - begin

    seconds(256), seconds(4096)
    ratios = [late / early for early, late in ((seconds(256), seconds(4096)) for _ in range(60))]
    ratios += [late / early for late, early in ((seconds(4096), seconds(256)) for _ in range(60))]
    print(f"a token at 4,096 against 256: {statistics.median(ratios):.3f}")
    assert statistics.median(ratios) < 1.1
