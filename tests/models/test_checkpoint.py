import errno
import io
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from twell_numba.errors import TwellError, UsageError
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.checkpoint import (
    load_config,
    load_model,
    resolve_checkpoint,
    save_model,
)
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=256,
    d_model=16,
    d_ffn=16,  # as wide as the model: a wrong layout of the down projection would fit
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    context_length=32,
    rope_base=5e4,
)
DOWN = "model.layers.0.mlp.down_proj.weight"


def saved(folder: Path, config: ModelConfig = CONFIG, dtype: type = np.float32) -> Transformer:
    model = Transformer(config, np.random.default_rng(0), dtype)
    save_model(folder, model, ByteTokenizer())
    return model


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_a_path_that_there_is_not_for_the_activation_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, replace(CONFIG, activation="silu"))
    assert load_model(tmp_path)[0].ffn_path == "auto"
    assert load_model(tmp_path, ffn_path="dense")[0].ffn_path == "dense"
    for path in ("twell", "csr", "block_ell"):
        with pytest.raises(UsageError, match=f"{path} given for a model with the activation silu"):
            load_model(tmp_path, ffn_path=path)
    with pytest.raises(UsageError, match="8-bit floats given .* SiLU has no exact zeros"):
        load_model(tmp_path, float8=True)
    saved(tmp_path, replace(CONFIG, activation="relu2"))
    assert load_model(tmp_path, ffn_path="twell")[0].ffn_path == "twell"
    with pytest.raises(UsageError, match="csr given for a model with the activation relu2"):
        load_model(tmp_path, ffn_path="csr")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn", ["gated", "two_matrix"])
def test_round_trip(tmp_path: Path, ffn: str, tied: bool, dtype: type) -> None:
    config = replace(CONFIG, ffn=ffn, tied_embeddings=tied)
    model = saved(tmp_path, config, dtype)
    loaded, tokenizer = load_model(tmp_path, dtype)
    assert loaded.config == config
    assert isinstance(tokenizer, ByteTokenizer)
    parameters = loaded.parameters()
    for name, parameter in model.parameters().items():
        np.testing.assert_array_equal(parameters[name].value, parameter.value)
        assert parameters[name].value.dtype == dtype
        assert parameters[name].value.flags.c_contiguous
        assert parameters[name].value.flags.writeable
    assert (loaded.head.weight is loaded.embedding.table) == tied
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_layout_on_disk(tmp_path: Path) -> None:
    model = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    np.testing.assert_array_equal(tensors[DOWN], model.parameters()[DOWN].value.T)
    gate = "model.layers.0.mlp.gate_proj.weight"
    np.testing.assert_array_equal(tensors[gate], model.parameters()[gate].value)


def test_config_on_disk(tmp_path: Path) -> None:
    saved(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "rope_theta": 5e4,
        "tie_word_embeddings": True,
        "hidden_act": "relu",
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    assert {key: content[key] for key in expected} == expected


def test_a_two_matrix_model_does_not_pass_for_a_llama(tmp_path: Path) -> None:
    saved(tmp_path, replace(CONFIG, ffn="two_matrix"))
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["ffn"] == "two_matrix"
    assert content["model_type"] != "llama"
    assert content["architectures"] != ["LlamaForCausalLM"]


def test_files_have_the_usual_rights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "usual").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_dtypes_are_read_into_the_one_asked_for(tmp_path: Path, dtype: type) -> None:
    model = saved(tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({k: v.astype(dtype) for k, v in tensors.items()})
    )
    loaded, _ = load_model(tmp_path)
    for name, parameter in model.parameters().items():
        expected = parameter.value.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(loaded.parameters()[name].value, expected)
        assert loaded.parameters()[name].value.dtype == np.float32


def test_older_form_of_the_rotary_base(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, rope_parameters=None, rope_theta=123.0)
    assert load_config(tmp_path).rope_base == 123.0


