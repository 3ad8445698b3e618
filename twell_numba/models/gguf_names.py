"""The names of a model's tensors in GGUF files, and the order of their rows."""

import re

import numpy as np

# Files of this architecture hold what only this package runs, so that no other tool takes them for
# something else: a Llama-shaped model with another activation than SiLU, or with two matrices.
OWN_ARCHITECTURE = "twell"
# Whose rows of the projections to queries and keys are in another order.
LLAMA = "llama"
QWEN2 = "qwen2"
ARCHITECTURES = (LLAMA, QWEN2, OWN_ARCHITECTURE)

# By what each frequency of rotary positions is divided.
ROPE_FACTORS = "rope_freqs.weight"
# Of what these come, in files of this package: factor, low and high frequency factor, context.
ROPE_SCALING = "twell.rope_scaling"

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str) -> str:
    """Return the name in a GGUF file of a parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert match is not None, name
    return f"blk.{match[1]}.{_OF_LAYER[match[2]]}.{kind}"


def is_rotated(name: str) -> bool:
    """Say whether a parameter makes queries or keys, which rotary positions turn."""
    return ".q_proj." in name or ".k_proj." in name


def interleaved_rows(rows: int, head_width: int) -> np.ndarray:
    """Return which row of a projection stands at each place of a file of Llama's.

    Rotary positions turn pairs of numbers. Here, as in Hugging Face's files, the two of a pair are
    half a head apart; in these files they stand side by side, as in Meta's.
    """
    places = np.arange(rows).reshape(-1, 2, head_width // 2)
    return places.swapaxes(1, 2).reshape(-1)
