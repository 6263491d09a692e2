"""Generation against recomputation, chunked prefill, streaming, sampling, refusals (long decoding: test_decode.py)."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_config import VOCAB, tiny_model

import longmoe
from longmoe.configs import MLAConfig, ResidualConfig
from longmoe.inference.engine import STREAM_CHUNK, Decoding, decode, prefill, stream
from longmoe.inference.sampling import Sampling, sample
from longmoe.model import mla
from longmoe.model.lm import LongMoE, init_cache, init_variables
from pallas_kernels.testing import rms_ratio

LENGTHS = np.array([31, 7, 18])


@pytest.fixture(scope="module")
def case():
    model = LongMoE(tiny_model())
    variables = init_variables(model.model_config, jax.random.key(5))
    tokens = jax.random.randint(jax.random.key(6), (3, 43), 0, VOCAB)
    return model, variables, tokens


@pytest.fixture(scope="module")
def whole(case):
    """Logits of one pass over all tokens."""
    model, variables, tokens = case
    return jax.jit(model.apply)(variables, tokens).logits


def test_chunked_prefill_equals_one(case, whole):
    model, variables, tokens = case
    cache = init_cache(model.model_config, 3, 43)
    apply = jax.jit(lambda v, t, c: model.apply(v, t, cache=c))
    first = apply(variables, tokens[:, :20], cache)
    second = apply(variables, tokens[:, 20:40], first.cache)
    assert rms_ratio(np.concatenate([first.logits, second.logits], axis=1), whole[:, :40]) < 1e-5


@pytest.mark.slow
def test_many_tokens_behind_a_cache_are_read_in_chunks(case, whole, monkeypatch):
    """More than CACHED_QUERIES at a time, behind rows that hold unequal numbers of tokens."""
    monkeypatch.setattr(mla, "CACHED_QUERIES", 8)
    model, variables, tokens = case
    apply = jax.jit(model.apply)
    first = apply(variables, tokens[:, :12], (jnp.arange(12) < jnp.asarray([[12], [5], [1]])).astype(jnp.int32), cache=init_cache(model.model_config, 3, 43))
    following = np.stack([np.asarray(tokens)[row, held:held + 29] for row, held in enumerate((12, 5, 1))])
    second = apply(variables, following, cache=first.cache)
    for row, held in enumerate((12, 5, 1)):
        assert rms_ratio(second.logits[row], whole[row, held:held + 29]) < 1e-5


def test_the_memory_of_a_prefill_grows_with_its_prompt_alone():
    """Twice the tokens take about twice the memory, not four times, though every score of a prompt is wanted once."""
    model = LongMoE(tiny_model(mla_every=1, num_layers=2))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))

    def temporaries(width: int) -> int:
        tokens, key = jax.ShapeDtypeStruct((1, width), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
        lowered = prefill.lower(model, Sampling(), None, width + 8, variables, tokens, jax.ShapeDtypeStruct((1,), jnp.int32), key)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16384) < 2.3 * temporaries(8192)


def test_a_token_makes_no_new_cache():
    """Beside the cache, which is written in its place, decoding through scanned layers holds the latents of one layer and not of all."""
    wide = MLAConfig(num_heads=2, q_lora_rank=16, kv_lora_rank=64, nope_dim=8, rope_dim=8, v_dim=8)
    model = LongMoE(tiny_model(mla_every=1, num_layers=4, dense_layers=4, mla=wide, residual=ResidualConfig("plain")))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    state = jax.eval_shape(lambda: Decoding(token=jnp.zeros(3, jnp.int32), cache=init_cache(model.model_config, 3, 8192), ended=jnp.zeros(3, bool)))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    memory = decode.lower(model, Sampling(), None, variables, state, keys).compile().memory_analysis()
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < 0.8 * held


def test_greedy_equals_recomputation(case):
    model, variables, tokens = case
    new = longmoe.generate(model, variables, tokens[:, :31], max_new_tokens=6, prompt_lengths=jnp.asarray(LENGTHS))
    apply = jax.jit(model.apply)                                       # the shape of `whole`: compiled already
    text = np.zeros((3, 43), np.int32)
    for row, length in enumerate(LENGTHS):
        text[row, :length] = tokens[row, :length]
    for i in range(6):
        logits = np.asarray(apply(variables, jnp.asarray(text)).logits)
        text[np.arange(3), LENGTHS + i] = logits[np.arange(3), LENGTHS + i - 1].argmax(axis=-1)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(new[row], text[row, length:length + 6])


def test_padding_content_changes_nothing(case):
    model, variables, tokens = case
    past = jnp.arange(31) >= LENGTHS[:, None]
    run = lambda prompt: longmoe.generate(model, variables, prompt, max_new_tokens=6, prompt_lengths=jnp.asarray(LENGTHS))
    np.testing.assert_array_equal(run(jnp.where(past, 3, tokens[:, :31])), run(jnp.where(past, 44, tokens[:, :31])))


def test_rows_repeat_eos(case):
    model, variables, tokens = case
    run = lambda **keywords: np.asarray(longmoe.generate(model, variables, tokens[:, :31], max_new_tokens=6, prompt_lengths=jnp.asarray(LENGTHS), **keywords))
    free = run()
    eos = int(free[0, 2])
    stopped = run(eos_id=eos)
    for row in range(3):
        ends = np.flatnonzero(free[row] == eos)
        end = ends[0] if ends.size else 6
        np.testing.assert_array_equal(stopped[row, :end], free[row, :end])
        assert (stopped[row, end:] == eos).all()


@pytest.mark.slow
def test_stream_gives_the_same_tokens(case):
    """More tokens than a chunk, drawn, and an end that some rows reach."""
    model, variables, tokens = case
    arguments = dict(max_new_tokens=STREAM_CHUNK + 4, prompt_lengths=jnp.asarray(LENGTHS), temperature=1.0, top_k=20, key=jax.random.key(3))
    whole = np.asarray(longmoe.generate(model, variables, tokens[:, :31], **arguments))
    pieces = list(stream(model, variables, tokens[:, :31], **arguments))
    assert [piece.shape[1] for piece in pieces] == [1, STREAM_CHUNK, 3]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


def test_stream_ends_when_every_row_has(case):
    """One row, whose first token is the end: nothing is decoded after it."""
    model, variables, tokens = case
    arguments = dict(max_new_tokens=6, prompt_lengths=jnp.asarray(LENGTHS))
    first = next(stream(model, variables, tokens[:, :31], **arguments))[:, 0]
    row = int(np.flatnonzero(first == first[0])[0])
    pieces = list(stream(model, variables, jnp.repeat(tokens[row:row + 1, :31], 3, axis=0), eos_id=int(first[row]), max_new_tokens=6,
                         prompt_lengths=jnp.full(3, LENGTHS[row])))
    assert len(pieces) == 1 and (pieces[0] == first[row]).all()


def test_sampling_keeps_to_its_limits():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = lambda **limits: {int(x) for x in jax.vmap(lambda key: sample(logits, key, Sampling(1.0, **limits))[0])(jax.random.split(jax.random.key(0), 500))}
    assert draw() == {0, 1, 2, 3} and draw(top_k=2) == {0, 1} and draw(top_p=0.79) == {0, 1} and draw(top_p=0.81) == {0, 1, 2}
    assert draw(top_p=0.01) == {0} and draw(top_k=1, top_p=1.0) == {0}
    assert int(sample(logits, None, Sampling())[0]) == 0


@pytest.mark.parametrize("keywords,message", [
    (dict(temperature=-1.0), "temperature"), (dict(temperature=1.0), "key"), (dict(top_k=0), "top_k"), (dict(top_p=0.0), "top_p"),
    (dict(max_new_tokens=0), "max_new_tokens"), (dict(prompt_lengths=jnp.array([1, 2, 99])), "prompt_lengths")])
def test_refusals(case, keywords, message):
    model, variables, tokens = case
    with pytest.raises(ValueError, match=message):
        longmoe.generate(model, variables, tokens, **({"max_new_tokens": 2} | keywords))
