"""Transformers made fast by making them sparse, with NumPy and Numba alone.

Importing this package imports neither Numba nor any kernel; the subpackages load what they need
when they are used.

=========================  ======================================================================
``twell_numba.formats``    sparse matrices: TwELL and hybrid ELL
``twell_numba.kernels``    the operations, each with a plain NumPy reference and compiled twins
``twell_numba.device``     threads, BLAS and compilation on the machine at hand
``twell_numba.layers``     layers with hand-written backward passes
``twell_numba.models``     configuration, the transformer, checkpoints, tokenizers
``twell_numba.infer``      generation, sampling, evaluation, benchmarks
``twell_numba.train``      corpora, batches, optimizer, schedules, sparsity, the training loop
=========================  ======================================================================
"""

__version__ = "0.1.0"
