import numpy as np
import pytest

from twell_numba.kernels.attention import causal_attention
from twell_numba.kernels.rotary import rotary_tables
from twell_numba.layers import (
    Attention,
    Embedding,
    Linear,
    Parameter,
    RMSNorm,
    cross_entropy_loss,
)


def make_attention(rng, heads=4, groups=2, head_width=6, width=10):
    def weight(*shape):
        return rng.standard_normal(shape) / np.sqrt(shape[1])

    return Attention(
        "model.layers.0.self_attn",
        heads,
        groups,
        weight(heads * head_width, width),
        weight(groups * head_width, width),
        weight(groups * head_width, width),
        weight(width, heads * head_width),
    )


def check_layer(gradient_check, rng, layer, call, inputs):
    """Compare a layer's gradients, of its input and its parameters, with finite differences."""
    y, backprop = call(*inputs)
    dy = rng.standard_normal(y.shape)
    dx = backprop(dy)
    floats = [array for array in inputs if array.dtype.kind == "f"]
    input_gradients = [] if dx is None else [dx]
    gradient_check(
        lambda: np.sum(dy * call(*inputs)[0]),
        floats + [parameter.value for parameter in layer.parameters()],
        input_gradients + [parameter.grad for parameter in layer.parameters()],
        rng,
    )


def test_linear_gradient(rng, gradient_check):
    layer = Linear("linear.weight", rng.standard_normal((4, 3)))
    check_layer(gradient_check, rng, layer, layer, [rng.standard_normal((5, 3))])


def test_linear_with_a_bias(rng, gradient_check):
    weight, bias = rng.standard_normal((4, 3)), rng.standard_normal(4)
    layer = Linear("proj.weight", weight, bias)
    x = rng.standard_normal((5, 3))
    np.testing.assert_allclose(layer(x)[0], x @ weight.T + bias)
    assert [(p.name, p.decay) for p in layer.parameters()] == [
        ("proj.weight", True),
        ("proj.bias", False),
    ]
    check_layer(gradient_check, rng, layer, layer, [x])


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_linear_with_a_bias_takes_any_number_of_tokens(rows):
    layer = Linear("proj.weight", np.ones((4, 3), np.float32), np.ones(4, np.float32))
    y, backprop = layer(np.ones((rows, 3), np.float32))
    np.testing.assert_array_equal(y, np.full((rows, 4), 4))
    assert backprop(y).shape == (rows, 3)
    np.testing.assert_array_equal(layer.bias.grad, np.full(4, 4 * rows))


def test_a_bias_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"proj.bias of shape \(3,\) given, \(4,\) wanted"):
        Linear("proj.weight", np.ones((4, 3)), np.ones(3))


@pytest.mark.parametrize("is_added", [False, True])
def test_rms_norm_gradient(rng, gradient_check, is_added):
    layer = RMSNorm("norm.weight", 5, dtype=np.float64)
    layer.weight.value[:] = rng.standard_normal(5)
    x = rng.standard_normal((7, 5))
    addend = rng.standard_normal((7, 5)) if is_added else None
    residual = rng.standard_normal((7, 5))

    def call(x):
        total, y, backprop = layer(x, addend)
        np.testing.assert_allclose(total, x if addend is None else x + addend)
        return y, backprop

    check_layer(gradient_check, rng, layer, call, [x])
    _, y, backprop = layer(x, addend)
    np.testing.assert_allclose(backprop(y, residual), backprop(y) + residual)


def test_embedding_gradient(rng, gradient_check):
    layer = Embedding("embedding.weight", rng.standard_normal((7, 3)))
    check_layer(gradient_check, rng, layer, layer, [rng.integers(0, 7, 9)])


@pytest.mark.parametrize(("batch", "length"), [(2, 5), (1, 70)])
def test_attention_gradient(rng, gradient_check, batch, length):
    layer = make_attention(rng)
    tables = rotary_tables(np.arange(length), layer.head_width, 100.0, np.float64)
    x = rng.standard_normal((batch * length, 10))
    check_layer(gradient_check, rng, layer, lambda x: layer(x, batch, *tables), [x])


def mean_loss(logits, targets):
    losses, _ = cross_entropy_loss(logits.copy(), targets)
    return losses.sum() / np.count_nonzero(targets >= 0)


def test_loss_gradient(rng, gradient_check):
    logits, targets = rng.standard_normal((6, 5)), np.array([0, -1, 4, 2, 2, 1])
    _, dlogits = cross_entropy_loss(logits.copy(), targets)
    gradient_check(lambda: mean_loss(logits, targets), [logits], [dlogits], rng)


def test_loss_is_that_of_each_counted_token():
    losses, dlogits = cross_entropy_loss(np.zeros((3, 4)), np.array([1, -1, 2]))
    np.testing.assert_allclose(losses, [np.log(4), 0, np.log(4)])
    np.testing.assert_array_equal(dlogits[1], 0)


