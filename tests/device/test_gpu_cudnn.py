"""What cuDNN is told of attention, with a stand-in for it that computes in the host's memory."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import GPUError, cudnn, determinism, packages  # noqa: E402
from twell_numba.errors import TwellError  # noqa: E402
from twell_numba.kernels.attention import cuda, reference  # noqa: E402

HANDLE = 99
# B, S, T, H, G, w: tiles of 128 that are full and not, more keys than queries, grouped heads
SHAPES = [
    (2, 128, 128, 2, 1, 8),
    (2, 9, 9, 4, 2, 8),
    (1, 8, 131, 2, 2, 16),
    (3, 1, 5, 1, 1, 8),
    (1, 129, 256, 1, 1, 8),
]


class Tensor:
    """Stands for ``cudnn.tensor``."""

    def __init__(self, uid=-1, dim=None, stride=None, data_type=None):
        self.uid, self.dim, self.stride, self.data_type = uid, dim, stride, data_type
        self.is_output = False

    def set_uid(self, uid):
        self.uid = uid

    def set_dim(self, dim):
        self.dim = dim

    def set_stride(self, stride):
        self.stride = stride

    def set_data_type(self, data_type):
        self.data_type = data_type

    def set_output(self, is_output):
        self.is_output = is_output


class Graph:
    """Stands for ``cudnn.pygraph``."""

    def __init__(
        self, frontend, *, handle, io_data_type, intermediate_data_type, compute_data_type
    ):
        assert handle == HANDLE
        assert intermediate_data_type is compute_data_type is np.float32
        self.frontend, self.io_data_type = frontend, io_data_type
        self.is_built = False
        frontend.graphs.append(self)

    def tensor(self, *, dim, stride, data_type, uid):
        return Tensor(uid, dim, stride, data_type)

    def sdpa(self, *, name, generate_stats, **said):
        assert generate_stats
        self.said = said
        self.outputs = {"y": Tensor(data_type=self.io_data_type), "stats": Tensor()}
        return self.outputs.values()

    def sdpa_backward(self, *, name, **said):
        self.said = said
        self.outputs = {name: Tensor(data_type=self.io_data_type) for name in ("dq", "dk", "dv")}
        return self.outputs.values()

    def build(self, heuristics):
        assert heuristics == ["A"]
        if ("forward" if "dO" not in self.said else "backward") in self.frontend.refuses:
            raise RuntimeError("no engine:\nnot supported")
        self.is_built = True

    def get_workspace_size(self):
        assert self.is_built
        return 1000

    def execute(self, pointers, workspace, *, handle):
        assert handle == HANDLE
        if self.frontend.fails:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED:\n13")
        assert all(type(pointer) is int and pointer for pointer in pointers.values())
        ctypes.memset(workspace, 255, 1000)
        given = {n: self._view(t, pointers) for n, t in self.said.items() if isinstance(t, Tensor)}
        results = {name: self._view(t, pointers) for name, t in self.outputs.items()}
        assert all(tensor.is_output for tensor in self.outputs.values())
        used = [*self.outputs.values(), *(t for t in self.said.values() if isinstance(t, Tensor))]
        assert {tensor.uid for tensor in used} == set(pointers)
        q, k, v = (self._by_row(given[name]) for name in "qkv")
        self._check_options(q, k, given)
        if "dO" not in given:
            y, log_sum_exp = reference.causal_attention(q, k, v)
            results["y"][:] = y.swapaxes(1, 2)
            results["stats"][:] = log_sum_exp[..., None]
            return
        gradients = reference.causal_attention_backward(
            self._by_row(given["dO"]), q, k, v, self._by_row(given["o"]), given["stats"][..., 0]
        )
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            results[name][:] = gradient.swapaxes(1, 2)

    def _view(self, tensor, pointers):
        dtype = np.dtype(tensor.data_type)
        count = 1 + sum((n - 1) * step for n, step in zip(tensor.dim, tensor.stride, strict=True))
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointers[tensor.uid])
        strides = [step * dtype.itemsize for step in tensor.stride]
        return np.ndarray(tensor.dim, dtype, memory, strides=strides)

    def _by_row(self, array):
        return array.swapaxes(1, 2).astype(np.float64)

    def _check_options(self, q, k, given):
        said = self.said
        assert said["attn_scale"] == q.shape[3] ** -0.5
        assert said["diagonal_band_right_bound"] == 0
        assert q.shape[1] == k.shape[1] or said["diagonal_alignment"] == "BOTTOM_RIGHT"
        assert said.get("use_padding_mask", False) == ("seq_len_q" in said)
        for name, rows in (("seq_len_q", q.shape[1]), ("seq_len_kv", k.shape[1])):
            if name in given:
                assert given[name].shape == (q.shape[0], 1, 1, 1)
                assert (given[name] == rows).all()


class Frontend:
    """Stands for the package ``cudnn``."""

    data_type = SimpleNamespace(
        BFLOAT16=ml_dtypes.bfloat16, HALF=np.float16, FLOAT=np.float32, INT32=np.int32
    )
    heur_mode = SimpleNamespace(A="A")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")

    def __init__(self, version=91900, own_version="1.22.1"):
        self.version = version
        self.__version__ = own_version
        self.graphs = []
        self.streams = []
        self.refuses = ()  # directions
        self.fails = False

    def pygraph(self, **options):
        return Graph(self, **options)

    def backend_version(self):
        return self.version

    def set_stream(self, handle, stream):
        assert handle == HANDLE
        self.streams.append(stream)


@pytest.fixture
def library(monkeypatch):
    stand_in = Frontend()
    monkeypatch.setattr(cudnn, "library", lambda: stand_in)
    monkeypatch.setattr(cudnn, "_what_is_missing", lambda: "")
    monkeypatch.setattr(cudnn, "_handle", lambda gpu_id: HANDLE)
    monkeypatch.setattr(cudnn, "_plans", {})
    monkeypatch.setattr(cudnn, "call", fill)
    monkeypatch.setattr(determinism, "_is_required", True)
    return stand_in


def fill(function, address, value, count, stream):
    """Stand for the driver's function that sets numbers of 32 bits."""
    assert function == "cuMemsetD32Async"
    memory = (ctypes.c_char * (4 * count)).from_address(address)
    np.frombuffer(memory, np.int32)[:] = value


