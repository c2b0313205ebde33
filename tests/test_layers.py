"""Products and their gradients, norms, and what rotary positions must do."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.layers import GatedMLP, Linear, RMSNorm, apply_rope, matmul, product, rope_frequencies, rope_tables
from dflash_jax.model_config import RopeConfig

pytestmark = pytest.mark.one_cell

# Every kind of product in the package: model kernels, heads, and the scores and sums of both attentions.
SPECS = {
    "nd,df->nf": ((3, 4), (4, 5)),
    "nd,fd->nf": ((3, 4), (5, 4)),
    "btgre,bgce->bgrtc": ((2, 3, 2, 2, 4), (2, 2, 5, 4)),
    "bgrtc,bgce->btgre": ((2, 2, 2, 3, 5), (2, 2, 5, 4)),
    "bakgre,bajge->bgrakj": ((2, 3, 4, 2, 1, 4), (2, 3, 5, 2, 4)),
    "bgrakj,bajge->bakgre": ((2, 2, 1, 3, 4, 5), (2, 3, 5, 2, 4)),
}


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def gradients(function, x, y, cotangent):
    out, pull = jax.vjp(function, x, y)
    return out, *pull(cotangent.astype(out.dtype))


@pytest.mark.parametrize(
    ("spec", "dtype", "kept"),
    [(spec, dtype, "float32") for spec in SPECS for dtype in ("float32", "bfloat16")]
    + [("nd,df->nf", dtype, "bfloat16") for dtype in ("float32", "bfloat16")],
)
def test_product_and_its_gradient(spec, dtype, kept):
    """Values are float32 sums of `dtype` products; each gradient has its operand's dtype, whatever the operands are cast to."""
    x, y = (normal(i, shape, kept) for i, shape in enumerate(SPECS[spec]))
    plain = partial(jnp.einsum, spec, precision="highest")
    shape = jax.eval_shape(plain, x, y).shape
    cotangent = normal(2, shape)
    out, grad_x, grad_y = gradients(partial(product, spec, dtype=dtype), x, y, cotangent)
    assert (out.dtype, grad_x.dtype, grad_y.dtype) == (jnp.float32, x.dtype, y.dtype)

    def rounded(z, to):
        return z.astype(to).astype(jnp.float32)

    wide = [rounded(z, dtype) for z in (x, y)]
    wanted, wanted_x, wanted_y = gradients(plain, *wide, rounded(cotangent, dtype))
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if kept == "float32" else 2**-7
    for got, want in ((grad_x, wanted_x), (grad_y, wanted_y)):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance)


def test_product_under_jit_vmap_and_remat():
    x, y = normal(0, (6, 3, 4)), normal(1, (6, 4, 5))

    def total(x, y, multiply):
        return jnp.sin(jax.vmap(multiply)(x, y)).sum()

    wanted = jax.grad(partial(total, multiply=jnp.matmul), argnums=(0, 1))(x, y)
    ours = partial(total, multiply=jax.checkpoint(partial(product, "nd,df->nf", dtype="float32")))
    for got, want in zip(jax.jit(jax.grad(ours, argnums=(0, 1)))(x, y), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4), (2, 3, 4), (0, 4)])
