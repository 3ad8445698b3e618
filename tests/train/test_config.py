"""Settings: presets, files, overrides, and what is refused."""

import dataclasses
import tomllib

import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.train.config import (
    TrainConfig,
    parse_override,
    read_toml,
    require_bpe_vocab_size,
    require_resumable,
    resolve,
    with_overrides,
)
from twell_numba.train.presets import PRESETS, SPARSIFY


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != SPARSIFY])
def test_every_preset_is_valid(preset):
    assert resolve(preset).preset == preset


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("tiny", 1.1),
        ("tiny-weight-sparse", 1.1),
        ("small", 10.2),
        ("base", 124.3),
        ("paper-0.5b", 512),
        ("paper-1b", 1026),
        ("paper-1.5b", 1539),
        ("paper-2b", 2053),
    ],
)
def test_presets_have_the_sizes_they_are_named_for(preset, millions):
    config = resolve(preset)
    vocab_size = config.bpe_vocab_size if config.tokenizer == "bpe" else 256
    count = config.model_config(vocab_size).parameter_count()
    assert count / 1e6 == pytest.approx(millions, rel=0.02)


def test_paper_presets_train_on_512_sequences_of_2048_a_step():
    assert resolve("paper-1b").tokens_per_step == 512 * 2048


def test_later_sources_win(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('preset = "small"\nseed = 3\nsteps = 7\n')
    config = resolve(None, file, ["steps=9"])
    assert (config.preset, config.seed, config.steps) == ("small", 3, 9)
    assert config.d_model == PRESETS["small"]["d_model"]
    assert resolve("tiny", file).preset == "tiny"
    assert resolve(None, file, ["preset=base"]).preset == "base"


def test_warmups_follow_the_number_of_steps_unless_given():
    tenth = PRESETS["tiny"]["steps"] // 10
    config = resolve("tiny", overrides=[f"steps={tenth}"])
    assert config.warmup_steps == PRESETS["tiny"]["warmup_steps"] // 10
    assert config.l1_warmup_steps == PRESETS["tiny"]["l1_warmup_steps"] // 10
    config = resolve("tiny", overrides=[f"steps={tenth}", "warmup_steps=5"])
    assert config.warmup_steps == 5


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("learning_rate=1", 1.0),
        ("learning_rate=3e-4", 3e-4),
        ("steps = 12", 12),
        ("revive_dead=true", True),
        ("data=my texts/a=b.txt", "my texts/a=b.txt"),
        ('data="quoted"', "quoted"),
        ("sample_prompt='def '", "def "),
        ("data='unclosed", "'unclosed"),
    ],
)
def test_override_values(override, value):
    key, parsed = parse_override(override)
    assert parsed == value
    assert type(parsed) is type(value)
    assert key == override.split("=")[0].strip()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "key=value wanted"),
        ("lerning_rate=1", "did you mean 'learning_rate'"),
        ("steps=many", "a whole number wanted"),
        ("steps=1.5", "a whole number wanted"),
        ("steps=true", "a whole number wanted"),
        ("steps=", "a whole number wanted"),
        ("learning_rate=true", "a number wanted"),
        ("learning_rate=nan", "a finite number wanted"),
        ("learning_rate=inf", "a finite number wanted"),
        ("revive_dead=1", "true or false wanted"),
        ("steps=0", "at least 1 wanted"),
        ("batch_size=0", "at least 1 wanted"),
        ("seed=-1", "at least 0 wanted"),
        ("learning_rate=0", "above 0 wanted"),
        ("l1_activation=-1e-5", "at least 0 wanted"),
        ("beta2=1.0", "less than 1 wanted"),
        ("minimum_learning_rate_fraction=2", "from 0 to 1 wanted"),
        ("n_heads=3", "d_model=128 is not divisible by n_heads=3"),
        ("n_kv_heads=3", "n_heads=4 is not divisible by n_kv_heads=3"),
        ("ffn=moe", "gated, two_matrix wanted"),
        ("ffn_path=fast", "auto, dense, twell wanted"),
        ("tokenizer=word", "byte, bpe, model wanted"),
        ("data=", "stdlib, a file"),
        ("sample_prompt=", "at least one character"),
        ("preset=tny", "did you mean 'tiny'"),
        ("steps=1\nd_ffn=3", "it holds more settings"),
        ('data="a"\nsteps=3', "it holds more settings"),
        ("learning_rate=1" + "0" * 400, "a number that fits 64 bits wanted"),
        ("steps=" + "9" * 5000, "a whole number wanted"),
        ("seed=0x" + "f" * 5000, "a number that fits 64 bits wanted"),
        ("steps=" + "[" * 5000, "a whole number wanted"),
        ("steps=" + "[" * 5000 + "]" * 5000, "a whole number wanted"),
        ("d_ffn=" + "1" + "0" * 20, "a number that fits 64 bits wanted"),
        ("d_ffn=2000000", "d_ffn=2000000 given, at most 1048576 wanted"),
        ("n_layers=3000000", "n_layers=3000000 given, at most 4096 wanted"),
        ("batch_size=1000000", "batch_size=1000000 given, at most 65536 wanted"),
        ("gradient_accumulation=1000000", "at most 65536 wanted"),
        ("l1_activation=1e30", "l1_activation=1e+30 given, at most 1000 wanted"),
        ("learning_rate=1e30", "learning_rate=1e+30 given, at most 100 wanted"),
        ("weight_decay=1e30", "at most 1000 wanted"),
        ("adam_eps=1e-50", "at least 1e-30 wanted"),
        ("norm_eps=1e-50", "a number from 1e-30 to 1 wanted"),
        ("norm_eps=2", "a number from 1e-30 to 1 wanted"),
        ("target_density=0", "target_density=0.0 given, a number above 0 and at most 1 wanted"),
        ("target_density=1.5", "target_density=1.5 given, a number above 0 and at most 1 wanted"),
        ("target_density=-0.1", "above 0 and at most 1 wanted"),
        ("target_density=1e-6", "leaves less than one entry of an FFN weight of 512 x 128"),
        ("target_density_step=10", "without a target_density below 1"),
        ("l1_weight=-1", "at least 0 wanted"),
        ("l1_weight=1e30", "at most 1000 wanted"),
        ("l1_block=1e30", "at most 1000 wanted"),
        ("weight_threshold=1e30", "at most 1000 wanted"),
        ("weight_threshold=-0.1", "at least 0 wanted"),
        ("sparse_from=-1", "at least 0 wanted"),
        ("sparse_from=2401", "sparse_from=2401 given, at most steps=2400 wanted"),
        ("sparse_from=100", "nothing that makes weights zero before it"),
        ("sparse_format=coo", "csr, block_ell wanted"),
        ("x" * 5000 + "=1", "no setting is called"),
        ("x" * 5000, "key=value wanted"),
    ],
    ids=lambda text: text[:30],
)
def test_wrong_overrides_are_refused_in_one_line(override, message):
    with pytest.raises(UsageError) as caught:
        resolve(overrides=[override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["l1_weight=1", "l1_block=1"], "l1_weight=1.0 given with l1_block=1.0, one of them"),
        (["l1_weight=1", "sparse_format=block_ell"], "l1_block for weights in blocks wanted"),
        (["l1_block=1", "block_size=129"], "block_size=129 given, 1 to 128 wanted"),
        (["sparse_format=block_ell", "block_size=0"], "block_size=0 given, at least 1 wanted"),
        (["block_size=0"], "block_size=0 given, at least 1 wanted"),
        (["block_size=-3"], "block_size=-3 given, at least 1 wanted"),
        (
            ["weight_threshold=0.01", "l1_warmup_steps=2400"],
            "l1_warmup_steps=2400 given, fewer than steps=2400 wanted: weight_threshold acts after",
        ),
        (
            ["preset=tiny-weight-sparse", "target_density=1"],
            "a target_density below 1, l1_weight, l1_block or weight_threshold wanted, or "
            "sparse_from=0 (--set sparse_from=0) to keep all weights",
        ),
        (["l1_block=1", "target_density=0.001"], "less than one block of an FFN weight"),
        (["target_density=0.1", "target_density_step=2401"], "at most steps=2400 wanted"),
        (
            ["target_density=0.1", "target_density_step=900", "sparse_from=800"],
            "target_density_step=900 given, at most sparse_from=800 wanted",
        ),
        (["target_density=0.1", "target_density_step=300"], "l1_warmup_steps=300 given, fewer"),
        (["target_density=0.1", "sparse_from=200"], "fewer than 200 wanted"),
        (["l1_weight=1", "sparse_from=300"], "fewer than sparse_from=300 wanted"),
        (
            ["l1_weight=1", "sparse_from=900", "ffn_path=twell"],
            "ffn_path=twell given with sparse_fr",
        ),
        (
            ["l1_weight=1", "sparse_from=900", "activation=silu"],
            "activation=silu, relu wanted",
        ),
        (
            ["l1_weight=1", "sparse_from=900", "ffn_path=dense"],
            "ffn_path=dense given with sparse_fr",
        ),
        (
            ["l1_weight=1", "sparse_from=900", "revive_dead=true"],
            "revive_dead=true given with spar",
        ),
    ],
)
def test_settings_of_weight_sparsity_that_do_not_fit_are_refused_in_one_line(overrides, message):
    with pytest.raises(UsageError) as caught:
        resolve(overrides=overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["l1_weight=1"],
        ["l1_block=1", "block_size=128"],
        ["weight_threshold=0.01", "sparse_from=900"],
        ["weight_threshold=0.01", "l1_warmup_steps=2399"],
        ["l1_warmup_steps=2400"],
        ["preset=tiny-weight-sparse", "target_density=1", "sparse_from=0"],
        ["target_density=0.1", "sparse_from=2400", "target_density_step=2400"],
        ["target_density=0.1", "l1_weight=0.2", "sparse_from=400"],
        ["target_density=0.1", "sparse_format=block_ell", "block_size=8"],
        ["block_size=4096"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_settings_of_weight_sparsity_that_fit_are_taken(overrides):
    resolve(overrides=overrides)


def test_the_target_is_reached_when_zeros_are_frozen_or_at_the_end_unless_set():
    def step(*overrides):
        return resolve(overrides=overrides).filled_in().target_density_step

    assert step() == 0
    assert step("target_density=0.1") == 2400
    assert step("target_density=0.1", "sparse_from=1000") == 1000
    assert step("target_density=0.1", "sparse_from=1000", "target_density_step=900") == 900


def test_weights_go_in_blocks_or_one_by_one_as_the_format_wants():
    assert resolve().weight_block_size == 1
    assert resolve(overrides=["target_density=0.1", "block_size=8"]).weight_block_size == 1
    blocks = ["target_density=0.1", "block_size=8", "sparse_format=block_ell"]
    assert resolve(overrides=blocks).weight_block_size == 8
    assert resolve(overrides=["l1_block=0.1"]).weight_block_size == 16


def test_the_format_of_weights_changes_at_sparse_from():
    config = resolve(overrides=["l1_weight=1", "sparse_from=900"])
    assert [config.weight_format_after(step) for step in (0, 899, 900, 901)] == [
        "dense",
        "dense",
        "csr",
        "csr",
    ]
    assert resolve().weight_format_after(2400) == "dense"


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_a_short_run_of_the_sparse_preset_freezes_its_zeros_too(steps):
    config = resolve("tiny-weight-sparse", overrides=[f"steps={steps}"])
    assert 1 <= config.sparse_from <= steps


@pytest.mark.parametrize(("size", "message"), [(2**20 + 1, "at most 1048576"), (10**18, "at most")])
def test_a_vocabulary_far_too_large_is_refused(size, message):
    with pytest.raises(UsageError, match=message):
        resolve(overrides=["tokenizer=bpe", f"bpe_vocab_size={size}"])
    with pytest.raises(UsageError, match=message):
        require_bpe_vocab_size(size)
    require_bpe_vocab_size(2**20)


def test_bpe_needs_more_ids_than_bytes():
    with pytest.raises(UsageError, match="more than 256 wanted"):
        resolve(overrides=["tokenizer=bpe", "bpe_vocab_size=256"])


def test_unknown_preset_is_refused_with_a_suggestion():
    with pytest.raises(UsageError, match="no preset is called 'smal'; did you mean 'small'"):
        resolve("smal")
    with pytest.raises(UsageError, match="known: tiny, .*paper-2b$"):
        resolve("nope")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = [1]", r"steps=\[1\] given, a whole number wanted"),
        ('steps = "100"', "steps='100' given, a whole number wanted"),
        ("preset = 3", "preset=3 given, a string wanted"),
        ("[train]\nsteps = 1", "settings have no sections"),
        ("step = 1", "did you mean 'steps'"),
    ],
)
def test_wrong_config_files_are_refused(tmp_path, text, message):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        resolve(config_file=file)