def test_loss_of_no_counted_token_is_zero():
    losses, dlogits = cross_entropy_loss(np.zeros((2, 4)), np.array([-1, -1]))
    np.testing.assert_array_equal(losses, 0)
    np.testing.assert_array_equal(dlogits, 0)


def test_gradients_of_micro_batches_of_unequal_size_are_those_of_the_whole_batch(rng):
    logits, targets = rng.standard_normal((7, 5)), np.array([0, -1, 4, 2, -1, -1, 1])
    whole, dlogits = cross_entropy_loss(logits.copy(), targets)
    parts = [
        cross_entropy_loss(logits[s].copy(), targets[s], 4) for s in (slice(2), slice(2, None))
    ]
    np.testing.assert_array_equal(np.concatenate([losses for losses, _ in parts]), whole)
    gradient = np.concatenate([gradient for _, gradient in parts])
    np.testing.assert_allclose(gradient, dlogits, rtol=1e-14)


class ListCache:
    """The simplest key/value store."""

    def __init__(self):
        self.k = self.v = None

    def attend(self, q, k, v):
        self.k = k if self.k is None else np.concatenate([self.k, k], axis=1)
        self.v = v if self.v is None else np.concatenate([self.v, v], axis=1)
        return causal_attention(q, self.k, self.v)[0]


def test_attention_with_a_cache_gives_the_same(rng):
    layer = make_attention(rng)
    length, batch = 12, 2
    cos, sin = rotary_tables(np.arange(length), layer.head_width, 100.0, np.float64)
    x = rng.standard_normal((batch, length, 10))
    whole, _ = layer(x.reshape(-1, 10), batch, cos, sin)
    cache = ListCache()
    for start, stop in ((0, 9), (9, 10), (10, 12)):
        part, backprop = layer(
            x[:, start:stop].reshape(-1, 10), batch, cos[start:stop], sin[start:stop], cache
        )
        assert backprop is None
        np.testing.assert_allclose(
            part.reshape(batch, -1, 10),
            whole.reshape(batch, length, 10)[:, start:stop],
            rtol=1e-10,
            atol=1e-12,
        )


def test_attention_names_its_weights_as_a_checkpoint_does(rng):
    names = [parameter.name for parameter in make_attention(rng).parameters()]
    assert names == [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]


def test_attention_refuses_heads_that_do_not_fit(rng):
    with pytest.raises(ValueError, match="heads"):
        make_attention(rng, heads=3, groups=2)
    q, k, o = np.ones((8, 4)), np.ones((4, 4)), np.ones((4, 8))
    with pytest.raises(ValueError, match="value weight"):
        Attention("a", 4, 2, q, k, q, o)
    with pytest.raises(ValueError, match="output weight"):
        Attention("a", 4, 2, q, k, k, q)


def test_attention_refuses_a_batch_that_does_not_divide(rng):
    layer = make_attention(rng)
    with pytest.raises(ValueError, match="multiple"):
        layer(np.ones((5, 10)), 2, np.ones((2, 3)), np.ones((2, 3)))


def test_backward_passes_add_up(rng):
    layer = Linear("linear.weight", rng.standard_normal((4, 3)))
    x, dy = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    for _ in range(2):
        layer(x)[1](dy)
    np.testing.assert_allclose(layer.weight.grad, 2 * dy.T @ x)


def test_tied_weights_share_one_parameter(rng):
    embedding = Embedding("embedding.weight", rng.standard_normal((7, 3)))
    head = Linear.sharing(embedding.table)
    tokens = np.array([1, 2])
    x, backprop_embedding = embedding(tokens)
    _, backprop_head = head(x)
    dy = rng.standard_normal((2, 7))
    dx = backprop_head(dy)
    backprop_embedding(dx)
    expected = dy.T @ x
    np.add.at(expected, tokens, dx)
    assert head.weight is embedding.table
    np.testing.assert_allclose(embedding.table.grad, expected)


def test_layers_of_no_tokens(rng):
    layer = Linear("linear.weight", np.ones((4, 3), np.float32))
    y, backprop = layer(np.empty((0, 3), np.float32))
    assert y.shape == (0, 4)
    assert backprop(y).shape == (0, 3)
    np.testing.assert_array_equal(layer.weight.grad, 0)


def test_parameter_gradient():
    parameter = Parameter("weight", np.ones((2, 3), np.float32))
    assert parameter.grad is None
    parameter.zero_grad()
    assert parameter.grad is None
    buffer = parameter.grad_buffer()
    np.testing.assert_array_equal(buffer, 0)
    assert buffer.dtype == np.float32
    assert buffer is parameter.grad
    buffer += 3
    parameter.zero_grad()
    assert parameter.grad is buffer
    np.testing.assert_array_equal(buffer, 0)
