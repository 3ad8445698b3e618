"""Settings to start from, by name.

A preset is a plain table of :class:`~twell_numba.train.config.TrainConfig` fields; whatever it does
not name keeps the field's default.
"""

from typing import Any

# About 1 million parameters, a byte-level vocabulary: minutes on a laptop.
_TINY: dict[str, Any] = {
    "steps": 2400,
    "batch_size": 16,
    "context_length": 128,
    "d_model": 128,
    "d_ffn": 512,
    "n_layers": 4,
    "n_heads": 4,
    "learning_rate": 2e-3,
    "warmup_steps": 120,
    "l1_activation": 1e-2,
    "l1_warmup_steps": 300,
    "eval_interval": 200,
    "sample_interval": 600,
    "checkpoint_interval": 600,
}

# The same model with 1% of its feedforward weights. Few weights take a higher learning rate, and
# most of the run to make up for those that are gone.
_TINY_WEIGHT_SPARSE: dict[str, Any] = {
    **_TINY,
    "learning_rate": 4e-3,
    "l1_activation": 0.0,
    "target_density": 0.01,
    "sparse_from": 1000,
    "sparse_format": "csr",
}

# About 10 million parameters.
_SMALL: dict[str, Any] = {
    "steps": 4000,
    "batch_size": 16,
    "context_length": 256,
    "d_model": 256,
    "d_ffn": 1152,
    "n_layers": 8,
    "n_heads": 8,
    "tokenizer": "bpe",
    "bpe_vocab_size": 4096,
    "learning_rate": 1e-3,
    "warmup_steps": 200,
    "l1_activation": 1e-3,
    "l1_warmup_steps": 600,
    "eval_interval": 200,
    "sample_interval": 500,
    "checkpoint_interval": 500,
}

# About 124 million parameters.
_BASE: dict[str, Any] = {
    "steps": 20_000,
    "batch_size": 8,
    "gradient_accumulation": 8,
    "context_length": 512,
    "d_model": 768,
    "d_ffn": 2560,
    "n_layers": 12,
    "n_heads": 12,
    "tokenizer": "bpe",
    "bpe_vocab_size": 32_768,
    "learning_rate": 8e-4,
    "warmup_steps": 1000,
    "l1_activation": 1e-4,
    "l1_warmup_steps": 2000,
    "eval_interval": 500,
    "sample_interval": 1000,
    "checkpoint_interval": 500,
}


def _paper(n_layers: int, steps: int) -> dict[str, Any]:
    """Shapes and settings of arXiv 2603.23198; ``steps`` gives about 20 tokens a parameter."""
    return {
        "steps": steps,
        "batch_size": 8,
        "gradient_accumulation": 64,
        "context_length": 2048,
        "d_model": 2048,
        "d_ffn": 5632,
        "n_layers": n_layers,
        "n_heads": 32,
        "rope_base": 1e5,
        "norm_eps": 1e-5,
        "tied_embeddings": True,
        "tokenizer": "bpe",
        "bpe_vocab_size": 49_152,
        "learning_rate": 1e-3,
        "warmup_steps": 600,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "gradient_clip": 1.0,
        "l1_activation": 2e-5,
        "eval_interval": 250,
        "sample_interval": 1000,
        "checkpoint_interval": 250,
    }


# Of 'twell sparsify', which takes sizes and tokenizer from the model that it goes on from.
_SPARSIFY: dict[str, Any] = {
    "steps": 1000,
    "batch_size": 8,
    "context_length": 128,
    "tokenizer": "model",
    "learning_rate": 5e-4,
    "warmup_steps": 50,
    "weight_decay": 0.01,
    "l1_activation": 2e-2,
    "l1_warmup_steps": 300,
    "eval_interval": 100,
    "checkpoint_interval": 500,
}

SPARSIFY = "sparsify"
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-weight-sparse": _TINY_WEIGHT_SPARSE,
    "small": _SMALL,
    "base": _BASE,
    "paper-0.5b": _paper(n_layers=8, steps=10_000),
    "paper-1b": _paper(n_layers=18, steps=20_000),
    "paper-1.5b": _paper(n_layers=28, steps=30_000),
    "paper-2b": _paper(n_layers=38, steps=40_000),
    SPARSIFY: _SPARSIFY,
}
