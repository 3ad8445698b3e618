from dataclasses import replace

import pytest

from twell_numba.errors import UsageError
from twell_numba.models.config import ModelConfig
from twell_numba.models.rope_scaling import RopeScaling

CONFIG = ModelConfig(
    vocab_size=256,
    d_model=64,
    d_ffn=160,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    context_length=128,
)


def test_a_right_config_passes() -> None:
    CONFIG.validate()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size=0"),
        ("d_ffn", 1.5, "d_ffn=1.5"),
        ("n_layers", True, "n_layers=True"),
        ("n_heads", 3, "d_model=64 is not divisible by n_heads=3"),
        ("n_heads", 64, "even width"),
        ("n_kv_heads", 3, "n_heads=4 is not divisible by n_kv_heads=3"),
        ("n_kv_heads", 8, "n_heads=4 is not divisible by n_kv_heads=8"),
        ("rope_base", -1.0, "rope_base=-1.0"),
        ("norm_eps", float("nan"), "norm_eps=nan"),
        ("norm_eps", "small", "norm_eps='small'"),
        ("tied_embeddings", "yes", "tied_embeddings='yes'"),
        ("ffn", "glu", "ffn='glu' given, one of gated, two_matrix"),
        ("activation", "gelu", "activation='gelu' given, one of relu, silu, relu2 wanted"),
        ("head_dim", 7, "head_dim=7 given, an even whole number wanted"),
        ("head_dim", True, "head_dim=True"),
        ("head_dim", 2**17, "head_dim=131072 given, at most 65536 wanted"),
        ("attention_bias", 1, "attention_bias=1 given, true or false wanted"),
        ("output_bias", None, "output_bias=None"),
        ("rope_scaling", RopeScaling("yarn", 2.0), "kind 'yarn' given, one of linear, llama3"),
        ("rope_scaling", RopeScaling("linear", 0.5), "factor 0.5 given, at least 1"),
        ("rope_scaling", RopeScaling("linear", float("nan")), "factor nan given, above 0"),
        ("rope_scaling", RopeScaling("llama3", 8.0, 4.0, 4.0), "the second has to be larger"),
        ("rope_scaling", RopeScaling("llama3", 8.0, original_context=0), "original_context 0"),
        ("rope_scaling", RopeScaling("linear", 10**400), "factor 1000.* at most 1e\\+06 wanted"),
        ("rope_scaling", RopeScaling("llama3", 8, original_context=10**400), "from 1 to 16777216"),
        ("norm_eps", 0.0, "norm_eps=0.0 given, a number from 1e-30 to 1 wanted"),
        ("norm_eps", 1.5, "norm_eps=1.5"),
        ("norm_eps", float("inf"), "norm_eps=inf"),
        ("norm_eps", 10**400, "norm_eps=1000.*"),
        ("rope_base", 0.5, "rope_base=0.5"),
        ("rope_base", 1e300, "rope_base=1e\\+300"),
        ("vocab_size", 2**24 + 1, "vocab_size=16777217 given, at most 16777216 wanted"),
        ("d_model", 2**17, "d_model=131072 given, at most 65536 wanted"),
        ("d_ffn", 10**20, "d_ffn=100000000000000000000 given, at most 1048576 wanted"),
        ("n_layers", 3_000_000, "n_layers=3000000 given, at most 4096 wanted"),
        ("ffn", "x" * 10_000, "ffn='xxx"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_field_is_one_line(field: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        replace(CONFIG, **{field: value}).validate()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_sparse_weights_are_for_relu_alone() -> None:
    replace(CONFIG, ffn_weight_format="csr").validate()
    with pytest.raises(UsageError, match="ffn_weight_format=csr given with activation=silu"):
        replace(CONFIG, ffn_weight_format="csr", activation="silu").validate()


def test_a_number_that_python_does_not_write_out_is_one_line() -> None:
    with pytest.raises(UsageError, match="context_length=a value of type int too large to show"):
        replace(CONFIG, context_length=10**5000).validate()
    with pytest.raises(UsageError, match="factor a value of type int too large to show"):
        replace(CONFIG, rope_scaling=RopeScaling("linear", 10**5000)).validate()


@pytest.mark.parametrize(
    ("field", "value"), [("norm_eps", 1), ("n_layers", 4096), ("d_ffn", 2**20), ("rope_base", 1)]
)
def test_bounds_are_part_of_what_is_allowed(field: str, value: float) -> None:
    replace(CONFIG, **{field: value}).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        # V D + L (2 D + 2 D D + 2 (D / 2) D + 3 F D) + D
        ({}, 256 * 64 + 2 * (2 * 64 + 3 * 64 * 64 + 3 * 160 * 64) + 64),
        ({"ffn": "two_matrix"}, 256 * 64 + 2 * (2 * 64 + 3 * 64 * 64 + 2 * 160 * 64) + 64),
        ({"tied_embeddings": False}, 2 * 256 * 64 + 2 * (2 * 64 + 3 * 64 * 64 + 3 * 160 * 64) + 64),
    ],
)
def test_parameter_count(changes: dict, count: int) -> None:
    assert replace(CONFIG, **changes).parameter_count() == count


def test_the_published_sizes() -> None:
    """D 2048, F 5632, 8 layers, vocabulary 49152: the model called 0.5B."""
    published = ModelConfig(49152, 2048, 5632, 8, 32, 32, 2048, rope_base=1e5)
    assert 0.45e9 < published.parameter_count() < 0.55e9
