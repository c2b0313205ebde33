"""The small parts every model here is made of: products, norms, rotary positions, gated MLP.

Activations are float32 throughout; a model's `dtype` only says what the operands of matrix products are cast to. Products always
accumulate to float32, in the backward pass too: that is what accelerators do anyway, and on CPUs it selects XLA's fast path.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from dflash_jax.model_config import RopeConfig

Initializer = Any


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(spec: str, x: Array, y: Array, dtype: str) -> Array:
    """`einsum(spec, x, y)` with operands cast to `dtype` and a float32 result; so are both gradients.

    Every letter of an operand must stand in the other operand or in the result (no reduction of one operand alone).
    """
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    cast = jnp.dtype(dtype)
    x, y = x.astype(cast), y.astype(cast)
    if dtype == "float32" or x.ndim == y.ndim == 2:
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)
    return _batched_product(spec, x, y)


def _batched_product(spec: str, x: Array, y: Array) -> Array:
    """The einsum as a product of matrices [..., rows, summed] x [..., summed, columns].

    XLA for CPUs stops with "Unsupported element type for DotThunk" at bfloat16 products with a float32 result whose rows or sums
    run over several dimensions, and at transposes that it folds into them.
    """
    (x_letters, y_letters), out_letters = spec.split("->")[0].split(","), spec.split("->")[1]
    if next(c for c in out_letters if c not in x_letters or c not in y_letters) in y_letters:
        x, y, x_letters, y_letters = y, x, y_letters, x_letters  # the result's first own dimension becomes its rows
    batch = [c for c in out_letters if c in x_letters and c in y_letters]
    rows = [c for c in out_letters if c not in y_letters]
    columns = [c for c in out_letters if c not in x_letters]
    summed = [c for c in x_letters if c not in out_letters]
    size = dict(zip(x_letters, x.shape, strict=True)) | dict(zip(y_letters, y.shape, strict=True))

    def matrices(array: Array, letters: str, first: list[str], second: list[str]) -> Array:
        moved = jnp.transpose(array, [letters.index(c) for c in batch + first + second])
        return moved.reshape(*(size[c] for c in batch), *(math.prod(size[c] for c in part) for part in (first, second)))

    x, y = matrices(x, x_letters, rows, summed), matrices(y, y_letters, summed, columns)
    order = batch + rows + columns
    out = jnp.matmul(x, y, preferred_element_type=jnp.float32).reshape([size[c] for c in order])
    return jnp.transpose(out, [order.index(c) for c in out_letters])


def _product_fwd(spec: str, x: Array, y: Array, dtype: str) -> tuple[Array, tuple[Array, Array, Any, Any]]:
    cast = jnp.dtype(dtype)
    # Kept in the operand dtype: residuals of half the size. The empty arrays carry the dtypes that the gradients must have.
    saved = (x.astype(cast), y.astype(cast), jnp.zeros((0,), x.dtype), jnp.zeros((0,), y.dtype))
    return product(spec, x, y, dtype), saved


def _product_bwd(spec: str, dtype: str, saved: tuple[Array, Array, Array, Array], grad: Array) -> tuple[Array, Array]:
    x, y, like_x, like_y = saved
    (x_letters, y_letters), out_letters = spec.split("->")[0].split(","), spec.split("->")[1]
    grad_x = product(f"{out_letters},{y_letters}->{x_letters}", grad, y, dtype)
    grad_y = product(f"{x_letters},{out_letters}->{y_letters}", x, grad, dtype)
    return grad_x.astype(like_x.dtype), grad_y.astype(like_y.dtype)


product.defvjp(_product_fwd, _product_bwd)


def matmul(x: Array, kernel_DF: Array, dtype: str, *, transposed: bool = False) -> Array:
    """`x @ kernel` over the last axis of `x`; `transposed` takes the kernel as [F, D]. Float32 result."""
    x_ND = x.reshape(-1, x.shape[-1])
    rows = x_ND.shape[0]
    if rows == 1 and dtype == "bfloat16":  # XLA's CPU path for one bfloat16 row is several times slower than for two
        x_ND = jnp.concatenate([x_ND, x_ND])
    out_NF = product("nd,fd->nf" if transposed else "nd,df->nf", x_ND, kernel_DF, dtype)[:rows]
    # Else the TPU compiler lets attention choose the layout of its projections, and for that copies their kernels at every call.
    out_NF = with_layout_constraint(out_NF, Layout(major_to_minor=(0, 1)))
    return out_NF.reshape(*x.shape[:-1], out_NF.shape[-1])


class Linear(nnx.Module):
    """A dense layer with its kernel as [in, out]."""

    def __init__(self, key: Array, shape: tuple[int, int], axes: tuple[str, str], *, bias: bool, dtype: str) -> None:
        scale = shape[0] ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(key, shape, jnp.float32), logical=axes)
        self.bias = nnx.Param(jnp.zeros(shape[1:], jnp.float32), logical=axes[1:]) if bias else None
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        out = matmul(x, self.kernel[...], self.dtype)
        if self.bias is not None:
            bias = self.bias[...].astype(jnp.float32)
            out = out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)
        return out


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32. The factor is scale + offset (offset 1 in Gemma's files)."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        self.scale = nnx.Param(jnp.full((width,), 1 - offset, jnp.float32), logical=(None,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + jnp.float32(self.offset)
        return normed * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


class GatedMLP(nnx.Module):
    """down(activation(gate x) * up x); the activation is silu, or gelu in its tanh form."""

    def __init__(self, key: Array, width: int, mlp_dim: int, *, bias: bool, dtype: str, activation: str = "silu") -> None:
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = Linear(gate_key, (width, mlp_dim), ("embed", "mlp"), bias=bias, dtype=dtype)
        self.up_proj = Linear(up_key, (width, mlp_dim), ("embed", "mlp"), bias=bias, dtype=dtype)
        self.down_proj = Linear(down_key, (mlp_dim, width), ("mlp", "embed"), bias=bias, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        gate = self.gate_proj(x)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down_proj(gate * self.up_proj(x))


def softcap(x: Array, cap: float | None) -> Array:
    """c tanh(x / c), which bounds x to -c..c; None changes nothing (Gemma 2, arXiv 2408.00118, section 2)."""
    return x if cap is None else jnp.float32(cap) * jnp.tanh(x / jnp.float32(cap))


# ---------------------------------------------------------------------------------------------------------------------
# Rotary positions


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each rotated pair, [rotated dims / 2] float32, computed in float64 on the host.

    Scalings as the checkpoints define them: `linear`; `llama3` (Llama 3.1 model card); `yarn` (arXiv 2309.00071, section 3.2).
    """
    rotated = int(head_dim * rope.partial_rotary_factor)
    base = rope.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.type == "linear":
        base = base / rope.factor
    elif rope.type == "llama3":
        wavelength = 2 * math.pi / base
        # 1 keeps a frequency, 0 divides it by the factor; wavelengths between the two limits are blended
        keep = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        base = keep * base + (1 - keep) * base / rope.factor
    elif rope.type == "yarn":

        def pair_that_turns(turns: float) -> float:
            return rotated * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(rope.beta_slow)), rotated - 1)
        ramp = np.clip((np.arange(rotated // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        base = ramp * base / rope.factor + (1 - ramp) * base
    return base.astype(np.float32)


def rope_attention_factor(rope: RopeConfig) -> float:
    """What multiplies cos and sin: 1 except for yarn (arXiv 2309.00071, section 3.4)."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0


def rope_tables(rope: RopeConfig, head_dim: int, positions: Int[Array, "..."]) -> tuple[Array, Array]:
    """cos and sin, each [..., rotated dims / 2] float32, from absolute positions: any position works, nothing is tabulated."""
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[..., None] * frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    factor = jnp.float32(rope_attention_factor(rope))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: Float[Array, "... heads width"], tables: tuple[Array, Array]) -> Array:
    """Rotate the leading dimensions of every head; pairs are (i, i + half), as in Hugging Face checkpoints."""
    cos, sin = (table[..., None, :] for table in tables)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
