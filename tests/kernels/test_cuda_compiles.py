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


def signatures(dtype):
    """Return the kinds of arguments of every kernel, by family and name, for arrays of a dtype."""
    array = f"{dtype}*"
    wide = "float64" if dtype == "float64" else "float32"
    wide_array, size, index = f"{wide}*", "int", "int64*"
    pairs = (*[array] * 4, wide_array, wide_array)  # dy, q, k, v, L and row sums
    return {
        "adamw": {
            "_step": (wide_array, array, wide_array, wide_array, *[wide] * 9, size),
            "_sum_squares": (array, "float64*", size),
            "_sum_parts": ("float64*", "float64*", size),
        },
        "block_ell": {
            "_rows_wide": (array, "int32*", wide_array, wide_array, *[size] * 6),
            "_rows_narrow": (array, index, array, array, *[size] * 5),
            "_columns_wide": (array, index, index, wide_array, wide_array, *[size] * 6),
            "_columns_narrow": (array, index, index, array, array, *[size] * 5),
            "_left": (array, array, index, index, array, *[size] * 5),
            "_sample": (array, "int32*", wide_array, wide_array, *[size] * 7),
        },
        "attention": {
            "_forward": (array, array, array, index, wide, array, wide_array, *[size] * 7),
            "_attend_parts": (array, array, array, index, wide, *[wide_array] * 3, *[size] * 8),
            "_append": (array, array, index, *[size] * 5),
            "_combine_parts": (*[wide_array] * 3, array, wide_array, *[size] * 5),
            "sum_rows": (array, array, wide_array, *[size] * 4),
            "backward_by_queries": (*pairs, wide, array, *[size] * 6),
            "backward_by_keys": (*pairs, wide, array, array, *[size] * 6),
        },
        "cross_entropy": {
            "_forward": (array, index, wide_array, wide_array, size, size),
            "_backward": (array, index, wide_array, wide, array, size, size),
        },
        "csr": {
            "_gather_wide": (array, "int32*", "int64*", array, array, size, size, size),
            "_gather_eight": (array, "int32*", "int64*", wide_array, wide_array, *[size] * 3),
            "_gather_narrow": (array, "int32*", "int32*", array, array, size, size),
            "_left": (array, array, index, index, array, size, size, size),
            "_permute": (array, index, array, size),
            "_sample": (array, "int32*", "int32*", array, array, *[size] * 4),
        },
        "dense_ffn": {
            "_gated_relu": (array, array, array, size),
            "_gated_relu_backward": (array, array, array, array, wide, array, size),
            "_relu": (array, array, size),
            "_relu_backward": (array, array, wide, size),
            "_count_chunks": (array, "float64*", size, size, size),
            "_count_neurons": ("float64*", "float64*", "bool*", size, size),
            "_count_all": ("float64*", "float64*", size),
        },
        "embedding": {
            "_take": (array, index, array, size, size, size),
            "_add_rows": (array, index, wide_array, size, size, size),
        },
        "rms_norm": {
            "_forward": (array, array, wide, array, wide_array, size, size),
            "_backward": (array, array, array, wide_array, array, size, size),
            "_sum_chunks": (array, array, wide_array, wide_array, size, size, size),
            "_sum_partial": (wide_array, array, size, size),
        },
        "rotary": {"_turn": (array, wide_array, wide_array, wide, array, *[size] * 4)},
        "sparse_ffn": {
            "_gated_relu": (*[wide_array] * 3, index, "float64*", "bool*", *[size] * 3),
            "_gated_relu_backward": (wide_array, wide_array, wide_array, wide, size, size),
            "_add": (array, wide_array, size),
            "add_statistics": (index, "float64*", "float64*", size),
        },
        "transpose": {"_transpose": (array, wide_array, size, size)},
        "twell": twell_signatures(array, wide, wide_array),
    }


def twell_signatures(array, wide, wide_array):
    """Those of the activation-sparse layers."""
    columns, counts, mark, size = "uint16*", "int32*", "uint8*", "int"
    packed = (array, columns, counts)
    statistics = (counts, wide_array, "bool*")
    tail = (array, counts, counts)
    lists = ("int64*", counts, counts)
    return {
        "pack_tiles": (array, *packed, *[size] * 5),
        "pack_aligned_tiles": (array, *packed, *[size] * 4),
        "mark_tail": (counts, mark, *[size] * 3),
        "list_tail": (mark, counts, counts, size),
        "copy_rows": (array, counts, array, size, size),
        "add_statistics": (counts, wide_array, "float64*", size),
        "count_rows": (*packed, array, mark, *statistics, *[size] * 5),
        "forward_rows": (array, array, array, *packed, array, array, *statistics, *[size] * 7),
        "forward_tail": (*[array] * 3, *tail, wide_array, array, *statistics, *[size] * 5),
        "backward_rows": (
            *[array] * 4, *packed, array, wide, wide_array, array, *[size] * 7,
        ),
        "backward_tail": (*[array] * 5, *tail, wide, wide_array, array, *[size] * 5),
        "add_gradients": (
            *[array] * 4, wide_array, *lists, *[wide_array] * 3, *[size] * 5,
        ),
        "add_tail_gradients": (
            *[array] * 4, *tail, wide, wide_array, *[array] * 3, *[size] * 5,
        ),
        "count_entries": (columns, counts, counts, *[size] * 6),
        "add_chunks": (counts, "int64*", size, size),
        "add_neurons": ("int64*", size),
        "list_entries": (columns, counts, counts, *lists, *[size] * 6),
    }  # fmt: skip


def kernels_of(family):
    module = importlib.import_module(f"twell_numba.kernels.{family}.cuda")
    return {name: value for name, value in vars(module).items() if isinstance(value, Kernel)}


def test_no_kernel_is_left_out():
    assert {family: set(kernels_of(family)) for family in FAMILIES} == {
        family: set(kernels) for family, kernels in signatures("float32").items()
    }


def compile_family(family, dtype, targets):
    for name, kinds in signatures(dtype)[family].items():
        for target in targets:
            code, entry = kernels_of(family)[name].compile(kinds, target)
            assert code.startswith(b"\x7fELF"), (name, target)
            assert entry.encode() in code, (name, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_for_every_target(family, dtype):
    compile_family(family, dtype, TARGETS)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_in_the_rarer_precisions(family, dtype):
    compile_family(family, dtype, ["75"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_in_the_rarer_precisions_for_every_target(family, dtype):
    compile_family(family, dtype, TARGETS)
