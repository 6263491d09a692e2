"""Initialisation: the mimetic start ties what its description says, in both layouts, and the normal one ties nothing."""
import dataclasses

import jax
import numpy as np
import pytest
from tiny_config import tiny_model

import longmoe
from longmoe.model.kda import KDA, MIMETIC_NOISE


def kda_layers(model):
    """Each KDA layer's parameters, and the whole tree in the per-layer layout."""
    params = jax.device_get(longmoe.unstack_layers(model, longmoe.init_variables(model, jax.random.key(0)))["params"])
    return [params[f"layer_{i:02d}"]["kda"] for i, mixer in enumerate(model.mixers) if mixer == "kda"], params


@pytest.mark.parametrize("scan", [True, False])
def test_mimetic_ties(scan):
    layers, params = kda_layers(tiny_model(init="mimetic", num_layers=4, dense_layers=0, scan_layers=scan))
    np.testing.assert_array_equal(params["lm_head"], params["embedding"].T)
    for layer in layers:
        np.testing.assert_array_equal(layer["k_proj"]["kernel"], layer["q_proj"]["kernel"])
        np.testing.assert_array_equal(layer["o_proj"]["kernel"], layer["v_proj"]["kernel"].T)
        taps = {name: layer[f"{name}_conv"] for name in "qkv"}
        for name, tap in (("q", 3), ("k", 2), ("v", 3)):
            rest = taps[name] - np.eye(4)[tap][:, None]
            assert np.abs(rest).max() <= MIMETIC_NOISE / 2
    # Layers are drawn apart from one another.
    assert len({layer["q_proj"]["kernel"].tobytes() for layer in layers}) == len(layers)


def test_normal_ties_nothing():
    layers, params = kda_layers(tiny_model(num_layers=2))
    assert np.abs(params["lm_head"] - params["embedding"].T).max() > 0.01
    assert all(np.abs(layer["k_proj"]["kernel"] - layer["q_proj"]["kernel"]).max() > 0.01 for layer in layers)


def test_one_tap_has_no_previous_token():
    model = tiny_model(init="mimetic", num_layers=2)
    model = dataclasses.replace(model, kda=dataclasses.replace(model.kda, conv_width=1))
    assert all(np.abs(layer["k_conv"] - 1).max() <= MIMETIC_NOISE for layer in kda_layers(model)[0])


@pytest.mark.parametrize("low,high", [(0.001, 0.1), (1e-6, 1e-2)])
def test_a_channel_first_forgets_by_its_step(low, high):
    """Under the bounded gate with a pre-activation of zero the log decay is -5 (1 - exp(-step))."""
    model = tiny_model()
    layer = KDA(dataclasses.replace(model, kda=dataclasses.replace(model.kda, dt_min=low, dt_max=high, num_heads=8, head_dim=64)))
    bias = np.asarray(layer.init(jax.random.key(0), np.zeros((1, 8, 32), np.float32))["params"]["dt_bias"], np.float64)
    steps = -np.log1p(-1 / (1 + np.exp(-bias)))
    assert low * 0.99 < steps.min() < 2 * low and high / 2 < steps.max() < high * 1.01
    assert abs(np.median(np.log(steps)) - np.log(low * high) / 2) < 0.15 * np.log(high / low)
    with pytest.raises(ValueError, match=r"KDAConfig.dt_max: got 0.0001 with dt_min=0.001"):
        dataclasses.replace(model.kda, dt_max=1e-4)