@pytest.mark.parametrize(
    "content",
    [
        b"steps 100",
        b"\xff\xfe\x00",
        b"steps = ",
        b"steps = " + b"[" * 5000 + b"]" * 5000,
        b"steps = " + b"9" * 5000,
    ],
    ids=["words", "bytes", "nothing", "nested", "digits"],
)
def test_a_file_that_is_not_toml_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "settings.toml"
    file.write_bytes(content)
    with pytest.raises(TwellError, match="is not a TOML file") as caught:
        read_toml(file)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    assert read_toml(file) == {"steps": 7}


def test_a_missing_config_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(TwellError, match="no config file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(TwellError, match="cannot read config file"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "prompt", ['quotes " and \\', "line\nbreak\ttab", "Ærø 🎈", "\x00\x1b\x7f\x85", "# [a] = 'b'"]
)
def test_toml_round_trip_of_awkward_values(tmp_path, prompt):
    config = TrainConfig(sample_prompt=prompt, learning_rate=0.1 + 0.2, adam_eps=1e-30)
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(), encoding="utf-8", newline="")
    assert TrainConfig(**read_toml(file)) == config
    assert tomllib.loads(config.to_toml()) == dataclasses.asdict(config)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(UsageError, match="valid Unicode wanted"):
        resolve(overrides=["data=caf\udce9"])


def test_resuming_may_change_reports_and_steps_only():
    config = resolve("tiny")
    require_resumable(config, with_overrides(config, ["steps=2000", "eval_interval=7"]))
    require_resumable(config.filled_in(), config)
    require_resumable(config, config.filled_in())
    with pytest.raises(UsageError, match="learning_rate=0.1 given to resume"):
        require_resumable(config, with_overrides(config, ["learning_rate=0.1"]))