@pytest.fixture
def machine(machine):
    if machine.is_real:
        pytest.skip("the stand-in works in the host's memory")
    machine.gpu.capability = (9, 0)
    return machine


def make(rng, machine, shape, dtype=ml_dtypes.bfloat16):
    batch, queries, keys, heads, groups, width = shape
    q, dy = rng.standard_normal((2, batch, queries, heads, width)).astype(dtype)
    k, v = rng.standard_normal((2, batch, keys, groups, width)).astype(dtype)
    return tuple(map(machine.upload, (q, k, v, dy)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_is_told_what_is_meant(rng, machine, library, relative_error, shape, dtype):
    q, k, v, dy = make(rng, machine, shape, dtype)
    q64, k64, v64, dy64 = (array.to_numpy().astype(np.float64) for array in (q, k, v, dy))
    for _ in range(2):
        y, log_sum_exp = cuda.causal_attention(q, k, v, path="cudnn")
        gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
        expected_y, expected_sum = reference.causal_attention(q64, k64, v64)
        expected = reference.causal_attention_backward(
            dy64, q64, k64, v64, expected_y, expected_sum
        )
        assert relative_error(y, expected_y) <= 5e-3
        assert relative_error(log_sum_exp, expected_sum) <= 1e-6
        for actual, wanted in zip(gradients, expected, strict=True):
            assert actual.dtype == dtype
            assert relative_error(actual, wanted) <= 1e-2
    assert len(library.graphs) == 2  # plans serve both rounds
    assert set(library.streams) == {machine.gpu.stream.handle}
    assert not machine.gpu.launches


def test_lengths_are_told_where_a_tile_is_not_full(rng, machine, library):
    for shape in SHAPES:
        q, k, v, dy = make(rng, machine, shape)
        y, log_sum_exp = cuda.causal_attention(q, k, v, path="cudnn")
        cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
        _, queries, keys, *_ = shape
        is_partial = bool(queries % 128 or keys % 128)
        forward, backward = library.graphs[-2:]
        assert "use_padding_mask" not in forward.said
        assert backward.said.get("use_padding_mask", False) == is_partial


def test_the_fixed_order_of_sums_is_another_plan(rng, machine, library):
    q, k, v, dy = make(rng, machine, SHAPES[1])
    y, log_sum_exp = cuda.causal_attention(q, k, v)
    for is_required in (True, False, True):
        determinism.require(is_required)
        assert determinism.is_required() is is_required
        cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    flags = [graph.said["use_deterministic_algorithm"] for graph in library.graphs[1:]]
    assert flags == [True, False]


def test_auto_leaves_a_few_queries_to_our_own_kernels(rng, machine, library):
    q, k, v, dy = make(rng, machine, (1, 3, 5, 1, 1, 8))
    y, log_sum_exp = cuda.causal_attention(q, k, v)
    cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    q, k, v, _ = make(rng, machine, (1, 8, 9, 1, 1, 8))
    length = machine.upload(np.array([9]))
    cuda.causal_attention(q, k, v, length=length)
    cuda.causal_attention(q, k, v, path="tiled")
    assert not library.graphs
    with pytest.raises(ValueError, match="path 'cudnn' given with length on the GPU"):
        cuda.causal_attention(q, k, v, length=length, path="cudnn")
    with pytest.raises(ValueError, match="path 'cublas' given, one of auto, cudnn, tiled wanted"):
        cuda.causal_attention(q, k, v, path="cublas")
    cuda.causal_attention(q, k, v)
    assert len(library.graphs) == 1


def test_a_cache_is_read_as_far_as_it_is_filled(rng, machine, library, relative_error):
    q, k, v, _ = make(rng, machine, (2, 8, 20, 2, 1, 8), np.float16)
    k, v = k.to_numpy(), v.to_numpy()
    k[:, 11:] = v[:, 11:] = np.nan
    y, log_sum_exp = cuda.causal_attention(q, machine.upload(k), machine.upload(v), length=11)
    expected_y, expected_sum = reference.causal_attention(
        *(array.astype(np.float64) for array in (q.to_numpy(), k[:, :11], v[:, :11]))
    )
    assert relative_error(y, expected_y) <= 1e-3
    assert relative_error(log_sum_exp, expected_sum) <= 1e-6
    assert len(library.graphs) == 1


def test_our_own_kernels_where_the_library_has_no_plan(rng, machine, library, relative_error):
    q, k, v, dy = make(rng, machine, (1, 8, 8, 1, 1, 8))
    library.refuses = ("forward", "backward")
    y, log_sum_exp = cuda.causal_attention(q, k, v)
    gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    names = [name for name, _ in machine.gpu.launches]
    assert names == ["forward", "sum_rows", "backward_by_queries", "backward_by_keys"]
    expected, _ = reference.causal_attention(
        *(array.to_numpy().astype(np.float64) for array in (q, k, v))
    )
    assert relative_error(y, expected) <= 5e-3
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    wanted = r"q of shape \(1, 8, 1, 8\).*cuDNN 9.19.0: no engine: not supported; use path='auto'"
    for _ in range(2):
        with pytest.raises(TwellError, match=wanted) as caught:
            cuda.causal_attention(q, k, v, path="cudnn")
        assert "\n" not in str(caught.value)
    with pytest.raises(TwellError, match=wanted):
        cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
    assert len(library.graphs) == 2  # it is asked once for each


@pytest.mark.parametrize("refused", ["forward", "backward"])
def test_each_direction_falls_back_by_itself(rng, machine, library, relative_error, refused):
    arrays = make(rng, machine, (1, 40, 70, 2, 1, 8))
    q, k, v, dy = arrays
    library.refuses = (refused,)
    y, log_sum_exp = cuda.causal_attention(q, k, v)
    gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp)
    names = [name for name, _ in machine.gpu.launches]
    ours = {
        "forward": ["forward"],
        "backward": ["sum_rows", "backward_by_queries", "backward_by_keys"],
    }
    assert names == ours[refused]
    q, k, v, dy = (array.to_numpy().astype(np.float64) for array in arrays)
    expected = reference.causal_attention(q, k, v)
    expected += reference.causal_attention_backward(dy, q, k, v, *expected)
    for actual, wanted in zip((y, log_sum_exp, *gradients), expected, strict=True):
        assert relative_error(actual, wanted) <= 1e-2


@pytest.mark.parametrize("version", ["1.23.0", "1.24.0", "1.26.0", "1.27.0"])
def test_frontends_without_a_backward_pass(rng, machine, library, version):
    library.__version__ = version
    q, k, v, dy = make(rng, machine, (1, 8, 8, 1, 1, 8))
    y, log_sum_exp = cuda.causal_attention(q, k, v, path="cudnn")
    if version in ("1.23.0", "1.27.0"):
        cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
        assert cudnn.available() == (True, "9.19.0")
        return
    wanted = f"nvidia-cudnn-frontend {version} found, which has no backward pass for cuDNN 9.19.0; "
    is_there, text = cudnn.available()
    assert not is_there
    assert text.startswith(wanted)
    with pytest.raises(TwellError, match=wanted):
        cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
    assert len(library.graphs) == 1
    library.version = 92200
    cudnn._plans.clear()
    cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path="cudnn")
    assert cudnn.available() == (True, "9.22.0")


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "message"),
    [
        (np.float32, 8, (9, 0), "float32 given, bfloat16 or float16 wanted"),
        (np.float16, 12, (9, 0), "head width 12 given, a multiple of 8 up to 128 wanted"),
        (np.float16, 136, (9, 0), "head width 136 given, a multiple of 8 up to 128 wanted"),
        (np.float16, 8, (7, 5), "compute capability 7.5 given, 8.0 or newer wanted"),
    ],
)
def test_what_is_out_of_reach(rng, machine, library, dtype, width, capability, message):
    machine.gpu.capability = capability
    q, k, v, _ = make(rng, machine, (1, 8, 8, 1, 1, width), dtype)
    with pytest.raises(TwellError, match=message):
        cuda.causal_attention(q, k, v, path="cudnn")
    cuda.causal_attention(q, k, v)
    assert machine.gpu.launches
    assert not library.graphs


