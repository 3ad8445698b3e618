"""Magnitude pruning: what is left, and what is refused."""

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.infer.prune import _sufficient_density, cut_below, cut_to_density
from twell_numba.models.transformer import Transformer


def densities(model: Transformer) -> list[float]:
    return [ffn.weight_density for ffn in model.ffn_layers]


def test_a_threshold_cuts_what_is_below_it(byte_model: Transformer) -> None:
    before = [p.value.copy() for ffn in byte_model.ffn_layers for p in ffn.parameters()]
    table = byte_model.embedding.table.value.copy()
    cut_below(byte_model, 0.2)
    after = [p.value for ffn in byte_model.ffn_layers for p in ffn.parameters()]
    for new, old in zip(after, before, strict=True):
        np.testing.assert_array_equal(new, np.where(np.abs(old) < 0.2, 0, old))
        assert 0 < np.count_nonzero(new) < new.size
    np.testing.assert_array_equal(byte_model.embedding.table.value, table)


def test_a_weight_at_the_threshold_stays(byte_model: Transformer) -> None:
    gate = byte_model.ffn_layers[0].parameters()[0].value
    gate[0, :2] = 0.25, np.nextafter(np.float32(0.25), np.float32(0))
    cut_below(byte_model, 0.25)
    np.testing.assert_array_equal(gate[0, :2], [0.25, 0])


@pytest.mark.parametrize("block_size", [None, 8])
def test_layers_share_a_density_or_have_it_each(
    byte_model: Transformer, block_size: int | None
) -> None:
    for layer, ffn in enumerate(byte_model.ffn_layers):
        for parameter, scale in zip(ffn.parameters(), (1, 1, 2), strict=True):
            parameter.value *= scale * (1 + layer / 20)  # down projections start smaller
    weights = {name: p.value.copy() for name, p in byte_model.parameters().items()}
    cut_to_density(byte_model, 0.25, block_size=block_size)
    first, second = densities(byte_model)
    assert (first + second) / 2 == pytest.approx(0.25, abs=0.003)
    assert second > 1.1 * first
    for name, parameter in byte_model.parameters().items():
        parameter.value = weights[name]
    cut_to_density(byte_model, 0.25, per_layer=True, block_size=block_size)
    for ffn in byte_model.ffn_layers:
        for parameter in ffn.parameters():
            assert parameter.count_nonzero() == pytest.approx(0.25 * parameter.size, abs=1)


def test_a_threshold_that_empties_a_matrix_is_refused(byte_model: Transformer) -> None:
    byte_model.ffn_layers[1].parameters()[2].value *= 1e-3
    with pytest.raises(TwellError, match=r"threshold 0.2 would leave nothing of .*1.mlp.down_proj"):
        cut_below(byte_model, 0.2)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("block_size", [None, 8])
def test_the_largest_of_each_matrix_stays(
    byte_model: Transformer, block_size: int | None, per_layer: bool
) -> None:
    for ffn in byte_model.ffn_layers:
        ffn.parameters()[0].value *= 1e3
    cut_to_density(byte_model, 0.1, per_layer=per_layer, block_size=block_size)
    for ffn in byte_model.ffn_layers:
        assert all(parameter.value.any() for parameter in ffn.parameters())


@pytest.mark.parametrize(("block_size", "density"), [(None, 1e-4), (8, 0.01)])
def test_a_density_that_leaves_no_weight_of_a_matrix_is_refused(
    byte_model: Transformer, block_size: int | None, density: float
) -> None:
    before = [p.value.copy() for ffn in byte_model.ffn_layers for p in ffn.parameters()]
    with pytest.raises(TwellError, match=f"target density {density:g} would leave less than one"):
        cut_to_density(byte_model, density, block_size=block_size)
    after = [p.value for ffn in byte_model.ffn_layers for p in ffn.parameters()]
    for new, old in zip(after, before, strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_matrix_that_was_empty_is_no_reason_to_refuse(byte_model: Transformer) -> None:
    byte_model.ffn_layers[0].parameters()[1].value[:] = 0
    cut_below(byte_model, 0.1)
    cut_to_density(byte_model, 0.1)
    assert densities(byte_model)[0] > 0


@pytest.mark.parametrize("block_size", [None, 4, 8, 11, 96])
def test_the_density_that_is_advised_is_enough(
    byte_model: Transformer, block_size: int | None
) -> None:
    with pytest.raises(TwellError, match="give at least ") as caught:
        cut_to_density(byte_model, 1e-9, block_size=block_size)
    advised = str(caught.value).rpartition(" ")[2]
    cut_to_density(byte_model, float(advised), block_size=block_size)
    size = byte_model.ffn_layers[0].parameters()[0].size
    least = min((block_size or 1) ** 2, size) / size
    assert least <= float(advised) < 1.1 * least


@pytest.mark.parametrize("entries", [1, 16, 49, 64, 256, 399])
def test_no_density_is_advised_that_falls_short(entries: int) -> None:
    for size in range(400, 500):
        density = float(f"{_sufficient_density(entries, size):.2g}")
        assert entries <= density * size
        assert density <= 1


def test_a_threshold_for_blocks_goes_by_their_root_mean_square(byte_model: Transformer) -> None:
    gate = byte_model.ffn_layers[0].parameters()[0].value
    gate[:8, :8] = 0.2
    gate[:8, 8:16] = np.nextafter(np.float32(0.2), np.float32(0))
    gate[8:16, :8] = 0
    gate[8, 0] = 1.7  # of which the block's root mean square is 0.2125
    for ffn in byte_model.ffn_layers:
        ffn.parameters()[2].value *= 2  # down projections start smaller
    cut_below(byte_model, 0.2, block_size=8)
    assert (gate[:8, :8] != 0).all()
    assert not gate[:8, 8:16].any()
    assert np.count_nonzero(gate[8:16, :8]) == 1


def test_a_threshold_that_empties_the_blocks_of_a_matrix_is_refused(
    byte_model: Transformer,
) -> None:
    with pytest.raises(TwellError, match="the largest root mean square of a block is 0.2"):
        cut_below(byte_model, 0.5, block_size=8)