def test_matmul_any_leading_shape(shape, dtype):
    """One bfloat16 row takes a detour; it must not change the result."""
    x, kernel = normal(0, shape), normal(1, (4, 5))
    wanted = np.asarray(x.astype(dtype), np.float64) @ np.asarray(kernel.astype(dtype), np.float64)
    for got in (matmul(x, kernel, dtype), matmul(x, kernel.T, dtype, transposed=True)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_matmul_of_one_bfloat16_row_has_one_rows_gradient():
    x, kernel = normal(0, (1, 4)), normal(1, (4, 5), jnp.bfloat16)
    grad_x, grad_kernel = jax.grad(lambda x, k: matmul(x, k, "bfloat16").sum(), argnums=(0, 1))(x, kernel)
    np.testing.assert_allclose(grad_x[0], kernel.astype(jnp.float32).sum(1), rtol=2**-7)
    wanted = jnp.broadcast_to(x.astype(jnp.bfloat16).astype(jnp.float32).T, (4, 5))
    np.testing.assert_array_equal(grad_kernel.astype(jnp.float32), wanted)


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_linear_norm_and_mlp_against_numpy(kept):
    x = normal(0, (2, 3, 8), kept)
    wide = np.asarray(x, np.float64)
    linear = Linear(jax.random.key(0), (8, 6), ("embed", "mlp"), bias=True, dtype="float32")
    linear.bias.set_value(normal(1, (6,), kept))
    linear.kernel.set_value(linear.kernel[...].astype(kept))
    kernel, bias = (np.asarray(p[...], np.float64) for p in (linear.kernel, linear.bias))
    np.testing.assert_allclose(linear(x), wide @ kernel + bias, rtol=1e-5, atol=1e-5)
    norm = RMSNorm(8, 0.1)
    norm.scale.set_value(normal(2, (8,), kept))
    out = norm(x)
    assert out.dtype == jnp.float32
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.1) * np.asarray(norm.scale[...], np.float64)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    mlp = GatedMLP(jax.random.key(1), 8, 12, bias=False, dtype="float32")
    gate, up, down = (np.asarray(p.kernel[...], np.float64) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    gated = wide @ gate
    np.testing.assert_allclose(mlp(x), (gated / (1 + np.exp(-gated)) * (wide @ up)) @ down, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Rotary positions (against transformers: test_targets.py)

ROPES = {
    "default": RopeConfig(100.0),
    "linear": RopeConfig(100.0, "linear", 4.0),
    "llama3": RopeConfig(1e4, "llama3", 8.0, 128, 1.0, 4.0),
    "yarn": RopeConfig(100.0, "yarn", 4.0, 64, attention_factor=1.0),
    "partial": RopeConfig(100.0, partial_rotary_factor=0.5),
}


def rotated(x, rope, positions):
    return np.asarray(apply_rope(x, rope_tables(rope, x.shape[-1], jnp.asarray(positions, jnp.int32))))


@pytest.mark.parametrize("name", ROPES)
def test_rope_keeps_norms_and_depends_on_distance_only(name):
    q, k = normal(0, (5, 2, 16)), normal(1, (5, 2, 16))
    positions = np.array([0, 1, 7, 30, 200])
    turned = rotated(q, ROPES[name], positions)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    assert np.abs(turned[1:] - q[1:]).max() > 0.1
    here = (turned * rotated(k, ROPES[name], positions + 3)).sum(-1)
    there = (rotated(q, ROPES[name], positions + 40) * rotated(k, ROPES[name], positions + 43)).sum(-1)
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-3)
    assert np.abs(here - (turned * rotated(k, ROPES[name], positions + 4)).sum(-1)).max() > 0.1


def test_rope_layout_and_partial_rotation():
    """Pairs are (i, i + half) of the rotated part; the rest passes."""
    x = jnp.asarray([[[1.0, 0.0, 0.0, 0.0, 5.0, 6.0, 7.0, 8.0]]])
    out = rotated(x, RopeConfig(100.0, partial_rotary_factor=0.5), [2])[0, 0]
    np.testing.assert_allclose(out, [math.cos(2), 0, math.sin(2), 0, 5, 6, 7, 8], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("position", [0, 1, 127, 128, 129, 40959, 40961, 1_000_000])
def test_rope_at_any_position(name, position):
    """No table to run past: angles equal float64 ones but for the rounding of one float32 product."""
    cos, sin = rope_tables(ROPES[name], 16, jnp.asarray([position], jnp.int32))
    angles = position * rope_frequencies(ROPES[name], 16).astype(np.float64)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6 + angles.max() * 2.0**-24)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-6 + angles.max() * 2.0**-24)


def test_rope_frequencies_by_formula():
    plain = np.array([100.0 ** (-i / 8) for i in range(8)])
    np.testing.assert_allclose(rope_frequencies(RopeConfig(100.0), 16), plain, rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(RopeConfig(100.0, "linear", 4.0), 16), plain / 4, rtol=1e-6)
    llama = rope_frequencies(RopeConfig(1e4, "llama3", 8.0, 128, 1.0, 4.0), 16)
    plain = np.array([1e4 ** (-i / 8) for i in range(8)])
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(llama[wavelengths < 32], plain[wavelengths < 32], rtol=1e-6)
    np.testing.assert_allclose(llama[wavelengths > 128], plain[wavelengths > 128] / 8, rtol=1e-6)
    between = (wavelengths > 32) & (wavelengths < 128)
    assert between.any()
    assert ((llama < plain) & (llama > plain / 8))[between].all()
    yarn = RopeConfig(100.0, "yarn", 4.0, 64)
    assert np.isclose(float(rope_tables(yarn, 16, jnp.zeros((1,), jnp.int32))[0][0, 0]), 0.1 * math.log(4) + 1)
