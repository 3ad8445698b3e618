"""Causal self-attention with rotary positions and grouped key/value heads."""

from collections.abc import Callable
from typing import Protocol

from twell_numba.device.arrays import Array
from twell_numba.kernels.attention import causal_attention, causal_attention_backward
from twell_numba.kernels.rotary import rotary, rotary_backward
from twell_numba.layers.linear import Linear
from twell_numba.layers.parameter import Parameter


class KeyValueStore(Protocol):
    """What attention needs of a cache: it takes new keys and values, and attends to all so far."""

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Take q (B, S, H, head width), and k and v (B, S, G, head width) of the same tokens.

        Return what the queries find among the keys of all positions, in q's shape.
        """
        ...


class Attention:
    """Self-attention of a Llama block; as in Qwen2 with biases, where they are given.

    H query heads share G key and value heads (grouped-query attention, Ainslie et al., 2023), with
    H divisible by G. Queries and keys are turned by their position (rotary embedding, Su et al.,
    2021).

    Parameters
    ----------
    prefix : str
        Of the weights' names in a checkpoint: ``{prefix}.q_proj.weight`` and so on.
    n_heads, n_kv_heads : int
        H and G.
    query : array, shape (H * head width, D)
    key, value : array, shape (G * head width, D)
    output : array, shape (D, H * head width)
    query_bias, key_bias, value_bias : array, shape (rows of the weight,), optional
    output_bias : array, shape (D,), optional

    Raises
    ------
    ValueError
        If the weights' shapes do not fit the numbers of heads.
    """

    def __init__(
        self,
        prefix: str,
        n_heads: int,
        n_kv_heads: int,
        query: Array,
        key: Array,
        value: Array,
        output: Array,
        query_bias: Array | None = None,
        key_bias: Array | None = None,
        value_bias: Array | None = None,
        output_bias: Array | None = None,
    ) -> None:
        if n_heads % n_kv_heads or query.shape[0] % n_heads:
            raise ValueError(
                f"{n_heads} heads, {n_kv_heads} key/value heads and a query weight of shape "
                f"{query.shape} given; heads divisible by key/value heads and rows by heads wanted"
            )
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_width = query.shape[0] // n_heads
        width = query.shape[1]
        for name, weight, shape in (
            ("key", key, (n_kv_heads * self.head_width, width)),
            ("value", value, (n_kv_heads * self.head_width, width)),
            ("output", output, (width, query.shape[0])),
        ):
            if weight.shape != shape:
                raise ValueError(
                    f"{name} weight of shape {weight.shape} given, shape {shape} wanted "
                    f"beside a query weight of shape {query.shape}"
                )
        self.query = Linear(f"{prefix}.q_proj.weight", query, query_bias)
        self.key = Linear(f"{prefix}.k_proj.weight", key, key_bias)
        self.value = Linear(f"{prefix}.v_proj.weight", value, value_bias)
        self.output = Linear(f"{prefix}.o_proj.weight", output, output_bias)

    def __call__(
        self,
        x: Array,
        batch: int,
        cos: Array,
        sin: Array,
        cache: KeyValueStore | None = None,
    ) -> tuple[Array, Callable[[Array], Array] | None]:
        """Return Y (M, D) for X (M, D) of ``batch`` sequences, and the backward pass.

        Parameters
        ----------
        x : array, shape (M, D)
            M = batch * S; the tokens of a sequence follow each other.
        batch : int
        cos, sin : array, shape (S, head width / 2)
            Of the positions of these tokens, from ``rotary_tables``.
        cache : KeyValueStore, optional
            Earlier keys and values, to be attended to as well. It takes the new ones. There is no
            backward pass then: None is returned for it.
        """
        tokens = x.shape[0]
        if batch < 1 or tokens % batch:
            raise ValueError(f"{tokens} tokens given, a multiple of the batch of {batch} wanted")
        length = tokens // batch
        query_shape = (batch, length, self.n_heads, self.head_width)
        key_shape = (batch, length, self.n_kv_heads, self.head_width)

        flat_q, backprop_query = self.query(x)
        flat_k, backprop_key = self.key(x)
        flat_v, backprop_value = self.value(x)
        q = rotary(flat_q.reshape(query_shape), cos, sin)
        k = rotary(flat_k.reshape(key_shape), cos, sin)
        v = flat_v.reshape(key_shape)
        if cache is not None:
            y, _ = self.output(cache.attend(q, k, v).reshape(flat_q.shape))
            return y, None

        mixed, log_sum_exp = causal_attention(q, k, v)
        y, backprop_output = self.output(mixed.reshape(flat_q.shape))

        def backprop(dy: Array) -> Array:
            dmixed = backprop_output(dy).reshape(query_shape)
            dq, dk, dv = causal_attention_backward(dmixed, q, k, v, mixed, log_sum_exp)
            dx = backprop_query(rotary_backward(dq, cos, sin).reshape(flat_q.shape))
            backprop_key(rotary_backward(dk, cos, sin).reshape(flat_k.shape), dx)
            return backprop_value(dv.reshape(flat_v.shape), dx)

        return y, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        projections = (self.query, self.key, self.value, self.output)
        return [parameter for each in projections for parameter in each.parameters()]
