"""What the probe says of depth, against sums and gradients by hand."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depth_probe import depth_norms, make_probe
from tiny_config import batch_of, tiny_model

from longmoe.configs import ResidualConfig
from longmoe.model.lm import LongMoE, init_variables

OUTPUT_MATRICES = {"attn": {"kda": "o_proj", "mla": "o_proj"}, "ffn": {"mlp": "down_proj"}}


def probed(**changes):
    model = tiny_model(init_std=0.3, implementation="reference", **changes)
    variables, batch = init_variables(model, jax.random.key(1)), batch_of(jax.random.key(2), rows=2)
    return model, variables, batch, make_probe(model)(variables, batch)


def test_gradients_agree_with_those_of_the_output_matrices():
    """A sublayer's output y is linear in its last matrix W, so that <dloss/dy, y> = <dloss/dW, W>, whatever is made of y later:
    here a mixture that the feed-forward reads, and one that the head reads."""
    model, variables, batch, depths = probed(num_layers=1, dense_layers=1, mla_every=0, use_final_mla=False, residual=ResidualConfig("block", 1))

    @jax.jit
    @jax.grad
    def by_parameters(params):
        logits = LongMoE(model).apply({**variables, "params": params}, batch["tokens"], batch["segment_ids"]).logits
        nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.sum(nll * batch["loss_weights"]) / jnp.sum(batch["loss_weights"])

    gradients = by_parameters(variables["params"])
    assert sorted(depths.gradients) == ["layer_00/attn", "layer_00/ffn"] == sorted(depths.inputs) == sorted(depths.outputs)
    for site, gradient in depths.gradients.items():
        layer, kind = site.split("/")
        matrix = next(name for name in OUTPUT_MATRICES[kind] if name in variables["params"][layer])
        pick = lambda tree: tree[layer][matrix][OUTPUT_MATRICES[kind][matrix]]["kernel"]  # noqa: B023
        by_hand = float(jnp.vdot(pick(gradients), pick(variables["params"])))
        assert abs(by_hand) > 1e-4 and float(jnp.vdot(gradient, depths.outputs[site])) == pytest.approx(by_hand, rel=1e-3), site


def test_a_plain_residual_is_a_sum_and_its_last_gradient_is_the_heads():
    """Of three layers whose variables are stacked: the probe takes them apart."""
    model, variables, batch, depths = probed(num_layers=3, mla_every=1, dense_layers=3, residual=ResidualConfig("plain"))
    assert "layers_00_03" in variables["params"]
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
    stream = params["embedding"][np.asarray(batch["tokens"])]
    for site in sorted(depths.outputs):
        np.testing.assert_allclose(depths.inputs[site], stream, rtol=1e-5, atol=1e-5)
        stream = stream + np.asarray(depths.outputs[site], np.float64)
    scale = 1 / np.sqrt(np.mean(stream**2, axis=-1, keepdims=True) + model.norm_eps)
    logits = stream * scale * params["final_norm"]["scale"] @ params["lm_head"]
    weights = np.asarray(batch["loss_weights"], np.float64)
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    d_logits = (probabilities - np.eye(model.vocab_size)[np.asarray(batch["targets"])]) * weights[..., None] / weights.sum()
    d_normed = d_logits @ params["lm_head"].T * params["final_norm"]["scale"]
    by_hand = scale * (d_normed - stream * scale**2 * np.mean(d_normed * stream, axis=-1, keepdims=True))
    np.testing.assert_allclose(depths.gradients["layer_02/ffn"], by_hand, rtol=1e-3, atol=1e-7)
    norms = depth_norms(depths, batch["segment_ids"])
    assert norms["gradient_norm"][-1] == pytest.approx(np.sqrt(np.sum(by_hand**2)), rel=1e-4)
    valid = np.asarray(batch["segment_ids"]) > 0
    assert norms["input_rms"][0] == pytest.approx(np.sqrt(np.mean(params["embedding"][np.asarray(batch["tokens"])][valid]**2)), rel=1e-5)

