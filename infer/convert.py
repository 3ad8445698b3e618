"""Rewriting a checkpoint: another weight format, small weights cut off, dead neurons removed.

A GGUF file can be what is rewritten, and what is written.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.atomic import write_folder_atomically
from twell_numba.errors import TwellError, UsageError
from twell_numba.formats.block_ell import DEFAULT_BLOCK_SIZE
from twell_numba.infer.describe import describe_checkpoint
from twell_numba.infer.evaluate import evaluate, fired_neurons, require_finite_weights
from twell_numba.infer.prune import cut_below, cut_to_density
from twell_numba.layers.ffn import REASON_OF_ACTIVATION
from twell_numba.models.checkpoint import (
    load_config,
    load_model,
    resolve_checkpoint,
    run_of_checkpoints,
    save_model,
)
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_writer import write_gguf
from twell_numba.models.reading import GGUF_SUFFIX, exists, is_folder, is_gguf, unreadable
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer

ReadWindows = Callable[[Transformer, TextTokenizer], np.ndarray]


@dataclass(frozen=True)
class Conversion:
    """What to change about a checkpoint.

    Attributes
    ----------
    weight_format : {None, "dense", "csr", "block_ell"}
        How feedforward weights are stored; None: as they are.
    block_size : int or None
        b of ``block_ell``; None: 16.
    weight_threshold : float or None
        Weights of a smaller magnitude become zero; for ``block_ell``, blocks of which the root of
        the mean square is smaller.
    target_density : float or None
        Only the largest weights, this fraction of them, are left; for ``block_ell`` the largest
        blocks.
    per_layer : bool
        Whether each matrix is cut to ``target_density``, or the model as a whole.
    remove_dead : bool
        Whether neurons that fire for no token of the given text are removed.
    gguf_type : {None, "f32", "f16", "bf16", "q8_0"}
        Of weights in a GGUF file that is written; None: float32.
    """

    weight_format: str | None = None
    block_size: int | None = None
    weight_threshold: float | None = None
    target_density: float | None = None
    per_layer: bool = False
    remove_dead: bool = False
    gguf_type: str | None = None

    @property
    def cuts(self) -> bool:
        """Whether weights are cut off."""
        return self.weight_threshold is not None or self.target_density is not None

    def validate(self, *, from_gguf: bool = False, to_gguf: bool = False) -> None:
        """Check what can be checked without a model.

        Parameters
        ----------
        from_gguf, to_gguf : bool
            Whether a GGUF file is read, and whether one is written.

        Raises
        ------
        UsageError
            One line: what was given, what is wanted.
        """
        if to_gguf and self.weight_format not in (None, "dense"):
            raise UsageError(
                "--to csr or block-ell given with a GGUF file as DST, which holds dense weights; "
                "name a folder"
            )
        if self.gguf_type is not None and not to_gguf:
            raise UsageError("--gguf-type given, but DST does not end in .gguf, which it is about")
        is_other_file = from_gguf or to_gguf
        unchanged = self.weight_format is None and not self.cuts and not self.remove_dead
        if unchanged and not is_other_file:
            raise UsageError(
                "nothing to change given; --to, --weight-threshold, --target-density or "
                "--remove-dead wanted"
            )
        threshold, density = self.weight_threshold, self.target_density
        if threshold is not None and density is not None:
            raise UsageError("--weight-threshold and --target-density given, one of them wanted")
        if threshold is not None and not 0 < threshold < np.inf:
            raise UsageError(f"--weight-threshold {threshold:g} given, a number above 0 wanted")
        if density is not None and not 0 < density <= 1:
            raise UsageError(
                f"--target-density {density:g} given, a number above 0 and at most 1 wanted"
            )
        if self.per_layer and density is None:
            raise UsageError("--per-layer given without --target-density, which it is about")
        if self.block_size is not None and self.weight_format != "block_ell":
            raise UsageError("--block-size given without --to block-ell, which it is about")
        if self.block_size is not None and self.block_size < 1:
            raise UsageError(f"--block-size {self.block_size} given, at least 1 wanted")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    conversion: Conversion,
    read_windows: ReadWindows | None = None,
) -> dict[str, Any]:
    """Write a changed copy of a checkpoint, in float32; the source is left as it is.

    First weights are cut off, then dead neurons are removed (of what the cut has left), then the
    weights are brought into their format.

    Parameters
    ----------
    source : path
        A run (its newest checkpoint is read), a checkpoint, or a GGUF file.
    destination : path
        A folder that does not exist, or is empty, or, with a name that ends in ``.gguf``, a file
        that does not exist. It is written as a whole or not at all.
    conversion : Conversion
    read_windows : callable, optional
        Returns text for the model and tokenizer it is given, as windows for
        :func:`twell_numba.infer.evaluate.evaluate`. With it, the loss before and after is measured;
        ``remove_dead`` needs it.

    Returns
    -------
    dict
        ``source``, ``destination``, ``format``, ``neurons_before``, ``neurons_after``,
        ``bytes_before``, ``bytes_after`` (of all weights on disk), ``ffn_bytes_before``,
        ``ffn_bytes_after``, ``loss_before``, ``loss_after`` (None without text) and ``layers``: a
        list of ``density_before``, ``density_after``, ``density_by_matrix``,
        ``ffn_bytes_before``, ``ffn_bytes_after`` and ``neurons_alive`` (None without
        ``remove_dead``).

    Raises
    ------
    UsageError, TwellError
        If what is wanted does not fit together, or the model, or cannot be read or written: one
        line; nothing has then been written.
    """
    to_gguf = Path(destination).suffix.lower() == GGUF_SUFFIX
    conversion.validate(from_gguf=is_gguf(source), to_gguf=to_gguf)
    if conversion.remove_dead and read_windows is None:
        raise UsageError("--remove-dead given without --data, the text that neurons may fire for")
    folder = resolve_checkpoint(source)
    _require_new(destination, folder)
    before = describe_checkpoint(folder)
    config = load_config(folder)
    _require_fitting(conversion, config, folder, is_other_file=to_gguf or is_gguf(folder))
    weight_format = "dense" if to_gguf else conversion.weight_format or config.ffn_weight_format

    model, tokenizer = load_model(folder, keep_format=True)
    block_size = conversion.block_size or model.ffn_layers[0].block_size or DEFAULT_BLOCK_SIZE
    _require_blocks_fit(weight_format, block_size, config)
    require_finite_weights(model)
    windows = None if read_windows is None else read_windows(model, tokenizer)
    loss_before = _loss(model, windows, tokenizer)
    model.hold_ffn_weights("dense")
    cut_size = block_size if weight_format == "block_ell" else None
    if conversion.weight_threshold is not None:
        cut_below(model, conversion.weight_threshold, block_size=cut_size)
    if conversion.target_density is not None:
        cut_to_density(
            model,
            conversion.target_density,
            per_layer=conversion.per_layer,
            block_size=cut_size,
        )
    alive = None
    if conversion.remove_dead:
        assert windows is not None
        fired = fired_neurons(model, windows)
        alive = fired.sum(axis=1)
        model = without_dead_neurons(model, fired)
        if weight_format == "block_ell":
            _require_a_block_left(model.config.d_ffn, block_size, conversion)
    model.hold_ffn_weights(weight_format, block_size)
    loss_after = _loss(model, windows, tokenizer)

    _require_new(destination, folder)
    if to_gguf:
        write_gguf(destination, model, tokenizer, conversion.gguf_type or "f32")
    else:
        with write_folder_atomically(destination) as temporary:
            save_model(temporary, model, tokenizer)
    after = describe_checkpoint(destination)
    return {
        "source": str(folder),
        "destination": str(destination),
        "format": weight_format,
        "neurons_before": config.d_ffn,
        "neurons_after": model.config.d_ffn,
        "bytes_before": before["bytes"],
        "bytes_after": after["bytes"],
        "ffn_bytes_before": sum(layer["bytes"] for layer in before["ffn_layers"]),
        "ffn_bytes_after": sum(layer["bytes"] for layer in after["ffn_layers"]),
        "loss_before": loss_before,
        "loss_after": loss_after,
        "layers": [
            {
                "density_before": old["density"],
                "density_after": new["density"],
                "density_by_matrix": new["density_by_matrix"],
                "ffn_bytes_before": old["bytes"],
                "ffn_bytes_after": new["bytes"],
                "neurons_alive": None if alive is None else int(alive[layer]),
            }
            for layer, (old, new) in enumerate(
                zip(before["ffn_layers"], after["ffn_layers"], strict=True)
            )
        ],
    }


def without_dead_neurons(model: Transformer, fired: np.ndarray) -> Transformer:
    """Return a model that lacks neurons which fired for no token; for those tokens it is the same.

    All layers of a model have as many neurons: those of the layer in which most fired, rounded up
    to a multiple of 8 if that is at most 1% more: with another number dense products in 16 bits
    take several times as long on a GPU. Layers are filled up with dead ones.

    Parameters
    ----------
    model : Transformer
        With dense weights; not changed, but what is not left out is shared with it.
    fired : ndarray of bool, shape (L, F)

    Raises
    ------
    TwellError
        If there is nothing to remove, or nothing else.
    """
    alive = int(fired.sum(axis=1).max())
    if alive == model.config.d_ffn:
        layer = int(fired.sum(axis=1).argmax())
        raise TwellError(
            f"no neuron can be removed: all {alive} of layer {layer} fire, and all layers have "
            f"as many; leave --remove-dead out"
        )
    if alive == 0:
        raise TwellError(
            "no neuron fires for any token of the data: nothing would be left; give other --data"
        )
    rounded = min(-(-alive // 8) * 8, model.config.d_ffn)
    neurons = rounded if rounded - alive <= 0.01 * alive else alive
    # Those that fired first, each kind in its order; then the chosen ones in theirs.
    kept = np.sort(np.argsort(~fired, axis=1, kind="stable")[:, :neurons], axis=1)
    weights = {name: parameter.value for name, parameter in model.parameters().items()}
    for rows, ffn in zip(kept, model.ffn_layers, strict=True):
        for parameter in ffn.parameters():
            weights[parameter.name] = parameter.value[rows]
    return Transformer(replace(model.config, d_ffn=neurons), weights, model.dtype)


def _loss(model: Transformer, windows: np.ndarray | None, tokenizer: TextTokenizer) -> float | None:
    if windows is None:
        return None
    with warnings.catch_warnings():
        # What NumPy would warn of shows in the loss.
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        return evaluate(model, windows, tokenizer)["loss"]


def _require_new(given: str | os.PathLike[str], checkpoint: Path) -> None:
    """Refuse a destination that holds something, or would change the checkpoint or another run."""
    if not os.fspath(given).strip():
        raise UsageError(f"destination {os.fspath(given)!r} given, a folder wanted")
    destination = Path(given)
    run = run_of_checkpoints(destination)
    if run is not None:
        raise TwellError(
            f"{destination} lies among the checkpoints of the run {run}, which would then go on "
            f"from it; name another place"
        )
    if checkpoint.resolve() in Path(os.path.realpath(destination)).parents:
        raise TwellError(
            f"{destination} lies in {checkpoint}, which is to be left as it is; name another place"
        )
    if not exists(destination):
        return
    is_file = destination.suffix.lower() == GGUF_SUFFIX
    try:
        is_empty = not is_file and is_folder(destination) and not any(destination.iterdir())
    except OSError as error:
        raise unreadable(destination, error) from error
    if not is_empty:
        wanted = "file" if is_file else "folder"
        raise TwellError(
            f"{destination} exists already and is left as it is; name a {wanted} that does not "
            f"exist"
        )


def _require_fitting(
    conversion: Conversion, config: ModelConfig, folder: Path, is_other_file: bool
) -> None:
    """Refuse what makes no sense for a checkpoint that is sparse, or dense, already."""
    if conversion.weight_format in ("csr", "block_ell") and config.activation != "relu":
        raise TwellError(
            f"{folder} has the activation {config.activation}, with which only dense weights are "
            f"supported: {REASON_OF_ACTIVATION[config.activation]}"
        )
    stored, wanted = config.ffn_weight_format, conversion.weight_format
    if stored != "dense" and (conversion.cuts or wanted in ("csr", "block_ell")):
        raise TwellError(
            f"{folder} is sparse already, stored as {stored}; convert it with --to dense first, "
            f"and then the result"
        )
    unchanged = not conversion.cuts and not conversion.remove_dead
    if stored == "dense" and wanted == "dense" and unchanged and not is_other_file:
        raise TwellError(f"{folder} is dense already; leave it as it is, or give --to csr")


def _require_blocks_fit(weight_format: str, block_size: int, config: ModelConfig) -> None:
    smallest = min(config.d_model, config.d_ffn)
    if weight_format == "block_ell" and block_size > smallest:
        raise UsageError(
            f"blocks of {block_size} x {block_size} do not fit feedforward weights of shape "
            f"({config.d_ffn}, {config.d_model}); give --block-size {smallest} or less"
        )


def _require_a_block_left(neurons: int, block_size: int, conversion: Conversion) -> None:
    """Refuse to go on without dead neurons where the others do not fill a block."""
    if neurons >= block_size:
        return
    # What is stored in blocks can only become dense, see _require_fitting.
    is_stored_so = conversion.weight_format is None
    other = "--to dense" if is_stored_so else f"--block-size {neurons} or less, --to csr"
    raise UsageError(
        f"blocks of {block_size} x {block_size} do not fit: only {neurons} neurons of a layer fire "
        f"for the data; give {other}, or more --windows"
    )
