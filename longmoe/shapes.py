"""Array annotations and the letters that they are written in.

    B  rows (batch)          T  tokens of a row       D  model width          V  vocabulary
    H  heads                 Dk key width a head      Dv value width a head
    N  tokens, flattened     E  routed experts        K  experts a token      F  expert hidden width      Z  latent width
    L  layers                S  depth sources of an attention residual
"""
from jaxtyping import Array, Bool, Float, Int

Tokens = Int[Array, "B T"]
"""Token ids, int32."""
SegmentIds = Int[Array, "B T"]
"""Packed-document ids, int32; 0 is padding."""
Hidden = Float[Array, "B T D"]
"""Activations between sublayers."""

__all__ = ["Array", "Bool", "Float", "Hidden", "Int", "SegmentIds", "Tokens"]
