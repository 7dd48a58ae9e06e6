"""Flax modules on fused ops, with the arguments and the parameters of Flax's own: `linen` and `nnx`.

    from fusedops.nn import linen
    layer = linen.MultiHeadDotProductAttention(num_heads=8, is_causal=True)

A checkpoint of a model with Flax's modules loads into the same model with these, and the other way
round. Flax is imported with `fusedops.nn.linen` or `fusedops.nn.nnx`, not before.
"""
