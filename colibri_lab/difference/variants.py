"""The functions that faults put in the place of the right ones: rotations, norms, activations, readings of a matrix."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import rms_norm, rotate_halves, sigmoid, silu, softmax

Array = NDArray[Any]


def rounded(value: Any, dtype: str) -> Any:
    """float64 values rounded to float32 and then to "bfloat16" or "float16"; Inf beyond the range."""
    single = np.asarray(value, np.float64).astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float64)
    bits = np.ascontiguousarray(single).view(np.uint32)
    even = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + even) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64).reshape(single.shape)


def transposed(weight: Array) -> Array:
    """Read [in, out] for [out, in]: the transpose of a square matrix; of another the same bytes in the other shape."""
    rows, columns = weight.shape
    return weight.T if rows == columns else weight.reshape(columns, rows).T


def reshaped(weight: Array) -> Array:
    """Stored [in, out] and read as [out, in] without transposing: the same bytes in the other shape."""
    return weight.T.reshape(weight.shape)


def unrotated(x: Array, angles: Array) -> Array:
    """No rotation."""
    return x


def backwards(x: Array, angles: Array) -> Array:
    """Rotation by the negative angle."""
    return rotate_halves(x, -angles)


def interleaved(x: Array, angles: Array) -> Array:
    """Channel 2j turns with channel 2j + 1."""
    return joined(rotate_halves(parted(x, angles), angles), angles)


def parted(x: Array, angles: Array) -> Array:
    """Even channels, then odd ones."""
    wide = 2 * angles.shape[-1]
    return np.concatenate([x[..., 0:wide:2], x[..., 1:wide:2], x[..., wide:]], axis=-1)


def joined(x: Array, angles: Array) -> Array:
    """First and second half alternating: undoes `parted`."""
    half = angles.shape[-1]
    pairs = np.stack([x[..., :half], x[..., half : 2 * half]], axis=-1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], 2 * half), x[..., 2 * half :]], axis=-1)


def parted_then_halves(x: Array, angles: Array) -> Array:
    """Rows reordered from interleaved to half style for a checkpoint that has them in half style."""
    return rotate_halves(parted(x, angles), angles)


def joined_then_halves(x: Array, angles: Array) -> Array:
    """Rows reordered from half to interleaved style, then rotated in half style."""
    return rotate_halves(joined(x, angles), angles)


def halves_then_parted(x: Array, angles: Array) -> Array:
    """Rotated in half style, its channels then reordered."""
    return parted(rotate_halves(x, angles), angles)


def halves_then_joined(x: Array, angles: Array) -> Array:
    """Rotated in half style, its channels then interleaved."""
    return joined(rotate_halves(x, angles), angles)


def interleaved_then_joined(x: Array, angles: Array) -> Array:
    """Interleaved rows rotated in interleaved style."""
    return interleaved(joined(x, angles), angles)


def interleaved_backwards(x: Array, angles: Array) -> Array:
    """Interleaved style by the negative angle."""
    return interleaved(x, -angles)


def angles_interleaved(x: Array, angles: Array) -> Array:
    """Half style with cos and sin repeated pairwise instead of as two halves."""
    turn = np.repeat(angles, 2, axis=-1)
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return cast(Array, x * cos + np.concatenate([-b, a], axis=-1) * sin)


def pairs_with_halved_angles(x: Array, angles: Array) -> Array:
    """Interleaved pairs with cos and sin laid out as two halves."""
    turn = np.concatenate([angles, angles], axis=-1)
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    return cast(Array, x * cos + np.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape) * sin)


def without_minus(x: Array, angles: Array) -> Array:
    """Both halves with a plus before the sine."""
    turn = np.concatenate([angles, angles], axis=-1)
    a, b = np.split(x, 2, axis=-1)
    return cast(Array, x * np.cos(turn)[:, None] + np.concatenate([b, a], axis=-1) * np.sin(turn)[:, None])


def sin_for_cos(x: Array, angles: Array) -> Array:
    """cos and sin exchanged."""
    return rotate_halves(x, np.pi / 2 - angles)


def first_half_only(x: Array, angles: Array) -> Array:
    """Half of the channels rotated, by the first half of the frequencies."""
    return rotate_halves(x, angles[:, : angles.shape[-1] // 2])


def first_half_own_angles(x: Array, angles: Array) -> Array:
    """Half of the channels rotated, with the frequencies of a rotation that narrow."""
    return rotate_halves(x, angles[:, ::2][:, : angles.shape[-1] // 2])


def across_heads(x: Array, angles: Array) -> Array:
    """Rotated before it is cut into heads."""
    return rotate_halves(x.reshape(len(x), 1, -1), angles).reshape(x.shape)


def channels_before_heads(x: Array) -> Array:
    """(T, heads, head_dim) read as (T, head_dim, heads)."""
    tokens, heads, width = x.shape
    return x.reshape(tokens, width, heads).transpose(0, 2, 1)


def heads_inside(x: Array) -> Array:
    """(T, heads, head_dim) flattened channel by channel."""
    return x.transpose(0, 2, 1).reshape(x.shape)


def eps_outside(x: Array, weight: Array, eps: float) -> Array:
    """weight · x / (sqrt(mean(x²)) + eps)."""
    return cast(Array, x / (np.sqrt(np.square(x).mean(-1, keepdims=True)) + eps) * weight)


def eps_outside_mean(x: Array, weight: Array, eps: float) -> Array:
    """weight · x / sqrt((sum(x²) + eps) / H)."""
    return rms_norm(x, weight, eps / x.shape[-1])


def largest_of_eps(x: Array, weight: Array, eps: float) -> Array:
    """weight · x / sqrt(max(mean(x²), eps))."""
    return cast(Array, x / np.sqrt(np.square(x).mean(-1, keepdims=True).clip(eps)) * weight)


def no_norm(x: Array, weight: Array, eps: float) -> Array:
    """x as it is."""
    return x


def weight_only(x: Array, weight: Array, eps: float) -> Array:
    """weight · x, nothing divided."""
    return x * weight


def without_weight(x: Array, weight: Array, eps: float) -> Array:
    """Normed, its weight left out."""
    return rms_norm(x, np.ones(1), eps)


def weight_plus_one(x: Array, weight: Array, eps: float) -> Array:
    """(1 + weight) · normed."""
    return rms_norm(x, 1 + weight, eps)


def layer_norm(x: Array, weight: Array, eps: float) -> Array:
    """The mean taken off first."""
    return rms_norm(x - x.mean(-1, keepdims=True), weight, eps)


def over_all_heads(x: Array, weight: Array, eps: float) -> Array:
    """Mean square over all heads of a token."""
    return cast(Array, x / np.sqrt(np.square(x).mean((-2, -1), keepdims=True) + eps) * weight)


def l2_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divided by the root of the sum of squares."""
    return cast(Array, rms_norm(x, weight, eps) / np.sqrt(x.shape[-1]))


