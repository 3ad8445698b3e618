import json
import math

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.infer.evaluate import (
    evaluate,
    ffn_weight_sparsity,
    ffn_weight_sparsity_by_layer,
    fired_neurons,
    perplexity,
    require_finite_weights,
)
from twell_numba.kernels.cross_entropy.reference import cross_entropy
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer


class PairTokenizer(ByteTokenizer):
    """Every token stands for two bytes."""

    def decode_bytes(self, tokens: object) -> bytes:
        return 2 * super().decode_bytes(tokens)  # type: ignore[arg-type]


def windows(count: int = 5, length: int = 17) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, length), np.uint8)


def test_loss_is_the_mean_cross_entropy(byte_model: Transformer) -> None:
    data = windows().astype(np.int64)
    logits = byte_model.logits(data[:, :-1])
    expected = cross_entropy(logits, data[:, 1:].reshape(-1))[0].mean()
    result = evaluate(byte_model, data, ByteTokenizer())
    assert result["loss"] == pytest.approx(expected, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-6)


def test_bits_are_shared_among_the_bytes_of_a_token(byte_model: Transformer) -> None:
    by_byte = evaluate(byte_model, windows(), ByteTokenizer())
    by_pair = evaluate(byte_model, windows(), PairTokenizer())
    assert by_pair["bits_per_byte"] == pytest.approx(by_byte["bits_per_byte"] / 2)
    assert by_pair["loss"] == by_byte["loss"]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_batches_do_not_matter(byte_model: Transformer, batch_size: int) -> None:
    expected = evaluate(byte_model, windows(), ByteTokenizer())
    result = evaluate(byte_model, windows(), ByteTokenizer(), batch_size)
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=1e-5), key  # type: ignore[literal-required]


def test_sparsity_of_each_layer(byte_model: Transformer) -> None:
    data = windows().astype(np.int64)
    byte_model.logits(data[:, :-1])
    statistics = [ffn.statistics for ffn in byte_model.ffn_layers]
    result = evaluate(byte_model, data, ByteTokenizer())
    per_token = [each.nonzeros / 80 for each in statistics]
    dead = [1 - each.fired.mean() for each in statistics]
    assert result["nonzeros_per_token"] == pytest.approx(per_token)
    assert result["ffn_activation_sparsity"] == pytest.approx(1 - np.mean(per_token) / 96)
    assert result["dead_neuron_fraction"] == pytest.approx(np.mean(dead))


def test_neurons_that_cannot_fire_are_dead(byte_model: Transformer) -> None:
    for ffn in byte_model.ffn_layers:
        gate = next(p for p in ffn.parameters() if "gate" in p.name)
        gate.value[:24] = 0
    result = evaluate(byte_model, windows(20, 40), ByteTokenizer())
    assert result["dead_neuron_fraction"] == pytest.approx(0.25)
    assert result["ffn_weight_sparsity"] == pytest.approx(0.25 / 3)


def test_weight_sparsity_counts_exact_zeros(byte_model: Transformer) -> None:
    assert ffn_weight_sparsity(byte_model) == 0
    for ffn in byte_model.ffn_layers:
        for parameter in ffn.parameters():
            parameter.value[::2] = -0.0
    assert ffn_weight_sparsity(byte_model) == 0.5


@pytest.mark.parametrize("weight_format", ["csr", "block_ell"])
def test_weights_that_are_not_stored_are_zeros(byte_model: Transformer, weight_format: str) -> None:
    for ffn, step in zip(byte_model.ffn_layers, (2, 4), strict=True):
        for parameter in ffn.parameters():
            kept = parameter.value[::step].copy()
            parameter.value[:] = 0
            parameter.value[::step] = kept
    expected = evaluate(byte_model, windows(), ByteTokenizer())
    byte_model.hold_ffn_weights(weight_format)
    byte_model.ffn_layers[0].parameters()[0].value[..., 0] = 0  # stored zeros are zeros
    dense = byte_model.ffn_layers[0].weight_density
    assert ffn_weight_sparsity_by_layer(byte_model) == [1 - dense, 0.75]
    assert dense < 0.5
    result = evaluate(byte_model, windows(), ByteTokenizer())
    assert result["ffn_weight_sparsity"] == pytest.approx((1 - dense + 0.75) / 2)
    assert expected["ffn_weight_sparsity"] == 0.625
    assert result["dead_neuron_fraction"] == pytest.approx(
        expected["dead_neuron_fraction"], abs=0.02
    )


def test_neurons_that_fired(byte_model: Transformer) -> None:
    data = windows().astype(np.int64)
    byte_model.logits(data[:, :-1])
    expected = [ffn.statistics.fired for ffn in byte_model.ffn_layers]
    np.testing.assert_array_equal(fired_neurons(byte_model, data, 2), expected)


def test_result_is_plain_json(byte_model: Transformer) -> None:
    result = evaluate(byte_model, windows(), ByteTokenizer())
    assert json.loads(json.dumps(result)) == result
    assert list(result) == [
        "loss",
        "perplexity",
        "bits_per_byte",
        "ffn_activation_sparsity",
        "nonzeros_per_token",
        "dead_neuron_fraction",
        "ffn_weight_sparsity",
    ]


def test_perplexity_beyond_a_float() -> None:
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (4,)])
def test_nothing_to_predict_is_refused(byte_model: Transformer, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="windows of shape"):
        evaluate(byte_model, np.zeros(shape, np.int64), ByteTokenizer())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(byte_model: Transformer, value: float) -> None:
    require_finite_weights(byte_model)
    name = "model.layers.1.mlp.up_proj.weight"
    byte_model.parameters()[name].value[3, 5] = value
    with pytest.raises(TwellError, match=f"{name} of the model holds weights that are not finite"):
        require_finite_weights(byte_model)
