"""Every GPU kernel compiles for every target, without a GPU."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

import twell_numba.kernels  # noqa: E402
from twell_numba.device.gpu import TARGETS, Kernel  # noqa: E402

FAMILIES = sorted(
    path.parent.name for path in Path(twell_numba.kernels.__file__).parent.glob("*/cuda.py")
)
# Modules with kernels beside those in a family's ``cuda.py``.
SHARED = [
    "cuda_scalars",
    "cuda_sums",
    "block_ell.cuda_tensor_cores",
    "twell.cuda_gate",
    "twell.dense_tail",
    "twell.float8_rows",
    "twell.hopper_gate",
    "twell.hot_neurons",
    "twell.entry_gradients",
    "twell.entry_transpose",
    "twell.learned_groups",
    "twell.shared_lists",
    "twell.shared_neurons",
    "twell.strip_rows",
    "twell.token_groups",
]
# Modules whose kernels take 16 bits alone, from compute capability 8.0 on.
ON_TENSOR_CORES = ["block_ell.cuda_tensor_cores", "twell.cuda_gate", "twell.dense_tail"]
# Modules whose kernels take bfloat16 alone, on Hopper alone.
ON_HOPPER = [
    "twell.hopper_gate",
    "twell.hot_neurons",
    "twell.learned_groups",
    "twell.shared_lists",
    "twell.shared_neurons",
    "twell.token_groups",
]


def signatures(dtype):
    """Return the kinds of arguments of every kernel, by family and name, for arrays of a dtype."""
    array = f"{dtype}*"
    wide = "float64" if dtype == "float64" else "float32"
    wide_array, size, index = f"{wide}*", "int", "int64*"
    norm = (array, array, size, array, wide, array, array, wide_array)
    norm_backward = (array, array, array, wide_array, array, size, array)
    pairs = (*[array] * 4, wide_array, wide_array)  # dy, q, k, v, L and row sums
    return {
        "adamw": {
            "_step": (wide_array, array, wide_array, wide_array, *[wide] * 9, size),
            "_step_recorded": (
                *["float32*"] * 4,
                array,
                size,
                "float32*",
                "float32*",
                size,
                size,
            ),
            "_clip": ("float64*", "float64*", "float64", "float32*"),
        },
        "bias": {
            "_add_to_rows": (array, array, *[size] * 3),
            "_sum_chunks": (array, wide_array, *[size] * 4),
        },
        "block_ell": {
            "_rows_wide": (array, "int32*", wide_array, wide_array, *[size] * 6),
            "_rows_narrow": (array, index, array, array, *[size] * 5),
            "_columns_wide": (array, index, index, wide_array, wide_array, *[size] * 6),
            "_columns_narrow": (array, index, index, array, array, *[size] * 5),
            "_left": (array, array, index, index, array, *[size] * 5),
            "_sample": (array, "int32*", wide_array, wide_array, *[size] * 7),
        },
        "block_ell.cuda_tensor_cores": tensor_core_signatures(array),
        "attention": {
            "_forward": (array, array, array, index, wide, array, wide_array, *[size] * 7),
            "_attend_parts": (*[array] * 3, index, wide, *[wide_array] * 3, *[size] * 10),
            "_attend_parts_by_eights": (
                *[array] * 3,
                index,
                wide,
                *[wide_array] * 3,
                *[size] * 10,
            ),
            "_append": (array, array, index, *[size] * 5),
            "_combine_parts": (*[wide_array] * 3, array, wide_array, *[size] * 5),
            "sum_rows": (array, array, wide_array, *[size] * 4),
            "backward_by_queries": (*pairs, wide, array, *[size] * 6),
            "backward_by_keys": (*pairs, wide, array, array, *[size] * 6),
        },
        "conversion": conversion_signatures(dtype),
        "cross_entropy": {
            "_forward": (array, index, wide_array, wide_array, size, size),
            "_backward": (array, index, wide_array, wide, array, size, size),
            "_in_place": (array, index, wide_array, wide_array, *[size] * 3),
        },
        "cuda_scalars": {
            "fill": (wide_array, "float64"),
            "sum_eights": (array, "float64*", *[size] * 3),
            "sum_parts": ("float64*", "float64*", size),
        },
        "cuda_sums": {
            "_add": (array, wide_array, size),
            "_or": ("bool*", "bool*", size),
            "_add_time": ("float64*",),
            "_add_column_sums": (wide_array, wide_array, size, size),
        },
        "csr": {
            "_gather_wide": (array, "int32*", "int64*", array, array, size, size, size),
            "_gather_eight": (array, "int32*", "int64*", wide_array, wide_array, *[size] * 3),
            "_gather_narrow": (array, "int32*", "int32*", array, array, size, size),
            "_left": (array, array, index, index, array, size, size, size),
            "_sample": (array, "int32*", "int32*", array, array, *[size] * 4),
        },
        "dense_ffn": {
            "activate_gated": (size, array, array, array, size, size),
            "activate_gated_backward": (size, *[array] * 3, "float32*", array, size, size),
            "activate": (size, array, array, size, size),
            "activate_backward": (size, array, array, "float32*", size, size),
            "_count_chunks": (array, "float64*", *[size] * 4),
            "_count_neurons": ("float64*", "float64*", "bool*", size, size),
            "_count_all": ("float64*", "float64*", size),
        },
        "ell_product": {
            "_multiply_wide": (
                array,
                "uint16*",
                "int32*",
                wide_array,
                wide_array,
                *[size] * 6,
            ),
            "_multiply_narrow": (array, "int32*", "int32*", array, array, *[size] * 5),
            "_multiply_tail_wide": (array, index, wide_array, wide_array, *[size] * 4),
            "_multiply_tail_narrow": (array, index, array, array, *[size] * 3),
        },
        "dense_product": {},
        "embedding": {
            "_take": (array, index, array, *[size] * 4),
            "_sort": (index, "int32*", "int32*", size, size),
            "_add_runs": (array, "int32*", "int32*", wide_array, wide_array, *[size] * 4),
            "_add_long_runs": ("int32*", wide_array, wide_array, *[size] * 4),
        },
        "paged_attention": {
            "_store": (array, array, index, *[size] * 3),
            "_attend": (*[array] * 3, *[index] * 3, wide, array, *[size] * 10),
        },
        "proximal": {
            "_threshold": (wide_array, wide, size, "float64*", size, size),
            "_soft_blocks": (wide_array, size, "float64", "float64*", size, size),
            "_mean_squares": (wide_array, size, "float64*", size, size),
            "_zero_blocks": (wide_array, size, index, *[size] * 3),
            "_count_digits": (f"int{wide[5:]}*", size, index, index, *[size] * 3),
            "_choose_digit": (index, index, size, size),
            "_count_alike": (wide_array, wide, index, size, size),
            "_share_excess": (index, index, size),
            "_cut_alike": (wide_array, wide, index, index, size, size),
        },
        "revival": {
            "_revive": (wide_array, wide_array, wide_array, "bool*", *["float64"] * 2, *[size] * 5),
        },
        "rms_norm": {
            "_forward": (*norm, *[size] * 3),
            "_forward_in_registers": (*norm, size, size),
            "_backward": (*norm_backward, *[size] * 3),
            "_backward_in_registers": (*norm_backward, wide_array, *[size] * 3),
            "_sum_chunks": (array, array, wide_array, wide_array, size, size, size),
        },
        "rotary": {
            name: (array, wide_array, wide_array, wide, array, *[size] * 4)
            for name in ("_turn", "_turn_eights")
        },
        "sampling": {
            "_sample": (
                "float32*" if dtype == "float64" else array,
                "float64*",
                "float64",
                size,
                "float64",
                "float64",
                "float64*",
                index,
                *[size] * 3,
            ),
        },
        "sparse_ffn": {
            "_gated_relu": (*[wide_array] * 3, index, "float64*", "bool*", *[size] * 3),
            "_gated_relu_backward": (*[wide_array] * 4, size, size),
            "add_statistics": (index, "float64*", "float64*", size),
        },
        "transpose": {"_transpose": (array, wide_array, size, size)},
        "twell": twell_signatures(array, wide_array),
        # the others of entry_gradients and strip_rows are compiled by their own tests
        "twell.entry_gradients": {
            "add_split_parts": (wide_array, "int32*", "int32*", *[array] * 3, size, size),
        },
        "twell.entry_transpose": {
            "count_entries": ("uint16*", "int32*", "int32*", *[size] * 7),
            "add_chunks": ("int32*", "int32*", size, size),
            "number_parts": (*["int32*"] * 6, *[size] * 4),
            "place_entries": ("uint16*", *["int32*"] * 3, "uint16*", "int32*", *[size] * 7),
        },
        "twell.strip_rows": strip_rows_signatures(array, wide_array),
        "twell.shared_lists": {
            "list_union": (
                "bfloat16*",
                "uint16*",
                *["int32*"] * 4,
                index,
                "int32*",
                "int32*",
                *[size] * 7,
            ),
            "finish_lists": (*["int32*"] * 2, index, index, size, size, *["int32*"] * 3, size),
        },
        # sum_neurons is compiled by its own test
        "twell.shared_neurons": {
            "multiply_tokens": (
                "bfloat16*",
                "int32*",
                "bfloat16*",
                "int32*",
                index,
                index,
                "int32*",
                "bfloat16*",
                "bfloat16*",
                "bool*",
                "int32*",
                "float32*",
                *[size] * 4,
            ),
            "multiply_tokens_backward": (
                "bfloat16*",
                "int32*",
                "bfloat16*",
                "int32*",
                index,
                index,
                "int32*",
                "bfloat16*",
                "int32*",
                "float32*",
                *["bfloat16*"] * 5,
                *[size] * 4,
            ),
            "add_statistics_of_parts": (
                *["int32*"] * 3,
                "float32*",
                "int32*",
                "float32*",
                size,
                size,
            ),
        },
        "twell.token_groups": {
            "group_tokens": ("uint16*", "int32*", "int32*", *["uint8*"] * 3, *[size] * 4),
            "place_tokens": ("uint8*", "uint8*", "int32*", size),
        },
        "twell.learned_groups": {
            "seed_groups": ("uint8*", "int32*", size),
            "count_by_group": ("int32*", "uint16*", "uint8*", "int32*"),
            "add_squares": ("int32*", "int32*", "float32*", size, size),
            "score_neurons": (
                *["int32*"] * 2,
                "float32*",
                "int32*",
                "uint8*",
                array,
                size,
                size,
            ),
            "number_groups": (array, "int32*"),
        },
        "twell.hot_neurons": {
            "write_matrices": (*["int32*"] * 3, *["uint16*"] * 4, array, *[size] * 5),
            "add_products": ("int32*", "float32*", *[array] * 3, size, size),
        },
        "twell.hopper_gate": {
            "gate_and_pack": (
                "tensor_map",
                "tensor_map",
                index,
                "bfloat16*",
                "uint16*",
                "int32*",
                *[size] * 4,
            ),
        },
        "twell.dense_tail": dense_tail_signatures(array),
        "twell.float8_rows": {
            "expand": ("uint8*", "float32*", "int32*", array, *[size] * 3),
        },
        "twell.cuda_gate": {
            "gate_pack_tiles": (array, array, array, "uint16*", "int32*", *[size] * 5),
        },
    }


def tensor_core_signatures(array):
    """Those of layers with block-ELL weights on tensor cores."""
    columns, starts, sums, size = "int32*", "int32*", "float32*", "int"
    weight = (array, columns, size)
    forward = (array, *weight, *weight, *[array] * 3, columns, sums, *[size] * 5)
    backward = (array, *weight, array, array, sums, array, array, *[size] * 5)
    product = (array, array, columns, starts)
    by_strip = {
        "hidden_forward": forward,
        "hidden_backward": backward,
        "sum_columns": (*product, *product, array, *[size] * 5),
        "sample_blocks": (array, array, starts, starts, columns, sums, *[size] * 8),
    }
    return {f"{name}_{strip}": kinds for name, kinds in by_strip.items() for strip in (32, 64)} | {
        "turn_blocks": (array, starts, starts, array, columns, *[size] * 3),
        "add_parts": (sums, columns, sums, *[size] * 3),
        "add_counts": (columns, sums, "int64*", "float64*", "bool*", size, size),
    }


def conversion_signatures(dtype):
    """Those of conversions, which take values as integers of as many bits."""
    values = {"bfloat16": "uint16*", "float16": "uint16*", "float64": "int64*"}.get(dtype, "int32*")
    index, long, counts, size = "int32*", "int64*", "int32*", "int"
    rows = (long, values, index)  # places, data and indices that are filled
    csr = (values, index, index)
    packed = (values, "uint16*", counts)
    return {
        "sum_parts": (long, long, size),
        "scan_sums": (long, size),
        "scan_parts": (long, long, index, size),
        "count_digits": (index, counts, *[size] * 5),
        "place_digits": (*[index] * 5, *[size] * 5),
        "find_starts": (index, index, size, size),
        "find_rows": (index, index, index, size, size),
        "_rows_of_dense": (values, size, *rows, *[size] * 3),
        "_rows_of_csr": (*csr, size, *rows, *[size] * 2),
        "_rows_of_segments": (*packed, values, long, size, long, index, index, *[size] * 9),
        "_rows_of_blocks": (values, index, size, *rows, *[size] * 6),
        "_number_tail": (long, long, size),
        "_count_segments": (index, index, counts, *[size] * 4),
        "_mark_overflows": (counts, counts, *[size] * 3),
        "_fill_segments": (*csr, counts, values, "uint16*", *[size] * 4),
        "_fill_tail": (*csr, index, long, values, size, size),
        "_mark_blocks": (index, index, index, *[size] * 3),
        "_number_blocks": (index, counts, size, size),
        "_place_blocks": (index, counts, index, *[size] * 3),
        "_fill_blocks": (*csr, index, values, *[size] * 4),
        "_scatter_csr": (*csr, values, size, size),
        "_scatter_segments": (*packed, values, *[size] * 5),
        "_scatter_tail": (values, long, size, values, size, size),
        "_scatter_blocks": (values, index, values, *[size] * 5),
        "_transpose_blocks": (values, index, index, values, index, *[size] * 4),
        "_take": (values, index, values, size),
        "_take_either": (values, values, index, values, size, size),
        "_put_either": (values, index, values, size, values, values, size, size),
    }


def dense_tail_signatures(array):
    """Those of rows in the tail of activation-sparse layers, on tensor cores."""
    listed, sums, size = ("int32*", "int32*", "int32*"), "float32*", "int"
    return {
        "tail_forward": (*[array] * 4, *listed, array, array, "int32*", sums, "bool*", *[size] * 7),
        "tail_backward": (*[array] * 5, *listed, sums, *[array] * 4, *[sums] * 3, *[size] * 6),
    }


def twell_signatures(array, wide_array):
    """Those of the activation-sparse layers."""
    columns, counts, size = "uint16*", "int32*", "int"
    packed = (array, columns, counts)
    statistics = (counts, wide_array, "bool*")
    tail = (array, counts, counts)
    return {
        "pack_tiles": (array, *packed, *[size] * 5),
        "pack_rows": (array, *packed, counts, *[size] * 4),
        "mark_tail": (counts, counts, *[size] * 3),
        "list_tail": (*[counts] * 3, size),
        "copy_rows": (array, counts, array, size, size),
        "add_statistics": (counts, wide_array, "float64*", size),
        "count_rows": (*packed, array, counts, *statistics, *[size] * 6),
        "forward_rows": (
            array, array, array, *packed, array, array, *statistics, *[size] * 7,
        ),
        "tail_up": (array, array, *tail, array, *[size] * 4),
        "tail_d_hidden": (array, array, *tail, "float32*", array, array, *[size] * 5),
        "tail_outputs": (array, *tail, array, array, *statistics, *[size] * 5),
        "tail_inputs": (array, array, *tail, *[array] * 3, *[size] * 5),
        "tail_gradients": (array, array, *tail, *[array] * 2, *[wide_array] * 3, *[size] * 5),
        "backward_rows": (
            *[array] * 4, *packed, array, wide_array, counts, *[array] * 4, *[size] * 7,
        ),
        "add_gradients": (
            array, array, counts, columns, *[array] * 3, *[wide_array] * 3, *[size] * 4,
        ),
    }  # fmt: skip


def strip_rows_signatures(array, wide_array):
    """Return those of the kernels of kernels/twell/strip_rows.py that serve every width.

    The others are compiled by test_twell_strip_rows_cuda.py.
    """
    counts, lists, size = "int32*", "uint16*", "int"
    return {
        "list_rows": ("uint16*", counts, counts, lists, lists, *[size] * 4),
        "finish_forward": (
            *(wide_array, array, array, counts, lists, lists, array),
            *(counts, wide_array, "bool*", *[size] * 3),
        ),
        "finish_backward": (
            *(wide_array, array, array, wide_array, counts, counts, lists),
            *[array] * 5,
            *[size] * 4,
        ),
    }


def kernels_of(family):
    name = family if family in SHARED else f"{family}.cuda"
    module = importlib.import_module(f"twell_numba.kernels.{name}")
    return {name: value for name, value in vars(module).items() if isinstance(value, Kernel)}


def test_no_kernel_is_left_out():
    assert {family: set(kernels_of(family)) for family in [*FAMILIES, *SHARED]} == {
        family: set(kernels) for family, kernels in signatures("float32").items()
    }


def compile_family(family, dtype, targets):
    if family in ON_TENSOR_CORES:
        targets = [target for target in targets if target != "75" and dtype.endswith("float16")]
    if family in ON_HOPPER:
        targets = [target for target in targets if target == "90a" and dtype == "bfloat16"]
    for name, kinds in signatures(dtype)[family].items():
        for target in targets:
            code, entry = kernels_of(family)[name].compile(kinds, target)
            assert code.startswith(b"\x7fELF"), (name, target)
            assert entry.encode() in code, (name, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, *SHARED])
def test_compiles_for_every_target(family, dtype):
    compile_family(family, dtype, TARGETS)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("family", [*FAMILIES, *SHARED])
def test_compiles_in_the_rarer_precisions(family, dtype):
    compile_family(family, dtype, ["75"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("family", [*FAMILIES, *SHARED])
def test_compiles_in_the_rarer_precisions_for_every_target(family, dtype):
    compile_family(family, dtype, TARGETS)
