import numpy as np
import pytest

from twell_numba.models.config import ModelConfig
from twell_numba.models.transformer import Transformer


@pytest.fixture
def byte_model() -> Transformer:
    """A small random model over bytes, with weights large enough for its choices to be clear."""
    config = ModelConfig(
        vocab_size=256,
        d_model=32,
        d_ffn=96,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        context_length=48,
    )
    model = Transformer(config, np.random.default_rng(0))
    for parameter in model.parameters().values():
        if parameter.value.ndim == 2:
            parameter.value *= 10
    return model
