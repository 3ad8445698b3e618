"""A model on a GPU, emulated or real, gives what it gives on the CPU."""

import gc
import weakref

import numpy as np
import pytest

from twell_numba.device.arrays import to_host
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.models.cache import KVCache
from twell_numba.models.config import ModelConfig
from twell_numba.models.recorded_decoding import RecordedDecoding
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=11, d_model=8, d_ffn=6, n_layers=2, n_heads=2, n_kv_heads=1, context_length=7
)


def models_of(machine, path="dense"):
    """Return a model in float64 on the CPU, and the same one in float32 on the GPU."""
    models = [
        Transformer(CONFIG, np.random.default_rng(3), dtype, ffn_path=path)
        for dtype in (np.float64, np.float32)
    ]
    models[1].move_to_gpu(machine.gpu.stream, np.float32)
    return models


def tokens_of(batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, length))


def assert_close(actual, expected):
    np.testing.assert_allclose(to_host(actual), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "recompute"), [("dense", False), ("dense", True), ("twell", False)]
)
def test_forward_and_backward(machine, path, recompute):
    results = []
    for model in models_of(machine, path):
        tokens, targets = tokens_of(2, 5), tokens_of(1, 10, seed=1).ravel()
        if model.device != "cpu":
            tokens, targets = machine.upload(tokens), machine.upload(targets)
        logits, backprop = model(tokens, 0.1, recompute)
        first = to_host(logits).copy()
        losses, dlogits = cross_entropy_loss(logits, targets, 10)
        statistics = [ffn.statistics for ffn in model.ffn_layers]
        backprop(dlogits)
        gradients = {name: to_host(p.grad) for name, p in model.parameters().items()}
        results.append((first, to_host(losses), gradients, statistics))
    (logits, losses, gradients, counted), actual = results
    assert_close(actual[0], logits)
    assert_close(actual[1], losses)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(actual[2][name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)
    for on_gpu, on_cpu in zip(actual[3], counted, strict=True):
        assert (on_gpu.nonzeros, on_gpu.path) == (on_cpu.nonzeros, path)
        np.testing.assert_array_equal(on_gpu.fired, on_cpu.fired)


def test_decoding_with_a_cache(machine):
    on_cpu, on_gpu = models_of(machine)
    tokens = tokens_of(2, 7)
    caches = [KVCache(CONFIG, 2, 7, model.dtype, model.stream) for model in (on_cpu, on_gpu)]
    assert_close(on_gpu.step(tokens[:, :3], caches[1]), on_cpu.step(tokens[:, :3], caches[0]))
    step = RecordedDecoding(on_gpu, caches[1])
    for i in range(3, 7):  # the second one is recorded, and the others are replays
        expected = on_cpu.step(tokens[:, i : i + 1], caches[0])
        assert_close(step(tokens[:, i : i + 1]), expected)
        assert caches[1].length == i + 1
    with pytest.raises(ValueError, match="holds 7 of 7"):
        step(tokens[:, :1])
    with pytest.raises(ValueError, match=r"tokens in \[0, 11\) wanted"):
        step(np.array([[11], [0]]))
    recording = weakref.ref(step._step._graph)
    del step
    gc.collect()
    assert recording() is None, "memory of the recording is kept"


def test_logits_and_limits(machine):
    on_cpu, on_gpu = models_of(machine)
    tokens = tokens_of(1, 4)
    assert_close(on_gpu.logits(tokens), on_cpu.logits(tokens))
    with pytest.raises(ValueError, match="at most the context of 7 wanted"):
        on_gpu.logits(tokens_of(1, 8))
    with pytest.raises(ValueError, match="11"):
        on_gpu.logits(np.full((1, 2), 11))


@pytest.mark.parametrize("weight_format", ["csr", "block_ell"])
def test_sparse_weights_go_along(machine, weight_format):
    model = Transformer(CONFIG, np.random.default_rng(3), np.float32)
    model.hold_ffn_weights(weight_format, 2)
    tokens = tokens_of(1, 4)
    expected = model.logits(tokens)
    model.move_to_gpu(machine.gpu.stream, np.float32)
    assert_close(model.logits(tokens), expected)
    parameter = model.ffn_parameters[0]
    assert parameter.count_nonzero() == parameter.size
    assert parameter.on_host() == parameter.matrix.to("cpu")
