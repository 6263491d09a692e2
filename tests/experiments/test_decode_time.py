"""The made caches are those that generation keeps."""
import jax
import numpy as np
import pytest
from decode_time import array_bytes, decode_milliseconds, filled_cache
from tiny_config import tiny_model

from longmoe.inference.serving_costs import ServingConfig, serving_costs
from longmoe.model.cache import MLACache
from longmoe.model.lm import init_cache


@pytest.mark.parametrize("mla_every", [0, 4, 2, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_the_arrays_are_those_on_paper(mla_every, dtype):
    model = tiny_model(mla_every=mla_every, use_final_mla=False, dtype=dtype)
    paper = serving_costs(model, ServingConfig(devices=1, weights="float32", cache=dtype), (96, 4096))
    assert [array_bytes(model, row.length) for row in paper.rows] == [row.sequence_bytes for row in paper.rows]


def test_a_made_cache_stands_at_its_position():
    model = tiny_model(dtype="bfloat16")
    cache, empty = filled_cache(model, 48, 40, jax.random.key(0)), init_cache(model, 1, 48)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)
    entries = [entry for entry in jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, MLACache)) if isinstance(entry, MLACache)]
    assert len(entries) == 4 - 1 and all(np.all(np.asarray(entry.length) == 40) for entry in entries)
    assert all(0.9 < float(np.std(np.asarray(entry.latent, np.float32))) < 1.1 for entry in entries)


def test_repeats_go_on_from_each_other_up_to_the_context():
    found = decode_milliseconds(tiny_model(num_layers=1, mla_every=1, dense_layers=1), (32, 48), tokens=4, repeats=3)
    assert list(found) == [32, 48] and all(len(times) == 3 and min(times) > 0 for times in found.values())
