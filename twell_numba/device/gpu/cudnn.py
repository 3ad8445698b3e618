"""Causal attention by NVIDIA's cuDNN, called on addresses through nvidia-cudnn-frontend.

    s = q k^T / sqrt(w),  L_i = log sum_j exp(s_ij),  y = softmax(s) v       for j <= T - S + i

q, y [B, S, H, w],  k, v [B, T, G, w],  L [B, H, S]: what the library calls statistics is L. It
computes forward and backward in one fused kernel each, with small ones around it; both are bound by
the tensor cores and the exponentials. No S x T matrix is kept, but for dp in the backward pass with
the fixed order of sums: 2 B H S T bytes of workspace.

What the library wants to know is a graph of one operation, of which it makes an *execution plan*:
once for each shape, dtype and GPU. Plans take the library's own first choice, the same in every
run. The backward plan with the fixed order of sums is another one: see ``determinism``.
"""

import functools
import threading
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from twell_numba.device.gpu import determinism
from twell_numba.device.gpu.array import DeviceArray, empty
from twell_numba.device.gpu.driver import GPUError, call
from twell_numba.device.gpu.packages import EXTRA, import_package
from twell_numba.device.gpu.stream import Stream
from twell_numba.device.gpu_packages import version_fits
from twell_numba.errors import TwellError

# 9.10.0 and 9.10.1 have known faults in attention.
OLDEST_VERSION = 91002
# These frontends say of every backward pass what only libraries from this version on understand
# (pull request 466 of NVIDIA/cudnn-frontend).
_FAULTY_FRONTENDS = ">=1.24,<1.27"
_UNDERSTANDS_FAULTY_FRONTENDS = 92200
OLDEST_CAPABILITY = (8, 0)
WIDEST_HEAD = 128
# Fused kernels have a block for each sequence and head, and this many at most in a direction.
_MOST_BLOCKS = 65535
# Larger arrays have not been tried.
_MOST_ELEMENTS = 2**31 - 1
_ALIGNMENT = 16
# Rows of the largest tiles. Where the last tile is not full, backward kernels of several versions
# (9.13 to 9.26) give NaN for rows with L < -88: exp(0 - L) of rows past the end is infinite (issues
# 160, 628 and 1072 of NVIDIA/cudnn-frontend). Told how long the sequences are, although they are as
# long as the arrays, they leave those rows out.
_TILE = 128
_MOST_PLANS = 256

# The numbers by which tensors are told apart.
_Q, _K, _V, _Y, _L, _DY, _DQ, _DK, _DV, _QUERIES, _KEYS = range(1, 12)
# Sizes and strides, in numbers.
Layout: TypeAlias = tuple[list[int], list[int]]
_DTYPES = {"bfloat16*": "BFLOAT16", "float16*": "HALF"}


class Problem(NamedTuple):
    """What a plan is made for."""

    gpu_id: int
    kind: str
    batch: int
    queries: int
    keys: int
    room: int  # from one sequence's keys to the next one's: more than there are, in a cache
    heads: int
    groups: int
    width: int
    is_backward: bool
    is_deterministic: bool

    @property
    def has_partial_tiles(self) -> bool:
        """Whether the last tile of queries or of keys is not full."""
        return self.queries % _TILE != 0 or self.keys % _TILE != 0

    @property
    def is_told_lengths(self) -> bool:
        """Whether the library wants arrays with the lengths of the sequences."""
        return self.is_backward and self.has_partial_tiles


# A plan, or why there is none.
_plans: dict[Problem, "_Plan | str"] = {}
_lock = threading.Lock()  # the library's handle has one stream at a time


@functools.cache
def library() -> Any:
    """Return the package ``cudnn``, with the library behind it loaded.

    Raises
    ------
    TwellError
        If the package or the library is not installed, or too old.
    """
    frontend = import_package("cudnn", "nvidia-cudnn-frontend")
    try:
        version = int(frontend.backend_version())
    except Exception as error:
        raise TwellError(
            f"cuDNN cannot be loaded: {_one_line(error)}; install it with: {EXTRA}"
        ) from error
    if version < OLDEST_VERSION:
        raise TwellError(
            f"cuDNN {_version_text(version)} found, {_version_text(OLDEST_VERSION)} or newer "
            f"wanted; install it with: {EXTRA}"
        )
    return frontend


def available() -> tuple[bool, str]:
    """Return whether cuDNN can be used in both directions, and its version or why it cannot."""
    obstacle = _what_is_missing() or _fault_of_backward()
    return (False, obstacle) if obstacle else (True, _version_text(library().backend_version()))


def forward(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    y: DeviceArray,
    log_sum_exp: DeviceArray,
    keys: int,
) -> str:
    """Write y and L of :func:`twell_numba.kernels.attention.causal_attention`.

    The work goes to the stream of q. It can be recorded in a graph once the same was computed
    before.

    Parameters
    ----------
    q, k, v, y : DeviceArray of bfloat16 or float16
        With at least one element each, of shapes that fit together, on one GPU.
    log_sum_exp : DeviceArray of float32
    keys : int
        How many of the keys in k are there, at least as many as queries; the others are not read.

    Returns
    -------
    str
        Empty, or why the library cannot do it; then nothing was done.

    Raises
    ------
    GPUError
        If it refuses what it had a plan for.
    """
    arrays = {_Q: q, _K: k, _V: v, _Y: y, _L: log_sum_exp}
    return _run(q, k, arrays, keys, is_backward=False, is_deterministic=True)


