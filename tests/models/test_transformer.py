from dataclasses import replace

import numpy as np
import pytest

from twell_numba.errors import UsageError
from twell_numba.layers.ffn import FeedForward
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.models.cache import KVCache
from twell_numba.models.config import ModelConfig
from twell_numba.models.initial import initial_values
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=19,
    d_model=16,
    d_ffn=40,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    context_length=12,
)
PATHS = ["dense", "twell"]


def model_of(
    config: ModelConfig = CONFIG, dtype: type = np.float32, path: str = "auto"
) -> Transformer:
    """Return a model with weights large enough for every layer to matter."""
    model = Transformer(config, np.random.default_rng(0), dtype, path)
    for parameter in model.parameters().values():
        if parameter.value.ndim == 2:
            parameter.value *= 10
    return model


def tokens_of(batch: int = 2, length: int = 7) -> np.ndarray:
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (batch, length))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("l1_scale", [0.0, 0.01])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ffn": "two_matrix"},
        {"tied_embeddings": False},
        {"ffn": "two_matrix", "tied_embeddings": False, "n_kv_heads": 1},
        {"n_kv_heads": 4},
    ],
)
def test_gradients_agree_with_finite_differences(changes: dict, l1_scale: float, path: str) -> None:
    recompute = l1_scale > 0  # in half of the cases
    model = model_of(replace(CONFIG, **changes), np.float64, path)
    parameters = model.parameters().values()
    tokens, targets = tokens_of(), np.random.default_rng(2).integers(0, CONFIG.vocab_size, 14)

    def objective() -> float:
        logits, _ = model(tokens, l1_scale)
        l1 = sum(ffn.statistics.absolute_sum for ffn in model.ffn_layers)
        return cross_entropy_loss(logits, targets)[0].mean() + l1_scale * l1

    logits, backprop = model(tokens, l1_scale, recompute)
    backprop(cross_entropy_loss(logits, targets)[1])

    rng = np.random.default_rng(3)
    distance = 1e-6
    for _ in range(3):
        directions = [rng.standard_normal(parameter.value.shape) for parameter in parameters]
        slope = sum(
            float(np.vdot(parameter.grad, direction))
            for parameter, direction in zip(parameters, directions, strict=True)
            if parameter.grad is not None
        )
        values = [parameter.value.copy() for parameter in parameters]
        results = []
        for step in (distance, -distance):
            for parameter, value, direction in zip(parameters, values, directions, strict=True):
                parameter.value[...] = value + step * direction
            results.append(objective())
        for parameter, value in zip(parameters, values, strict=True):
            parameter.value[...] = value
        assert slope == pytest.approx((results[0] - results[1]) / (2 * distance), rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn", ["gated", "two_matrix"])
def test_parameters_are_those_of_the_config(tied: bool, ffn: str) -> None:
    config = replace(CONFIG, tied_embeddings=tied, ffn=ffn)
    model = Transformer(config, np.random.default_rng(0))
    parameters = model.parameters()
    shapes = {name: parameter.value.shape for name, parameter in parameters.items()}
    assert shapes == config.parameter_shapes()
    assert sum(p.value.size for p in parameters.values()) == config.parameter_count()
    assert all(name == parameter.name for name, parameter in parameters.items())
    assert all(p.decay == (p.value.ndim == 2) for p in parameters.values())
    assert all(p.value.dtype == np.float32 for p in parameters.values())


def test_tied_head_is_the_embedding() -> None:
    model = Transformer(CONFIG, np.random.default_rng(0))
    assert model.head.weight is model.embedding.table


def test_initial_values() -> None:
    values = initial_values(replace(CONFIG, d_model=256, d_ffn=512), np.random.default_rng(0))
    layer = "model.layers.1."
    assert np.all(values[layer + "input_layernorm.weight"] == 1)
    assert values[layer + "mlp.gate_proj.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert values[layer + "mlp.down_proj.weight"].std() == pytest.approx(0.01, rel=0.03)
    assert values[layer + "self_attn.o_proj.weight"].std() == pytest.approx(0.01, rel=0.03)


def test_a_seed_fixes_the_initial_values() -> None:
    first, second = (initial_values(CONFIG, np.random.default_rng(5)) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ffn", ["gated", "two_matrix"])
@pytest.mark.parametrize("split", [1, 3, 6])
def test_steps_give_the_logits_of_the_whole(ffn: str, path: str, split: int) -> None:
    """A prompt in one step, then token by token, as far as the context goes."""
    model = model_of(replace(CONFIG, ffn=ffn), path=path)
    tokens = tokens_of(3, CONFIG.context_length)
    expected = model.logits(tokens).reshape(3, CONFIG.context_length, -1)
    cache = KVCache(model.config, 3, CONFIG.context_length)
    steps = [tokens[:, :split], *np.split(tokens[:, split:], CONFIG.context_length - split, axis=1)]
    for step in steps:
        logits = model.step(step, cache)
        np.testing.assert_allclose(logits, expected[:, cache.length - 1], atol=1e-5, rtol=1e-5)
    assert cache.length == CONFIG.context_length


def test_logits_are_those_of_a_call() -> None:
    model = model_of()
    np.testing.assert_array_equal(model.logits(tokens_of()), model(tokens_of())[0])


def test_a_later_token_changes_nothing_before_it() -> None:
    model, tokens = model_of(), tokens_of()
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % CONFIG.vocab_size
    before, after = (model.logits(t).reshape(2, 7, -1) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert not np.array_equal(before[:, -1], after[:, -1])


def test_paths_agree_and_can_be_set() -> None:
    model = model_of()
    logits = {}
    for path in PATHS:
        model.ffn_path = path
        assert model.ffn_path == path
        logits[path] = model.logits(tokens_of())
        assert [ffn.statistics.path for ffn in model.ffn_layers] == [path] * 2
    np.testing.assert_allclose(logits["twell"], logits["dense"], atol=1e-5, rtol=1e-5)


def test_auto_takes_the_sparse_path_once_it_has_seen_that_few_neurons_fire() -> None:
    model = model_of()
    for ffn in model.ffn_layers:
        next(p for p in ffn.parameters() if "gate" in p.name).value[1:] = 0
    for expected in ("dense", "twell", "twell"):
        model.logits(tokens_of())
        assert [ffn.statistics.path for ffn in model.ffn_layers] == [expected] * 2


def test_statistics_of_each_layer() -> None:
    model = model_of()
    model(tokens_of())
    for ffn in model.ffn_layers:
        assert ffn.statistics.tokens == 14
        assert ffn.statistics.neurons == CONFIG.d_ffn
        assert 0 < ffn.statistics.nonzeros < 14 * CONFIG.d_ffn


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros(3, np.int64), r"shape \(3,\) given"),
        (np.zeros((1, 13), np.int64), "13 tokens given, at most the context of 12"),
        (np.array([[19]]), "19"),
        (np.array([[-1]]), "-1"),
    ],
)
def test_wrong_tokens_are_refused(tokens: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(CONFIG, np.random.default_rng(0)).logits(tokens)


def test_a_full_cache_refuses() -> None:
    model = model_of()
    cache = KVCache(CONFIG, 1, 4)
    model.step(np.zeros((1, 3), np.int64), cache)
    with pytest.raises(ValueError, match="2 tokens given to a cache that holds 3 of 4"):
        model.step(np.zeros((1, 2), np.int64), cache)
    with pytest.raises(ValueError, match="at least one token"):
        model.step(np.zeros((1, 0), np.int64), cache)


def test_positions_beyond_the_context_are_refused() -> None:
    model = model_of()
    cache = KVCache(CONFIG, 1, 20)
    model.step(np.zeros((1, 12), np.int64), cache)
    with pytest.raises(ValueError, match="13 tokens given, at most the context of 12"):
        model.step(np.zeros((1, 1), np.int64), cache)


def test_an_invalid_config_is_refused() -> None:
    with pytest.raises(UsageError):
        Transformer(replace(CONFIG, n_heads=3), np.random.default_rng(0))


def test_given_weights_must_be_those_of_the_config() -> None:
    values = initial_values(CONFIG, np.random.default_rng(0))
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match="no model.norm.weight"):
        Transformer(CONFIG, {k: v for k, v in values.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match="extra among"):
        Transformer(CONFIG, {**values, "extra": np.zeros(1)})
    with pytest.raises(ValueError, match=r"up_proj.weight of shape \(16, 40\)"):
        Transformer(CONFIG, {**values, name: values[name].T})
    with pytest.raises(ValueError, match="float16"):
        Transformer(CONFIG, values, np.float16)


def test_what_is_recomputed_takes_the_path_it_took_before() -> None:
    """The first call measures the density: the next one would take another path."""
    gradients = []
    for recompute in (False, True):
        model = model_of(CONFIG, np.float32, "auto")
        for ffn in model.ffn_layers:
            ffn.parameters()[0].value[:] *= 1e-3
            ffn.parameters()[0].value[:, 0] = 0
        logits, backprop = model(tokens_of(), 0.01, recompute)
        paths = [ffn.statistics.path for ffn in model.ffn_layers]
        backprop(np.ones_like(logits))
        assert [ffn.statistics.path for ffn in model.ffn_layers] == paths
        states = [ffn.auto_state for ffn in model.ffn_layers]
        gradients.append([p.grad.copy() for p in model.parameters().values()] + [np.array(states)])
    for kept, recomputed in zip(*gradients, strict=True):
        np.testing.assert_array_equal(kept, recomputed)


def test_what_is_recomputed_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured = model_of(CONFIG, np.float32, "auto"), []
    measure = FeedForward._measure

    def measure_and_note(ffn: FeedForward, tokens: int, *, took_twell: bool) -> None:
        measured.append(ffn)
        measure(ffn, tokens, took_twell=took_twell)

    monkeypatch.setattr(FeedForward, "_measure", measure_and_note)
    for calls in (1, 2):
        logits, backprop = model(tokens_of(), 0.01, recompute=True)
        backprop(np.ones_like(logits))
        assert measured == calls * list(model.ffn_layers)


def test_statistics_are_those_of_the_last_call_where_an_earlier_one_is_recomputed() -> None:
    model = model_of(CONFIG, np.float32, "auto")
    tokens = tokens_of()
    logits, backprop = model(tokens, 0.01, recompute=True)
    model(tokens[:1])
    backprop(np.ones_like(logits))
    assert {ffn.statistics.tokens for ffn in model.ffn_layers} == {tokens[:1].size}
