import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.gguf_files import (
    byte_metadata,
    gguf_tensors,
    metadata_of,
    write_file,
    write_model,
)
from tests.models.real_models import CONFIGURATIONS, configuration, random_tensors
from twell_numba.errors import TwellError
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_reader import read_gguf
from twell_numba.models.rope_scaling import RopeScaling

gguf = pytest.importorskip("gguf")

SILU = [name for name, changes in CONFIGURATIONS.items() if "relu" not in name]


def silu_configuration(name: str) -> dict[str, Any]:
    config = configuration(name)
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        # what Llama 3 was trained on, which readers of files can only suppose
        config["rope_scaling"] = {
            **config["rope_scaling"],
            "original_max_position_embeddings": 8192,
        }
    return config


@pytest.mark.parametrize("name", SILU)
def test_weights_and_config_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    hf = silu_configuration(name)
    tensors = random_tensors(hf)
    write_model(tmp_path / "model.gguf", hf, tensors)
    config, weights, tokenizer = read_gguf(tmp_path / "model.gguf")
    assert list(weights) == list(config.parameter_shapes())
    assert weights.keys() == tensors.keys()
    for key, value in tensors.items():
        expected = value.T if "down_proj" in key else value
        assert weights[key].flags.c_contiguous
        np.testing.assert_array_equal(weights[key], expected, err_msg=key)
    has_bias = "model.layers.0.self_attn.q_proj.bias" in tensors
    scaling = hf.get("rope_scaling") or {}
    assert config == ModelConfig(
        vocab_size=256,
        d_model=hf["hidden_size"],
        d_ffn=hf["intermediate_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        context_length=hf["max_position_embeddings"],
        rope_base=hf["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        tied_embeddings=hf["tie_word_embeddings"],
        activation="silu",
        head_dim=hf.get("head_dim"),
        attention_bias=has_bias,
        output_bias=has_bias and hf["model_type"] != "qwen2",
        rope_scaling={
            None: None,
            "linear": RopeScaling("linear", 4.0),
            "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        }[scaling.get("rope_type")],
    )
    assert tokenizer.decode_bytes(tokenizer.encode("grød")) == "grød".encode()


# Blocks of 256 numbers fit into rows of these widths.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def raw_tensors(kind: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return matrices of any bytes, but with small scales, and vectors of numbers."""
    rng = np.random.default_rng(0)
    block_size, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = rng.standard_normal(shape).astype(np.float32)
            continue
        blocks = rng.integers(0, 256, (shape[0], shape[1] // block_size, block_nbytes))
        # the upper byte of a half float of which the lower 14 bits are the size
        blocks &= 0xBF
        tensors[name] = blocks.astype(np.uint8).reshape(shape[0], -1)
    return tensors


@pytest.mark.parametrize(
    "kind",
    ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_0", "Q5_1", "Q5_K", "Q2_K"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_type_is_unpacked(tmp_path: Path, kind: str, dtype: type) -> None:
    hf = {**configuration("qwen2"), **WIDE}
    shapes = {name: value.shape for name, value in gguf_tensors(hf, random_tensors(hf)).items()}
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("F16", "BF16"):
        stored = gguf_tensors(hf, random_tensors(hf))
    else:
        stored = raw_tensors(number, shapes)
    metadata = {**metadata_of(hf, "qwen2"), **byte_metadata()}
    write_file(tmp_path / "model.gguf", "qwen2", metadata, stored, kind)
    _, weights, _ = read_gguf(tmp_path / "model.gguf", dtype)
    for name, ours in (
        ("blk.0.ffn_down.weight", weights["model.layers.0.mlp.down_proj.weight"].T),
        ("blk.0.ffn_up.weight", weights["model.layers.0.mlp.up_proj.weight"]),
        ("blk.0.attn_q.weight", weights["model.layers.0.self_attn.q_proj.weight"]),
        ("token_embd.weight", weights["model.embed_tokens.weight"]),
    ):
        value = stored[name]
        packed = value if value.dtype == np.uint8 else gguf.quantize(value, number)
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(packed, number)
        assert ours.dtype == dtype
        scale = np.nanmax(np.abs(expected), initial=0)
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6 * scale)


def test_memory_is_that_of_the_weights(tmp_path: Path) -> None:
    """Tensors are unpacked one after the other, into what the model holds."""
    hf = {**configuration("llama"), **WIDE, "vocab_size": 8192, "num_hidden_layers": 4}
    write_model(tmp_path / "model.gguf", hf, random_tensors(hf), "Q8_0")
    read_gguf(tmp_path / "model.gguf")  # compiles
    tracemalloc.start()
    _, weights, _ = read_gguf(tmp_path / "model.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    needed = sum(weight.nbytes for weight in weights.values())
    assert needed > 20e6
    assert peak < 1.2 * needed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"llama.expert_count": 8}, "mixture of experts .llama.expert_count = 8."),
    ({"llama.attention.sliding_window": 4096}, "sliding window"),
    ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5"),
    ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor = 1.5"),
    ({"llama.attention.causal": False}, "without causal attention"),
    ({"llama.rope.scaling.type": "yarn"}, "scaled by 'yarn'"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8, 16 wanted"),
    ({"llama.attention.value_length": 8}, "attention.value_length 8, 16 wanted"),
    ({"llama.context_length": None}, "no llama.context_length"),
    ({"llama.context_length": "many"}, "context_length 'many', a whole number wanted"),
    ({"llama.context_length": 0}, "context_length=0"),
    ({"llama.attention.head_count": 0}, "the width of a head"),
    ({"llama.attention.head_count": [4, 2, 4]}, "a whole number wanted"),
    ({"llama.feed_forward_length": 161}, "shape"),
    ({"llama.block_count": 4}, "no tensor blk.3"),
    ({"llama.block_count": 2}, "a tensor 'blk.2"),
    ({"llama.rope.freq_base": 0.0}, "rope_base"),
    ({"llama.attention.layer_norm_rms_epsilon": "small"}, "a number wanted"),
    ({"split.count": 3}, "one of 3 parts"),
    ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
    ({"tokenizer.ggml.pre": "unheard-of"}, "splits texts by 'unheard-of'"),
    ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": ["a"] * 300}, "300 tokens"),
    ({"tokenizer.ggml.tokens": 7}, "a list of texts wanted"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types given for 256"),
    ({"tokenizer.huggingface.json": "{"}, "cannot be read as a tokenizer"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    hf = configuration("llama")
    write_model(tmp_path / "model.gguf", hf, random_tensors(hf), **changes)
    with pytest.raises(TwellError, match=message) as caught:
        read_gguf(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_equal_numbers_for_each_layer_are_one(tmp_path: Path) -> None:
    hf = configuration("llama")
    changes = {"llama.attention.head_count": [4, 4, 4]}
    write_model(tmp_path / "model.gguf", hf, random_tensors(hf), **changes)
    assert read_gguf(tmp_path / "model.gguf")[0].n_heads == 4


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    hf = configuration("llama")
    stored = gguf_tensors(hf, random_tensors(hf))
    write_file(tmp_path / "model.gguf", "mamba", metadata_of(hf, "mamba"), stored)
    with pytest.raises(TwellError, match="architecture 'mamba', one of llama, qwen2"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "no scaling that is supported"),
        ([1, 2, 3], "of shape"),
        ([0, 0, 0, 0, 0, 0, 0, 0], "at least 1 wanted"),
        ([np.nan] * 8, "at least 1 wanted"),
    ],
)
def test_unknown_rotary_factors_are_refused(
    tmp_path: Path, factors: list[float], message: str
) -> None:
    hf = configuration("llama")
    stored = gguf_tensors(hf, random_tensors(hf))
    stored["rope_freqs.weight"] = np.array(factors, np.float32)
    metadata = {**metadata_of(hf, "llama"), **byte_metadata()}
    write_file(tmp_path / "model.gguf", "llama", metadata, stored)
    with pytest.raises(TwellError, match=message):
        read_gguf(tmp_path / "model.gguf")


def test_rotary_factors_of_one_are_none(tmp_path: Path) -> None:
    hf = configuration("llama")
    stored = gguf_tensors(hf, random_tensors(hf))
    stored["rope_freqs.weight"] = np.ones(8, np.float32)
    metadata = {**metadata_of(hf, "llama"), **byte_metadata()}
    write_file(tmp_path / "model.gguf", "llama", metadata, stored)
    assert read_gguf(tmp_path / "model.gguf")[0].rope_scaling is None


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    hf = configuration("llama")
    tensors = random_tensors(hf)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((64, 160), np.float32)
    write_model(tmp_path / "model.gguf", hf, tensors)
    with pytest.raises(TwellError, match=r"blk.1.ffn_up.weight of shape \(64, 160\)"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_1", "I8"])
def test_types_that_cannot_be_unpacked_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    hf = {**configuration("qwen2"), **WIDE}
    shapes = {name: value.shape for name, value in gguf_tensors(hf, random_tensors(hf)).items()}
    stored = raw_tensors(gguf.GGMLQuantizationType[kind], shapes)
    metadata = {**metadata_of(hf, "qwen2"), **byte_metadata()}
    write_file(tmp_path / "model.gguf", "qwen2", metadata, stored, kind)
    with pytest.raises(TwellError, match=f"type {kind} cannot be unpacked: fetch the model in"):
        read_gguf(tmp_path / "model.gguf")


def test_common_types_need_no_package_and_others_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = configuration("llama")
    write_model(tmp_path / "common.gguf", hf, random_tensors(hf), "Q4_1")
    write_model(tmp_path / "other.gguf", hf, random_tensors(hf), "Q5_1")
    monkeypatch.setitem(sys.modules, "gguf", None)
    read_gguf(tmp_path / "common.gguf")
    with pytest.raises(TwellError, match=r"the package gguf, .*twell_numba\[gguf\]"):
        read_gguf(tmp_path / "other.gguf")


def test_any_damage_of_the_header_is_read_or_refused(tmp_path: Path) -> None:
    hf = {**configuration("llama"), "num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    write_model(path, hf, random_tensors(hf))
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for place in rng.integers(4, 6000, rng.integers(1, 4)):
            damaged[place] = rng.choice([0, 1, 0x7F, 0xFF, rng.integers(256)])
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except TwellError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert 50 < refused < 300