def test_a_copy_of_the_tied_head_is_accepted_if_equal(tmp_path: Path) -> None:
    saved(tmp_path)
    table = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[table]}))
    load_model(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[table] + 1}))
    with pytest.raises(TwellError, match="lm_head.weight that differs"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"ffn": ["gated"]}, "ffn"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' given, one of relu, silu, relu2 wanted"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window 16"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "window 16"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"head_dim": 8}, r"q_proj.weight of shape \(16, 16\), shape \(32, 16\)"),
        ({"head_dim": "4"}, "head_dim='4'"),
        ({"hidden_size": "16"}, "d_model='16'"),
        ({"num_attention_heads": 3}, "not divisible"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "no factor given.*llama3",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "no factor given.*linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn' given"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor '4' given"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": [1]}, "rope_scaling \\[1\\] given, an object wanted"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn' given"),
        ({"num_hidden_layers": 10**9}, "n_layers=1000000000 given, at most 4096 wanted"),
        ({"rms_norm_eps": 10**400}, "norm_eps=1000"),
        ({"head_dim": 10**400}, "head_dim=1000"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "has a tensor model.layers.1"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"intermediate_size": 24}, r"shape \(16, 16\), shape \(24, 16\) wanted"),
        ({"vocab_size": 255}, "tokenizer of 256 tokens for a model of 255"),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(
    tmp_path: Path, changes: dict, message: str
) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    refused(tmp_path, message)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(TwellError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act"]
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    saved(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    refused(tmp_path, key)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    saved(tmp_path)
    (tmp_path / name).unlink()
    refused(tmp_path, "holds no checkpoint" if name == "config.json" else f"{name} is missing")


@pytest.mark.parametrize("content", ["", "{", "\ufffd", "[]", "7"])
def test_a_config_that_is_no_description(tmp_path: Path, content: str) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text(content, encoding="utf-16")
    refused(tmp_path, "config.json is not JSON")
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json (is not JSON|does not describe a model)")


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"], ids=["nested", "digits"]
)
def test_a_config_that_python_does_not_parse(tmp_path: Path, content: str) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json is not JSON")


def refusing(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have the system refuse to open a file or to list a folder, whoever asks."""

    def ask(function: Callable[..., Any], asked: object, *arguments: Any, **more: Any) -> Any:
        if str(asked) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(asked, *arguments, **more)

    for module, name in ((io, "open"), (os, "listdir"), (os, "scandir")):
        monkeypatch.setattr(module, name, partial(ask, getattr(module, name)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    refusing(monkeypatch, tmp_path / name)
    refused(tmp_path, f"cannot read {tmp_path / name}: Permission denied; get permission")


def test_folders_that_may_not_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    with monkeypatch.context() as patch:
        refusing(patch, tmp_path / "checkpoints")
        with pytest.raises(TwellError, match=r"checkpoints: Permission denied; get permission"):
            resolve_checkpoint(tmp_path)

    def refuse(path: object, *arguments: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        with pytest.raises(TwellError, match=f"cannot read {tmp_path}: Permission denied"):
            resolve_checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights(tmp_path: Path, kept: int) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, "model.safetensors cannot be read as safetensors.*truncated")


def test_foreign_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(1000))
    refused(tmp_path, "model.safetensors cannot be read")


def split(folder: Path) -> None:
    """Split a checkpoint's weights over two files."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    names = sorted(tensors)
    path.unlink()
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        write_tensors(folder / file, {name: tensors[name] for name in chosen})
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_split_weights(tmp_path: Path) -> None:
    model = saved(tmp_path)
    split(tmp_path)
    loaded, _ = load_model(tmp_path)
    for name, parameter in model.parameters().items():
        np.testing.assert_array_equal(loaded.parameters()[name].value, parameter.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "index.json has no weight_map"),
        ("[", "index.json is not JSON"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "names '../b.safetensors' as the file of a"),
        ('{"weight_map": {"a": 3}}', "names 3 as the file of a"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing, one of 1 files"),
    ],
)
def test_an_index_that_leads_nowhere_is_one_line(
    tmp_path: Path, content: str, message: str
) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, message)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = read_tensors(tmp_path / "model.safetensors")
    split(tmp_path)
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", tensors)
    refused(tmp_path, "two tensors for")


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_a_pruned_model_without_sparse_paths_is_held_dense(tmp_path: Path, activation: str) -> None:
    model = saved(tmp_path, replace(CONFIG, activation=activation))
    for parameter in model.ffn_parameters:
        parameter.value[1:] = 0
    save_model(tmp_path, model, ByteTokenizer())
    loaded, _ = load_model(tmp_path)
    assert loaded.weight_format == "dense"
    tokens = np.arange(5)[None, :]
    np.testing.assert_array_equal(loaded.logits(tokens), model.logits(tokens))


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin beside it is pickled")


