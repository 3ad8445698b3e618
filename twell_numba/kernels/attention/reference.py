"""Causal scaled dot-product attention in plain NumPy (Vaswani et al., 2017; Ainslie et al., 2023).

H query heads share G key/value heads: head h reads group h // (H / G). The last query stands at the
last key, so query i sees the keys j <= T - S + i. Per sequence and head, with w the head width:

    s = q k^T / sqrt(w), minus infinity where not seen
    L_i = log sum_j exp(s_ij),  p = exp(s - L)
    y = p v

and backward:

    dv = p^T dy,  dp = dy v^T,  ds = p * (dp - sum_d(dy * y)),
    dq = ds k / sqrt(w),  dk = ds^T q / sqrt(w)

where dk and dv of a group are summed over the heads that share it.
"""

import numpy as np


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y (B, S, H, w) and L (B, H, S) for q (B, S, H, w), k and v (B, T, G, w)."""
    heads_per_group = q.shape[2] // k.shape[2]
    scores = _masked_scores(q, np.repeat(k, heads_per_group, axis=2))
    maximum = scores.max(axis=3, keepdims=True)
    log_sum_exp = maximum + np.log(np.exp(scores - maximum).sum(axis=3, keepdims=True))
    probabilities = np.exp(scores - log_sum_exp)
    y = np.einsum("bhst,bthw->bshw", probabilities, np.repeat(v, heads_per_group, axis=2))
    return y, log_sum_exp[..., 0]


def causal_attention_backward(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    y: np.ndarray,
    log_sum_exp: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return dq (B, S, H, w), dk and dv (B, T, G, w)."""
    heads_per_group = q.shape[2] // k.shape[2]
    repeated_k = np.repeat(k, heads_per_group, axis=2)
    repeated_v = np.repeat(v, heads_per_group, axis=2)
    probabilities = np.exp(_masked_scores(q, repeated_k) - log_sum_exp[..., None])
    dv = np.einsum("bhst,bshw->bthw", probabilities, dy)
    dprobabilities = np.einsum("bshw,bthw->bhst", dy, repeated_v)
    row_sums = np.einsum("bshw,bshw->bhs", dy, y)
    dscores = probabilities * (dprobabilities - row_sums[..., None]) * q.shape[3] ** -0.5
    dq = np.einsum("bhst,bthw->bshw", dscores, repeated_k)
    dk = np.einsum("bhst,bshw->bthw", dscores, q)
    grouped = (*k.shape[:3], heads_per_group, k.shape[3])  # head h = group * (H / G) + its rank
    return dq, dk.reshape(grouped).sum(axis=3), dv.reshape(grouped).sum(axis=3)


def _masked_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return s (B, H, S, T) for q (B, S, H, w) and k (B, T, H, w)."""
    queries, keys = q.shape[1], k.shape[1]
    scores = np.einsum("bshw,bthw->bhst", q, k) * q.shape[3] ** -0.5
    seen = np.arange(keys) <= np.arange(queries)[:, None] + (keys - queries)
    return np.where(seen, scores, -np.inf).astype(q.dtype)