def backward(
    dy: DeviceArray,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    y: DeviceArray,
    log_sum_exp: DeviceArray,
    dq: DeviceArray,
    dk: DeviceArray,
    dv: DeviceArray,
) -> str:
    """Write the gradients of :func:`forward`; otherwise as that.

    The same input gives the same bits in every run, unless ``determinism`` does not require it.
    """
    arrays = {
        _DY: dy, _Q: q, _K: k, _V: v, _Y: y, _L: log_sum_exp, _DQ: dq, _DK: dk, _DV: dv,
    }  # fmt: skip
    is_required = determinism.is_required()
    return _run(q, k, arrays, k.shape[1], is_backward=True, is_deterministic=is_required)


class _Plan:
    """Attention of one shape, planned by the library."""

    def __init__(self, problem: Problem, graph: Any) -> None:
        self._problem = problem
        self._graph = graph
        self._workspace = int(graph.get_workspace_size())

    def run(self, arrays: dict[int, DeviceArray], stream: Stream) -> None:
        """Give the work to a stream."""
        others = [array.stream for array in arrays.values() if array.stream is not stream]
        for other in others:
            stream.wait(other)
        if stream.capture is not None:
            stream.capture.keep(self)
            for array in arrays.values():
                stream.capture.keep(array.owner)
        pointers = {number: array.pointer for number, array in arrays.items()}
        # From the pool: in a recording it belongs to the graph, otherwise to this stream's work.
        workspace = empty(self._workspace, np.uint8, stream)
        if self._problem.is_told_lengths:
            batch = self._problem.batch
            lengths = empty((2, batch), np.int32, stream)
            pointers[_QUERIES] = lengths.pointer
            pointers[_KEYS] = lengths.pointer + 4 * batch
            for number, length in ((_QUERIES, self._problem.queries), (_KEYS, self._problem.keys)):
                call("cuMemsetD32Async", pointers[number], length, batch, stream.handle)
        handle = _handle(stream.gpu.id)
        try:
            with _lock:
                library().set_stream(handle, stream.handle)
                self._graph.execute(pointers, workspace.pointer, handle=handle)
        except Exception as error:
            raise GPUError(
                f"cuDNN refused attention of {arrays[_Q].shape} and {arrays[_K].shape} of "
                f"{arrays[_Q].dtype} on GPU {stream.gpu.id}: {_one_line(error)}"
            ) from error
        for other in others:
            other.wait(stream)


def _run(
    q: DeviceArray,
    k: DeviceArray,
    arrays: dict[int, DeviceArray],
    keys: int,
    *,
    is_backward: bool,
    is_deterministic: bool,
) -> str:
    obstacle = _obstacle(q, k, arrays)
    if obstacle:
        return obstacle
    q.gpu.make_current()
    batch, queries, heads, width = q.shape
    room, groups = k.shape[1:3]
    problem = Problem(
        q.gpu.id, q.kind, batch, queries, keys, room, heads, groups, width,
        is_backward, is_deterministic,
    )  # fmt: skip
    plan = _plans.get(problem)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[problem] = _make_plan(problem)
    if isinstance(plan, str):
        return plan
    plan.run(arrays, q.stream)
    return ""


def _obstacle(q: DeviceArray, k: DeviceArray, arrays: dict[int, DeviceArray]) -> str:
    """Return what is known beforehand to be out of the library's reach, or nothing."""
    if q.kind not in _DTYPES:
        return f"{q.dtype} given, bfloat16 or float16 wanted"
    batch, _, heads, width = q.shape
    if width % 8 or width > WIDEST_HEAD:
        return f"head width {width} given, a multiple of 8 up to {WIDEST_HEAD} wanted"
    if q.gpu.capability < OLDEST_CAPABILITY:
        major, minor = q.gpu.capability
        return f"compute capability {major}.{minor} given, 8.0 or newer wanted"
    if max(batch, heads) > _MOST_BLOCKS or max(q.size, k.size) > _MOST_ELEMENTS:
        return f"{batch} sequences of {heads} heads are too many"
    if any(array.pointer % _ALIGNMENT for array in arrays.values()):
        return f"an address that is no multiple of {_ALIGNMENT} given"
    return _what_is_missing()


@functools.cache
def _what_is_missing() -> str:
    try:
        library()
    except TwellError as error:
        return str(error)
    return ""


def _fault_of_backward() -> str:
    frontend = library()
    version = frontend.backend_version()
    is_faulty = version_fits(frontend.__version__, _FAULTY_FRONTENDS)
    if not is_faulty or version >= _UNDERSTANDS_FAULTY_FRONTENDS:
        return ""
    return (
        f"nvidia-cudnn-frontend {frontend.__version__} found, which has no backward pass for "
        f"cuDNN {_version_text(version)}; install another one with: {EXTRA}"
    )