def test_weights_for_inference_stay_in_their_file(tmp_path: Path) -> None:
    saved(tmp_path)
    loaded, _ = load_model(tmp_path)
    value = loaded.parameters()["model.embed_tokens.weight"].value
    base = value
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, (np.memmap, mmap.mmap))
    before = (tmp_path / "model.safetensors").read_bytes()
    value += 1  # in memory alone
    assert (tmp_path / "model.safetensors").read_bytes() == before
    again, _ = load_model(tmp_path, keep_format=True)
    assert not np.array_equal(again.parameters()["model.embed_tokens.weight"].value, value)


@pytest.mark.parametrize("transposed", [(), ("gate", "up"), ("down",), ("gate", "up", "down")])
def test_the_published_layout_is_told_apart_by_shape(
    tmp_path: Path, transposed: tuple[str, ...]
) -> None:
    model = saved(tmp_path, replace(CONFIG, d_ffn=24))

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            if ".mlp." in name:
                part = name.split(".")[-2].removesuffix("_proj")
                value = tensors.pop(name)  # the down projection is [D, F] here
                value = value.T if part in transposed else value
                tensors[name.replace("_proj.weight", "_weight")] = np.ascontiguousarray(value)

    edit_tensors(tmp_path, rename)
    edit_config(tmp_path, sparsity_l1=2e-5)
    loaded, _ = load_model(tmp_path)
    for name, parameter in model.parameters().items():
        np.testing.assert_array_equal(loaded.parameters()[name].value, parameter.value)


def test_the_published_layout_that_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)  # D = F
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {
                name.replace("_proj.weight", "_weight"): tensors.pop(name)
                for name in list(tensors)
                if ".mlp." in name
            }
        ),
    )
    edit_config(tmp_path, sparsity_l1=2e-5)
    refused(tmp_path, "nothing says which axis is which")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(DOWN), f"no tensor {DOWN} "),
        (lambda tensors: tensors.update(extra=np.zeros(1)), "has a tensor extra"),
        (lambda tensors: tensors.update({DOWN: np.zeros((16, 8))}), r"shape \(16, 8\)"),
        (lambda tensors: tensors.update({DOWN: np.zeros((16, 16), np.int8)}), "dtype int8"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, edit)
    refused(tmp_path, message)


def test_newest_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".1f.step-999").mkdir()
    (tmp_path / "checkpoints" / "step-x").mkdir()
    newest = tmp_path / "checkpoints" / "step-100"
    saved(newest)
    assert resolve_checkpoint(tmp_path) == newest
    assert resolve_checkpoint(tmp_path / "checkpoints") == newest
    assert resolve_checkpoint(str(newest)) == newest
    assert load_model(tmp_path)[0].config == CONFIG


def test_paths_that_lead_to_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, message in [("none", "does not exist"), ("file", "or a GGUF file"), ("", "holds no")]:
        with pytest.raises(TwellError, match=message) as caught:
            resolve_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value)
