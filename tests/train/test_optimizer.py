"""AdamW over a table of parameters, clipping, and its saved state."""

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.layers.parameter import Parameter
from twell_numba.train.optimizer import AdamW, clip_scale


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def make_parameters(rng):
    parameters = [
        Parameter("matrix", rng.standard_normal((5, 3)).astype(np.float32)),
        Parameter("vector", rng.standard_normal(3).astype(np.float32), decay=False),
    ]
    return {parameter.name: parameter for parameter in parameters}


def add_gradients(parameters, rng):
    for parameter in parameters.values():
        parameter.zero_grad()
        change = rng.standard_normal(parameter.value.shape)
        parameter.grad_buffer()[...] += change.astype(np.float32)


def test_steps_agree_with_the_formulas_in_float64(rng):
    parameters = make_parameters(rng)
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    optimizer = AdamW(parameters, **settings)
    expected = {name: parameter.value.astype(float) for name, parameter in parameters.items()}
    first = {name: np.zeros_like(value) for name, value in expected.items()}
    second = {name: np.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 6):
        add_gradients(parameters, rng)
        optimizer.step(0.01, grad_scale=0.5)
        for name, parameter in parameters.items():
            g = 0.5 * parameter.grad.astype(float)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            if parameter.decay:
                expected[name] *= 1 - 0.01 * 0.1
            m = first[name] / (1 - 0.9**step)
            v = second[name] / (1 - 0.95**step)
            expected[name] -= 0.01 * m / (np.sqrt(v) + 1e-8)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter.value, expected[name], rtol=1e-5, atol=1e-6)
    assert optimizer.step_count == 5


def test_weight_decay_shrinks_matrices_and_leaves_vectors(rng):
    parameters = make_parameters(rng)
    before = {name: parameter.value.copy() for name, parameter in parameters.items()}
    AdamW(parameters, weight_decay=0.1).step(0.5)
    np.testing.assert_allclose(parameters["matrix"].value, before["matrix"] * 0.95, rtol=1e-6)
    np.testing.assert_array_equal(parameters["vector"].value, before["vector"])


def test_gradient_norm_is_that_of_all_gradients_together(rng):
    parameters = make_parameters(rng)
    optimizer = AdamW(parameters)
    assert optimizer.gradient_norm() == 0
    add_gradients(parameters, rng)
    together = np.concatenate([parameter.grad.ravel() for parameter in parameters.values()])
    assert optimizer.gradient_norm() == pytest.approx(np.linalg.norm(together))
    parameters["vector"].grad[1] = np.nan
    assert np.isnan(optimizer.gradient_norm())
    optimizer.zero_grad()
    assert optimizer.gradient_norm() == 0


@pytest.mark.parametrize(
    ("norm", "limit", "scale"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (9, 0, 1.0)]
)
def test_clip_scale(norm, limit, scale):
    assert clip_scale(norm, limit) == scale


def test_compiling_changes_nothing(rng):
    parameters = make_parameters(rng)
    before = {name: parameter.value.copy() for name, parameter in parameters.items()}
    optimizer = AdamW(parameters)
    optimizer.compile()
    assert optimizer.step_count == 0
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter.value, before[name])
        assert not optimizer.first_moment[name].any()


def test_a_restored_optimizer_steps_bit_for_bit_as_the_original(rng):
    """Fault 72: moments and the step that corrects their bias both matter."""
    parameters = make_parameters(rng)
    optimizer = AdamW(parameters)
    for _ in range(3):
        add_gradients(parameters, rng)
        optimizer.step(0.01)
    copies = {
        name: Parameter(name, parameter.value.copy(), parameter.decay)
        for name, parameter in parameters.items()
    }
    restored = AdamW(copies)
    restored.load_state_arrays(
        {name: array.copy() for name, array in optimizer.state_arrays().items()}, 3
    )
    seed = np.random.default_rng(7)
    add_gradients(parameters, seed)
    add_gradients(copies, np.random.default_rng(7))
    optimizer.step(0.01)
    restored.step(0.01)
    for name in parameters:
        np.testing.assert_array_equal(copies[name].value, parameters[name].value)


def test_a_parameter_of_which_some_entries_are_left_steps_as_these_did(rng):
    parameters = make_parameters(rng)
    optimizer = AdamW(parameters)
    for _ in range(3):
        add_gradients(parameters, rng)
        optimizer.step(0.01)
    kept = np.array([0, 4, 5, 11])
    whole = parameters["matrix"]
    part = Parameter("matrix", whole.value.ravel()[kept])
    reduced = AdamW(parameters)
    reduced.load_state_arrays(optimizer.state_arrays(), 3)
    reduced.replace(part, lambda moment: moment.ravel()[kept])
    assert reduced.first_moment["matrix"].shape == reduced.second_moment["matrix"].shape == (4,)
    add_gradients(parameters, rng)
    part.grad_buffer()[...] += whole.grad.ravel()[kept]
    optimizer.step(0.01)
    reduced.step(0.01)
    np.testing.assert_array_equal(part.value, whole.value.ravel()[kept])
    assert reduced.gradient_norm() < optimizer.gradient_norm()


def test_a_foreign_state_is_refused(rng):
    optimizer = AdamW(make_parameters(rng))
    state = {name: array.copy() for name, array in optimizer.state_arrays().items()}
    with pytest.raises(TwellError, match="first_moment.matrix is missing"):
        optimizer.load_state_arrays(
            {name: array for name, array in state.items() if name != "first_moment.matrix"}, 1
        )
    with pytest.raises(TwellError, match="other is unexpected"):
        optimizer.load_state_arrays(state | {"other": np.zeros(1)}, 1)
    for wrong in (np.zeros(3), np.zeros(2, np.float32)):
        message = "second_moment.vector is .*; resume from the checkpoint that was saved with this"
        with pytest.raises(TwellError, match=message):
            optimizer.load_state_arrays(state | {"second_moment.vector": wrong}, 1)


def test_a_negative_mean_of_squares_is_refused(rng):
    optimizer = AdamW(make_parameters(rng))
    state = {name: array.copy() for name, array in optimizer.state_arrays().items()}
    state["first_moment.vector"][1] = -2
    optimizer.load_state_arrays(state, 1)
    state["second_moment.vector"][1] = -2
    with pytest.raises(TwellError, match="second_moment.vector holds -2, .* resume from an earl"):
        optimizer.load_state_arrays(state, 1)
