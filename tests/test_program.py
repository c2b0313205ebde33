"""Collectives read from a program's text, and operations counted in its trace, against what is counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.layers import product
from dflash_jax.program import collectives, product_flops

pytestmark = pytest.mark.one_cell

TEXT = """
HloModule jit_step, entry_computation_layout={()->f32[]}

%body.1 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %gathered = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%x), dimensions={0}
  ROOT %t = (s32[], f32[4,8]) tuple(%i, %gathered)
}

%condition.1 (p: (s32[], f32[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %i.1 = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

%inner_body (p: (s32[])) -> (s32[]) {
  %late = bf16[64] fusion(%p), kind=kCustom, calls=%end
  ROOT %sums = (f32[4]{0}, f32[2,2]{1,0}, pred[3]) all-reduce(%a, %b, %c), to_apply=%add
}

%outer_body (p: (s32[])) -> (s32[]) {
  %early = bf16[64] fusion(%p), kind=kCustom, calls=%begin
  ROOT %inner = (s32[]) while(%q), condition=%unknown, body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
}

%unknown (p: (s32[])) -> pred[] {
  %constant.9 = s32[] constant(7)
  %some = pred[] compare(%i.2, %constant.9), direction=LT
  ROOT %both = pred[] and(%some, %other)
}

%wrapped (p: f32[8]) -> f32[8] {
  ROOT %scattered = f32[8]{0} reduce-scatter(%p), dimensions={0}
}

%begin (p: bf16[8]) -> (bf16[8], bf16[64]) {
  %part.1 = bf16[64]{0} all-gather(%p), channel_id=7, dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %begun = (bf16[8], bf16[64]) custom-call(%p, %part.1)
}

%end (p: bf16[8]) -> bf16[64] {
  %part.2 = bf16[64]{0} all-gather(%p), channel_id=7, dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %ended = bf16[64] custom-call(%p, %part.2)
}

%likely (p: f32[2]) -> f32[2] {
  ROOT %moved = f32[2]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main (a: f32[4,8]) -> f32[] {
  %layer.1 = f32[6]{0} all-reduce(%a), channel_id=9, to_apply=%add
  %layer.2 = f32[6]{0} all-reduce(%layer.1), channel_id=9, to_apply=%add
  %while.1 = (s32[], f32[4,8]) while(%init), condition=%condition.1, body=%body.1
  %while.2 = (s32[]) while(%init.2), condition=%unknown, body=%outer_body
  %start = (f32[4,8], f32[16,8]) all-gather-start(%a), dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%start)
  %async = ((f32[8]), f32[8], s32[]) async-start(%b), calls=%wrapped
  %spread = (bf16[8], bf16[64]) fusion(%d), kind=kCustom, calls=%begin
  %spread.1 = bf16[64] fusion(%spread), kind=kCustom, calls=%end
  %async.1 = f32[8] async-done(%async), calls=%wrapped
  ROOT %c = f32[2] conditional(%flag, %x, %y), branch_computations={%likely, %likely}
}
"""


def test_collectives_are_counted_as_often_as_they_run():
    assert collectives(TEXT) == {
        # five times in bfloat16, the finished one in float32, and two over two fusions each: one
        # of them begins before the loop where it goes on
        "all-gather": (5 + 1 + 2, 5 * 16 * 8 * 2 + 16 * 8 * 4 + 2 * 64 * 2),
        # an unknown number of rounds counts once; two calls of one layer have one channel
        "all-reduce": (3 * 3 + 2, 3 * (16 + 16 + 3) + 2 * 24),
        "reduce-scatter": (1, 8 * 4),
        "collective-permute": (2, 2 * 2 * 4),
    }


def test_products_are_counted_loops_in_full():
    def step(x, w, n):
        def layer(x, _):
            return product("nd,df->nf", x, w, "float32"), None

        x, _ = jax.lax.scan(layer, x, length=3)
        x = jax.lax.fori_loop(0, n, lambda _, x: x @ w, x)
        return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ w).sum(), lambda x: x.sum(), x)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8), (8, 8))] + [jax.ShapeDtypeStruct((), jnp.int32)]
    one = 2 * 4 * 8 * 8
    assert product_flops(jax.make_jaxpr(step)(*shapes).jaxpr) == (3 + 1 + 1) * one


def test_a_gradient_costs_two_products_more():
    def loss(w, x):
        return jnp.square(product("nd,df->nf", x, w, "bfloat16")).sum()

    w, x = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(w, x).jaxpr
    assert product_flops(jaxpr) == 3 * 2 * 4 * 8 * 16


def test_what_no_result_needs_is_not_counted():
    """As the target's layers above the last tap, in a loop or not."""

    def layers(x, w):
        low = x @ w
        high, _ = jax.lax.scan(lambda x, _: (x @ w, None), low @ w, length=5)
        return low, high

    x, w = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    one = 2 * 4 * 8 * 8
    assert product_flops(jax.make_jaxpr(jax.jit(layers))(x, w).jaxpr) == 7 * one
    assert product_flops(jax.make_jaxpr(lambda x, w: jax.jit(layers)(x, w)[0])(x, w).jaxpr) == one
