import dataclasses

from twell_numba.infer.silu_note import silu_note
from twell_numba.models.config import ModelConfig

RELU = ModelConfig(
    vocab_size=256, d_model=8, d_ffn=16, n_layers=1, n_heads=2, n_kv_heads=2, context_length=8
)


def test_a_silu_model_is_told_how_to_become_sparse() -> None:
    line = silu_note(dataclasses.replace(RELU, activation="silu"), "my models/small")
    assert line is not None
    assert "no exact zeros" in line
    assert "twell sparsify 'my models/small' --data" in line
    assert "\n" not in line


def test_other_models_are_not() -> None:
    assert silu_note(RELU, "model") is None
    assert silu_note(dataclasses.replace(RELU, activation="relu2"), "model") is None
