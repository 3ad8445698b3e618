"""Arrays on a GPU: contents, layouts, views and other libraries."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from twell_numba.device.gpu import (
    DeviceArray,
    array,
    dlpack,
    empty,
    from_external,
    from_numpy,
    zeros,
)

# The interface is tested on the emulator, and with ``-m gpu`` on a GPU.


@pytest.mark.parametrize("dtype", array.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 5)])
def test_round_trip(rng, machine, dtype, shape):
    host = np.asarray(rng.standard_normal(shape) * 10 + 20).astype(dtype)
    on_gpu = machine.upload(host)
    assert (on_gpu.shape, on_gpu.dtype, on_gpu.size) == (shape, dtype, host.size)
    back = on_gpu.to_numpy()
    assert back.dtype == dtype
    assert back.tobytes() == host.tobytes()


def test_any_memory_layout(rng, machine):
    host = rng.standard_normal((6, 8))
    read_only = host.copy()
    read_only.flags.writeable = False
    for variant in (
        np.asfortranarray(host), host[::-1].copy()[::-1], np.repeat(host, 2, axis=1)[:, ::2],
        read_only, host.astype(">f8"),
    ):  # fmt: skip
        np.testing.assert_array_equal(machine.upload(variant).to_numpy(), host)


def test_empty_arrays_copy_and_allocate_nothing(machine):
    nothing = machine.upload(np.empty((0, 3), np.float32))
    assert nothing.pointer == 0
    assert nothing.owner is None
    assert nothing.copy().to_numpy().shape == (0, 3)
    nothing.fill_with_zeros()
    assert nothing.reshape(3, 0).shape == (3, 0)
    assert zeros((2, 0), np.int32, machine.gpu.stream).to_numpy().shape == (2, 0)


def test_zeros_and_copies(rng, machine):
    on_gpu = zeros((3, 4), np.float32, machine.gpu.stream)
    np.testing.assert_array_equal(on_gpu.to_numpy(), np.zeros((3, 4), np.float32))
    host = rng.standard_normal((3, 4)).astype(np.float32)
    on_gpu.copy_from(host)
    other = on_gpu.copy()
    on_gpu.fill_with_zeros()
    np.testing.assert_array_equal(other.to_numpy(), host)
    on_gpu.copy_from(other)
    np.testing.assert_array_equal(on_gpu.to_numpy(), host)


def test_views(rng, machine):
    host = rng.standard_normal((6, 4)).astype(np.float32)
    on_gpu = machine.upload(host)
    np.testing.assert_array_equal(on_gpu.reshape(3, -1).to_numpy(), host.reshape(3, -1))
    np.testing.assert_array_equal(on_gpu.reshape((24,)).to_numpy(), host.reshape(24))
    for part in (slice(2, 5), slice(None, 2), slice(4, None), slice(5, 2), slice(-2, None)):
        np.testing.assert_array_equal(on_gpu[part].to_numpy(), host[part])
    on_gpu[1:3].fill_with_zeros()
    assert (on_gpu.to_numpy()[1:3] == 0).all()
    with pytest.raises(ValueError, match=r"shape \(5, 5\) given for an array of shape \(6, 4\)"):
        on_gpu.reshape(5, 5)
    with pytest.raises(TypeError, match=r"array\[start:stop\] wanted"):
        on_gpu[::2]


def test_refuses_what_does_not_fit(machine):
    on_gpu = machine.upload(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="dtype complex128 given, one of float64, float32"):
        machine.upload(np.ones(3, complex))
    with pytest.raises(TypeError, match="list given, a NumPy array wanted"):
        from_numpy([1.0])
    with pytest.raises(ValueError, match=r"an array of shape \(2,\) given, \(3,\) wanted"):
        on_gpu.copy_from(np.ones(2, np.float32))
    with pytest.raises(TypeError, match="an array of dtype float64 given, float32 wanted"):
        on_gpu.copy_from(np.ones(3))
    with pytest.raises(ValueError, match="sizes of at least 0 wanted"):
        empty((2, -1), np.float32, machine.gpu.stream)


def test_its_memory_is_kept_by_views(rng, machine):
    host = rng.standard_normal((4, 2))
    on_gpu = machine.upload(host)
    view = on_gpu[1:3]
    memory = weakref.ref(on_gpu.owner)
    del on_gpu
    gc.collect()
    np.testing.assert_array_equal(view.to_numpy(), host[1:3])
    del view
    gc.collect()
    assert memory() is None


# ---------------------------------------------------------------------- the CUDA array interface


class Foreign:
    """An array of another library."""

    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


def test_interface_describes_the_array(machine):
    on_gpu = machine.upload(np.ones((2, 3), np.float32))
    interface = on_gpu.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["shape"] == (2, 3)
    assert np.dtype(interface["typestr"]) == np.float32
    assert interface["data"] == (on_gpu.pointer, False)
    assert interface["stream"] == machine.gpu.stream.handle
    assert machine.upload(np.empty((0, 3))).__cuda_array_interface__["data"] == (0, False)


def test_interface_has_no_bfloat16(machine):
    on_gpu = machine.upload(np.ones(3, ml_dtypes.bfloat16))
    assert not hasattr(on_gpu, "__cuda_array_interface__")


def test_an_array_is_taken_over_without_a_copy(rng, machine, monkeypatch):
    host = rng.standard_normal((3, 4))
    original = machine.upload(host)
    foreign = Foreign(original.__cuda_array_interface__)
    monkeypatch.setattr(array, "_gpu_of", lambda pointer: 0)
    taken = from_external(foreign)
    assert taken.pointer == original.pointer
    assert taken.owner is foreign
    np.testing.assert_array_equal(taken.to_numpy(), host)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"strides": (8, 24)}, ValueError, "a C-contiguous one wanted"),
        ({"typestr": ">f8"}, TypeError, "native byte order wanted"),
        ({"typestr": "<c16"}, TypeError, "dtype complex128 given"),
        ({"mask": object()}, TypeError, "an array with a mask given"),
    ],
)
def test_what_cannot_be_taken_over(machine, monkeypatch, change, error, message):
    monkeypatch.setattr(array, "_gpu_of", lambda pointer: 0)
    original = machine.upload(np.ones((3, 3)))
    with pytest.raises(error, match=message):
        from_external(Foreign(original.__cuda_array_interface__ | change))


def test_strides_of_a_contiguous_array_are_accepted(machine, monkeypatch):
    monkeypatch.setattr(array, "_gpu_of", lambda pointer: 0)
    original = machine.upload(np.ones((3, 1, 2)))
    interface = original.__cuda_array_interface__ | {"strides": (16, 999, 8)}
    assert from_external(Foreign(interface)).shape == (3, 1, 2)


def test_host_arrays_are_not_taken_over(machine):
    with pytest.raises(TypeError, match="from_numpy copies one from the host"):
        from_external(np.ones(3))
    with pytest.raises(TypeError, match="list given, an array on a GPU"):
        from_external([1.0])


# ---------------------------------------------------------------------- DLPack


def test_dlpack_between_two_arrays(rng, machine):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int64, np.bool_):
        host = (rng.standard_normal((3, 4)) * 3).astype(dtype)
        original = machine.upload(host)
        taken = from_external(Wrapped(original))
        assert taken.pointer == original.pointer
        assert taken.dtype == dtype
        np.testing.assert_array_equal(taken.to_numpy(), host)


class Wrapped:
    """Hides that an array is one of this library."""

    def __init__(self, inner):
        self._inner = inner

    def __dlpack_device__(self):
        return self._inner.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self._inner.__dlpack__(stream=self._inner.stream.handle)


def test_dlpack_keeps_the_memory_alive(rng, machine):
    host = rng.standard_normal(5)
    original = machine.upload(host)
    memory = weakref.ref(original.owner)
    taken = from_external(Wrapped(original))
    del original
    gc.collect()
    np.testing.assert_array_equal(taken.to_numpy(), host)
    del taken
    gc.collect()
    assert memory() is None


def test_streams_of_other_libraries_are_kept_in_order(machine, monkeypatch):
    if machine.is_real:
        pytest.skip("what the emulated stream notes is looked at")
    monkeypatch.setattr(array, "_gpu_of", lambda pointer: 0)
    stream = machine.gpu.stream
    original = machine.upload(np.ones(5))
    for asked, noted in ((None, 1), (2, 2), (123, 123)):
        original.__dlpack__(stream=asked)
        assert stream.handed_over_to.pop() == noted
    original.__dlpack__(stream=-1)
    assert stream.handed_over_to == []
    from_external(Foreign(original.__cuda_array_interface__ | {"stream": 2}))
    assert stream.waited_for == [2]
    from_external(Foreign(original.__cuda_array_interface__ | {"stream": None}))
    assert stream.waited_for == [2]


def test_a_capsule_nobody_takes_frees_its_memory(machine):
    original = machine.upload(np.ones(5))
    memory = weakref.ref(original.owner)
    capsule = original.__dlpack__(stream=-1)
    del original
    gc.collect()
    assert memory() is not None
    dlpack.drop_refused()
    assert memory() is not None, "somebody holds the capsule"
    del capsule
    dlpack.drop_refused()
    gc.collect()
    assert memory() is None


def test_who_refuses_a_capsule_gives_the_reason(machine):
    original = machine.upload(np.ones(5))
    memory = weakref.ref(original.owner)
    with pytest.raises((RuntimeError, BufferError), match="device"):
        np.from_dlpack(original)
    del original
    dlpack.drop_refused()
    gc.collect()
    assert memory() is None


def test_a_capsule_is_taken_once(machine):
    capsule = machine.upload(np.ones(5)).__dlpack__(stream=-1)
    dlpack.from_capsule(capsule)
    with pytest.raises(BufferError, match="one not yet taken wanted"):
        dlpack.from_capsule(capsule)


def test_another_device_is_refused(machine):
    with pytest.raises(BufferError, match="the array is on GPU 0"):
        machine.upload(np.ones(5)).__dlpack__(dl_device=(dlpack.CPU, 0))


def test_numpy_understands_our_capsules(rng):
    """On the host, where another reader of DLPack is at hand."""
    host = rng.standard_normal((3, 4)).astype(np.float32)

    class OnHost:
        def __dlpack_device__(self):
            return dlpack.CPU, 0

        def __dlpack__(self, **_):
            device = (dlpack.CPU, 0)
            return dlpack.to_capsule(host.ctypes.data, host.shape, host.dtype, device, host)

    taken = np.from_dlpack(OnHost())
    np.testing.assert_array_equal(taken, host)
    assert np.shares_memory(taken, host)


def test_we_understand_numpys_capsules(rng):
    host = rng.standard_normal((3, 4))[:, 1:]
    tensor = dlpack.from_capsule(host.__dlpack__())
    assert tensor.pointer == host.ctypes.data
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((3, 3), (4, 1), np.float64)
    assert tensor.device == (dlpack.CPU, 0)


def test_two_gpus_are_named(machine, monkeypatch):
    class Second:
        id = 1

    class SecondStream:
        gpu = Second()

    first = machine.upload(np.ones(3))
    second = DeviceArray(first.pointer, (3,), np.float64, SecondStream(), None)
    with pytest.raises(ValueError, match="y on GPU 1 given beside x on GPU 0, one GPU for all"):
        array.require_same_gpu(x=first, y=second)