def _make_plan(problem: Problem) -> "_Plan | str":
    fault = _fault_of_backward() if problem.is_backward else ""
    if fault:
        return fault
    cudnn = library()
    number = cudnn.data_type
    handle = _handle(problem.gpu_id)
    describe = _describe_backward if problem.is_backward else _describe_forward
    try:
        graph = cudnn.pygraph(
            handle=handle,
            io_data_type=getattr(number, _DTYPES[problem.kind]),
            intermediate_data_type=number.FLOAT,
            compute_data_type=number.FLOAT,
        )
        describe(graph, problem)
        graph.build([cudnn.heur_mode.A])
    except Exception as error:  # "not supported" is said as an error, of more than one kind
        return f"cuDNN {_version_text(cudnn.backend_version())}: {_one_line(error)}"
    return _Plan(problem, graph)


def _describe_forward(graph: Any, problem: Problem) -> None:
    q, k, v = _inputs(graph, problem)
    y, statistics = graph.sdpa(
        q=q, k=k, v=v, generate_stats=True, name="attention", **_options(problem)
    )
    _set_output(y, _Y, _query_layout(problem))
    _set_output(statistics, _L, _statistics_layout(problem))
    statistics.set_data_type(library().data_type.FLOAT)


def _describe_backward(graph: Any, problem: Problem) -> None:
    number = library().data_type
    q, k, v = _inputs(graph, problem)
    dtype = getattr(number, _DTYPES[problem.kind])
    y, dy = (_tensor(graph, uid, dtype, _query_layout(problem)) for uid in (_Y, _DY))
    statistics = _tensor(graph, _L, number.FLOAT, _statistics_layout(problem))
    options = _options(problem)
    if problem.is_told_lengths:
        one_each = [problem.batch, 1, 1, 1], [1, 1, 1, 1]
        options |= {
            "use_padding_mask": True,
            "seq_len_q": _tensor(graph, _QUERIES, number.INT32, one_each),
            "seq_len_kv": _tensor(graph, _KEYS, number.INT32, one_each),
        }
    dq, dk, dv = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=y,
        dO=dy,
        stats=statistics,
        use_deterministic_algorithm=problem.is_deterministic,
        name="attention_backward",
        **options,
    )
    _set_output(dq, _DQ, _query_layout(problem))
    _set_output(dk, _DK, _key_layout(problem))
    _set_output(dv, _DV, _key_layout(problem))


def _options(problem: Problem) -> dict[str, Any]:
    """Return the scale and the mask: the last query stands at the last key."""
    alignment = library().diagonal_alignment
    is_square = problem.queries == problem.keys
    return {
        "attn_scale": problem.width**-0.5,
        "diagonal_alignment": alignment.TOP_LEFT if is_square else alignment.BOTTOM_RIGHT,
        "diagonal_band_right_bound": 0,
    }


def _inputs(graph: Any, problem: Problem) -> tuple[Any, Any, Any]:
    dtype = getattr(library().data_type, _DTYPES[problem.kind])
    q = _tensor(graph, _Q, dtype, _query_layout(problem))
    k, v = (_tensor(graph, uid, dtype, _key_layout(problem)) for uid in (_K, _V))
    return q, k, v


def _tensor(graph: Any, uid: int, dtype: Any, layout: Layout) -> Any:
    sizes, strides = layout
    return graph.tensor(dim=sizes, stride=strides, data_type=dtype, uid=uid)


def _set_output(tensor: Any, uid: int, layout: Layout) -> None:
    sizes, strides = layout
    tensor.set_output(True)
    tensor.set_uid(uid)
    tensor.set_dim(sizes)
    tensor.set_stride(strides)


def _query_layout(problem: Problem) -> Layout:
    """Of q, y and their gradients; the library counts heads before rows."""
    batch, rows, heads, width = problem.batch, problem.queries, problem.heads, problem.width
    return [batch, heads, rows, width], [rows * heads * width, width, heads * width, 1]


def _key_layout(problem: Problem) -> Layout:
    """Of k, v and their gradients."""
    batch, rows, heads, width = problem.batch, problem.keys, problem.groups, problem.width
    return [batch, heads, rows, width], [problem.room * heads * width, width, heads * width, 1]


def _statistics_layout(problem: Problem) -> Layout:
    """Of L."""
    batch, heads, rows = problem.batch, problem.heads, problem.queries
    return [batch, heads, rows, 1], [heads * rows, rows, 1, 1]


@functools.cache
def _handle(gpu_id: int) -> Any:
    """Return the library's handle for the current GPU, whose number is given."""
    try:
        return library().create_handle()
    except TwellError:
        raise
    except Exception as error:
        raise GPUError(f"cuDNN cannot start on GPU {gpu_id}: {_one_line(error)}") from error


def _version_text(version: int) -> str:
    """Return 9.10.2 for 91002."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
