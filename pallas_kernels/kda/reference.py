"""The recurrence, one token at a time: what every other implementation is measured against. Differentiated by JAX itself."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PRECISION = jax.lax.Precision.HIGHEST


def token(q: Float[Array, "B H Dk"], k: Float[Array, "B H Dk"], v: Float[Array, "B H Dv"], g: Float[Array, "B H Dk"],
          beta: Float[Array, "B H"], state: Float[Array, "B H Dk Dv"], scale: float) -> tuple[Float[Array, "B H Dv"], Float[Array, "B H Dk Dv"]]:
    """One step in the state's dtype: decay, delta-rule write, read. -> o, state."""
    state = jnp.exp(g)[..., None] * state
    read = jnp.einsum("bhk,bhkv->bhv", k, state, precision=PRECISION)
    state = state + k[..., None] * (beta[..., None] * (v - read))[..., None, :]
    return scale * jnp.einsum("bhk,bhkv->bhv", q, state, precision=PRECISION), state


def forward(q: Float[Array, "B T H Dk"], k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], g: Float[Array, "B T H Dk"],
            beta: Float[Array, "B T H"], initial_state: Float[Array, "B H Dk Dv"], owner: Int[Array, "B T"] | None, *,
            scale: float) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H Dk Dv"]]:
    """lax.scan of `token` in the dtype of initial_state. owner: `documents.state_owner`; a change clears the state."""
    dtype = initial_state.dtype
    tokens = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, g, beta)]
    if owner is None:
        clear = None
    else:
        clear = jnp.moveaxis(owner != jnp.pad(owner, ((0, 0), (1, 0)), constant_values=1)[:, :-1], 1, 0)

    def step(state, inputs):
        (q, k, v, g, beta), clear = inputs
        if clear is not None:
            state = jnp.where(clear[:, None, None, None], 0, state)
        o, state = token(q, k, v, g, beta, state, scale)
        return state, o

    state, o = jax.lax.scan(step, initial_state, (tokens, clear))
    return jnp.moveaxis(o, 0, 1), state