def test_addresses_that_the_library_cannot_read(rng, machine, library):
    flat = machine.upload(np.ones(1 + 8 * 8, np.float16))
    q = flat[1:].reshape(1, 8, 1, 8)
    with pytest.raises(TwellError, match="an address that is no multiple of 16 given"):
        cuda.causal_attention(q, q, q, path="cudnn")


def test_a_failed_call_is_one_clear_line(rng, machine, library):
    q, k, v, _ = make(rng, machine, (1, 8, 8, 1, 1, 8))
    library.fails = True
    with pytest.raises(GPUError, match=r"refused attention of \(1, 8, 1, 8\) and") as caught:
        cuda.causal_attention(q, k, v)
    assert "\n" not in str(caught.value)


def test_arrays_of_other_streams_are_waited_for(rng, machine, library):
    q, k, v, _ = make(rng, machine, (1, 8, 8, 1, 1, 8))
    other = type(machine.gpu.stream)(machine.gpu, 78)
    v.stream = other
    cuda.causal_attention(q, k, v)
    assert q.stream.waited_for == [other]
    assert other.waited_for == [q.stream]


def test_plans_are_given_back(rng, machine, library, monkeypatch):
    monkeypatch.setattr(cudnn, "_MOST_PLANS", 2)
    for keys in range(8, 14):
        q, k, v, _ = make(rng, machine, (1, 8, keys, 1, 1, 8))
        cuda.causal_attention(q, k, v)
        assert len(cudnn._plans) <= 2


