"""The train step compiled for four devices: what it sends between them.

Rows over `data`: the gradients, once. Over `fsdp`: kernels besides, each collected whole before use. Never activations or logits.
"""

import itertools
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from jax import NamedSharding
from test_train_step import CONFIG, DRAFTER, LENGTH, ROWS, SGD, TARGET
from tiny_run import mesh

from dflash_jax.drafter import Drafter
from dflash_jax.program import COLLECTIVES, computations
from dflash_jax.sharding import BATCH, placed_shapes
from dflash_jax.train_step import Batch, abstract_state, make_train_step

pytestmark = pytest.mark.one_cell


def sent(where):
    """The elements of every array that crosses between devices, by kind. Nothing is allocated: arguments are shapes."""

    def rows(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((ROWS, *shape), dtype, sharding=NamedSharding(where, BATCH))

    batch = Batch(rows(LENGTH), rows(LENGTH, dtype=jnp.bool_), rows())
    compiled = make_train_step(CONFIG, TARGET, Drafter(DRAFTER, None), SGD, where)
    found = defaultdict(list)
    lowered = compiled.lower(abstract_state(DRAFTER, SGD, where), placed_shapes(TARGET.params, where), batch, None)
    for each in itertools.chain(*computations(lowered.compile().as_text()).values()):
        if (kind := each.opcode.removesuffix("-start")) in COLLECTIVES:
            found[kind] += each.sizes
    return found


PARAMETERS = [math.prod(x.shape) for x in jax.tree.leaves(Drafter.random(jax.random.key(0), DRAFTER).params)]
OF_CONTEXT = 2 * DRAFTER.draft_hidden_dim * DRAFTER.num_kv_heads * DRAFTER.head_dim + DRAFTER.head_dim
"""keys, values and their norm are read twice, by context and blocks: so are their gradients summed"""
FEW = 64
"""sums of losses and counts"""


def check_gradients(found):
    """Every gradient is summed over the devices, once."""
    total = sum(found["all-reduce"]) + sum(found["reduce-scatter"])
    assert sum(PARAMETERS) <= total <= sum(PARAMETERS) + OF_CONTEXT + FEW
    assert max(found["all-reduce"]) == max(PARAMETERS)


def test_rows_over_data():
    found = sent(mesh(4, 1, 1))
    check_gradients(found)
    assert sum(found["all-gather"]) <= ROWS * LENGTH, "which positions anchors may take, and nothing else"
    assert set(found) <= {"all-reduce", "reduce-scatter", "all-gather"}


def test_rows_and_parameters_over_fsdp():
    found = sent(mesh(1, 4, 1))
    check_gradients(found)
    target = [math.prod(x.shape) for x in jax.tree.leaves(TARGET.params)]
    assert set(found["all-gather"]) <= {*PARAMETERS, *target, ROWS * LENGTH}
    assert sum(found["all-gather"]) <= sum(target) + 2 * sum(PARAMETERS) + ROWS * LENGTH, "forward, and at most once more backward"
    assert set(found) <= {"all-reduce", "reduce-scatter", "all-gather"}