def bf16_norm(x: Array, weight: Array, eps: float) -> Array:
    """Every step of the norm in bfloat16."""
    x = rounded(x, "bfloat16")
    mean = rounded(rounded(np.square(x), "bfloat16").mean(-1, keepdims=True), "bfloat16")
    unit = rounded(x * rounded(1 / np.sqrt(mean + eps), "bfloat16"), "bfloat16")
    return cast(Array, rounded(unit * rounded(weight, "bfloat16"), "bfloat16"))


def erf(x: Array) -> Array:
    """Error function by its series and, far out, its continued fraction: to 1e-12."""
    x = np.asarray(x, np.float64)
    size = np.minimum(np.abs(x), 6.0)
    term, total = size.copy(), size.copy()
    for n in range(1, 140):
        term = term * 2 * size**2 / (2 * n + 1)
        total = total + term
    return cast(Array, np.sign(x) * np.minimum(2 / np.sqrt(np.pi) * np.exp(-(size**2)) * total, 1.0))


def gelu(gate: Array, up: Array) -> Array:
    """gelu(gate) · up, by the error function."""
    return cast(Array, 0.5 * gate * (1 + erf(gate / np.sqrt(2))) * up)


def gelu_tanh(gate: Array, up: Array) -> Array:
    """gelu(gate) · up, by its tanh formula."""
    return cast(Array, 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up)


def quick_gelu(gate: Array, up: Array) -> Array:
    """gate · sigmoid(1.702 gate) · up."""
    return gate * sigmoid(1.702 * gate) * up


def relu(gate: Array, up: Array) -> Array:
    """max(gate, 0) · up."""
    return np.maximum(gate, 0) * up


def relu_squared(gate: Array, up: Array) -> Array:
    """max(gate, 0)² · up."""
    return np.maximum(gate, 0) ** 2 * up


def sigmoid_gate(gate: Array, up: Array) -> Array:
    """sigmoid(gate) · up."""
    return sigmoid(gate) * up


def tanh_gate(gate: Array, up: Array) -> Array:
    """tanh(gate) · up."""
    return np.tanh(gate) * up


def no_activation(gate: Array, up: Array) -> Array:
    """gate · up."""
    return gate * up


def up_activated(gate: Array, up: Array) -> Array:
    """silu(up) · gate."""
    return silu(up) * gate


def both_activated(gate: Array, up: Array) -> Array:
    """silu(gate) · silu(up)."""
    return silu(gate) * silu(up)


def product_activated(gate: Array, up: Array) -> Array:
    """silu(gate · up)."""
    return silu(gate * up)


def up_left_out(gate: Array, up: Array) -> Array:
    """silu(gate) alone."""
    return silu(gate)


def up_plus_one(gate: Array, up: Array) -> Array:
    """silu(gate) · (up + 1)."""
    return cast(Array, silu(gate) * (up + 1))


def as_it_is(value: Any) -> Any:
    """The value."""
    return value


def ones(value: Any) -> Any:
    """1 everywhere."""
    return np.ones_like(value)


def log_softmax(x: Array) -> Array:
    """ln softmax(x)."""
    return np.log(softmax(x))


def one_minus(value: Array) -> Array:
    """1 - value."""
    return 1 - value