@pytest.fixture
def unloaded():
    cudnn.library.cache_clear()
    cudnn._what_is_missing.cache_clear()
    yield
    cudnn.library.cache_clear()
    cudnn._what_is_missing.cache_clear()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (91900, "9.19.0"),
        (91001, "cuDNN 9.10.1 found, 9.10.2 or newer wanted; install it with: pip install"),
        (None, "cuDNN cannot be loaded: no symbol; install it with: pip install"),
    ],
)
def test_whether_it_is_there_and_why_not(monkeypatch, unloaded, version, message):
    frontend = Frontend(version)
    if version is None:
        frontend.backend_version = lambda: (_ for _ in ()).throw(RuntimeError("no\nsymbol"))
    monkeypatch.setattr(cudnn, "import_package", lambda module, package: frontend)
    is_there, text = cudnn.available()
    assert is_there == (version == 91900)
    assert text.startswith(message)


def test_a_missing_package_names_the_extra(monkeypatch, unloaded):
    def fail(_):
        raise ModuleNotFoundError("No module named 'cudnn'")

    packages.import_package.cache_clear()
    monkeypatch.setattr(packages.importlib, "import_module", fail)
    is_there, text = cudnn.available()
    assert not is_there
    assert "nvidia-cudnn-frontend, which is not installed" in text
    assert "pip install 'twell_numba[cuda]'" in text
