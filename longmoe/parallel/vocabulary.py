"""The embedding lookup on a mesh: left to XLA, tables split over several axes make it look up every token of the batch on every device."""
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from longmoe.parallel.mesh import BATCH_AXES, HIDDEN, check_tokens, is_distributed
from longmoe.parallel.rules import OUT, SHARDED
from longmoe.shapes import Array, Float, Hidden, Tokens


def lookup(table: Float[Array, "V D"], tokens: Tokens) -> Hidden:
    """table[tokens], in the table's dtype; on a mesh each device looks up its own tokens.

    A device gathers the columns of its rows of the table; rows lie over `tensor`, along which the results are summed.
    Raises ValueError where the mesh does not share out rows or tokens evenly.
    """
    def on_shard(table: Array, tokens: Array) -> Array:
        rows = jax.lax.all_gather(table, SHARDED, axis=1, tiled=True)
        own = tokens - jax.lax.axis_index("tensor") * rows.shape[0]
        here = (own >= 0) & (own < rows.shape[0])
        found = jnp.take(rows, jnp.where(here, own, 0), axis=0)
        return jax.lax.psum(jnp.where(here[..., None], found, 0), "tensor")

    if not is_distributed():
        return jnp.take(table, tokens, axis=0)
    check_tokens(tokens)
    return jax.shard_map(on_shard, in_specs=(OUT, PartitionSpec(BATCH_AXES, "context")), out_specs=HIDDEN, check_vma=False)(table, tokens)
