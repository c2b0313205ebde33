"""Where arrays live: one rules table from logical axes to mesh axes. One device is a 1x1x1 mesh on the same path."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dflash_jax.config import MeshConfig
from dflash_jax.errors import ConfigError

MESH_AXES = ("replica", "data", "fsdp", "tensor")
"""outermost first: replica lies across slices, tensor between neighbours"""
RULES: dict[str | None, str | None] = {
    "embed": "fsdp",
    "taps": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    None: None,
}
"""logical axis of a parameter -> mesh axis"""
BATCH_AXES = ("replica", "data", "fsdp")
BATCH = PartitionSpec(BATCH_AXES)
"""rows of a batch"""
Collect = Callable[[Any], Any]
"""brings together the parts of some parameters (`collected` on a mesh), where and when they are needed"""


def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
    """A mesh over all devices (or those given); one size may be -1. Raises `ConfigError` when sizes and devices do not fit."""
    devices = np.asarray(jax.devices() if devices is None else devices)
    sizes = [config.replica, config.data, config.fsdp, config.tensor]
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ConfigError(f"mesh sizes {dict(zip(MESH_AXES, sizes, strict=True))} must be positive, at most one of them -1")
    known = int(np.prod([size for size in sizes if size > 0]))
    sizes = [devices.size // known if size == -1 else size for size in sizes]
    if int(np.prod(sizes)) != devices.size:
        raise ConfigError(
            f"the mesh {dict(zip(MESH_AXES, sizes, strict=True))} does not hold {devices.size} devices: "
            "change mesh.data, mesh.fsdp, mesh.tensor or mesh.replica"
        )
    slices = by_slice(devices.reshape(-1))
    if sizes[0] % len(slices):
        raise ConfigError(
            f"mesh.replica is {sizes[0]}, but the devices are {len(slices)} slices: make it a multiple of {len(slices)}, because "
            "parameters that are split across slices cross the slow network at every step"
        )
    # within a slice make_mesh knows which devices are neighbours
    parts = [
        jax.make_mesh((sizes[0] // len(slices), *sizes[1:]), MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=part)
        for part in slices
    ]
    if len(parts) == 1:
        return parts[0]
    return Mesh(np.concatenate([part.devices for part in parts]), MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def by_slice(devices: Any) -> list[list[Any]]:
    """Devices grouped by the slice they belong to, in the order of slices; one group where there are none."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [groups[index] for index in sorted(groups)]


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def process_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a batch that lie on devices of this process, ascending: what it has to read. They need not follow each other.

    Raises `ConfigError` when the rows do not divide among the devices.
    """
    if batch_size < 1 or batch_size % batch_shards(mesh):
        raise ConfigError(
            f"data.batch_size {batch_size} is not a multiple of the {batch_shards(mesh)} devices that hold rows "
            "(mesh.replica x mesh.data x mesh.fsdp): change one of them"
        )
    places = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in places]))


def place_rows(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Rows of this process (`process_rows`) as its part of one array over all processes, [batch_size, ...]."""
    shards = batch_shards(mesh)
    batch_size = len(rows) // len(process_rows(mesh, shards)) * shards
    first = {int(row): place for place, row in enumerate(process_rows(mesh, batch_size))}

    def part(index: Any) -> np.ndarray:
        mine = range(batch_size)[index[0]]
        return rows[first[mine.start] : first[mine.start] + len(mine)]

    shape, sharding = (batch_size, *rows.shape[1:]), NamedSharding(mesh, BATCH)
    places = sharding.addressable_devices_indices_map(shape)
    # put one by one: a transfer that is asked for, which a transfer guard lets pass
    parts = [jax.device_put(part(index), device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def spec(shape: tuple[int, ...], logical: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
    """The partition of one array. A dimension that its mesh axis does not divide is replicated."""
    axes = []
    for size, name in zip(shape, logical, strict=True):
        axis = RULES[name]
        axes.append(axis if axis is not None and size % mesh.shape[axis] == 0 else None)
    return PartitionSpec(*axes)


def replicated_dimensions(tree: Any, mesh: Mesh) -> list[str]:
    """What the rules would have split but could not: one line a dimension, for the log."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
        if _is_variable(leaf):
            for size, name in zip(leaf.shape, leaf.logical, strict=True):
                axis = RULES[name]
                if axis is not None and size % mesh.shape[axis]:
                    lines.append(
                        f"{jax.tree_util.keystr(path)}: {name} {size} is not divided by {axis} {mesh.shape[axis]}, replicated"
                    )
    return lines


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf: parameters (and optimizer moments, which are variables too) by the rules, all else replicated."""

    def one(leaf: Any) -> Any:
        if _is_variable(leaf):
            return leaf.replace(NamedSharding(mesh, spec(leaf.shape, leaf.logical, mesh)))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(one, tree, is_leaf=_is_variable)


def placed_shapes(tree: Any, mesh: Mesh, dtype: Any = None) -> Any:
    """Shapes with the shardings of the rules, to compile for arrays that need not exist; `dtype` None keeps each leaf's own."""

    def one(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype or x.dtype), sharding=sharding)

    return jax.tree.map(one, tree, shardings(tree, mesh))


def collector(mesh: Mesh | None, dtype: str) -> Collect | None:
    """`collected` for a mesh whose devices hold parameters in parts along `fsdp`; None: they are whole."""
    return None if mesh is None or mesh.shape["fsdp"] == 1 else partial(collected, mesh=mesh, dtype=dtype)


def collected(params: Any, mesh: Mesh, dtype: str) -> Any:
    """Parameters whose parts along `fsdp` are brought together, kernels in `dtype`, as products of whole rows read them. Gradients
    are split again (summed in the parameters' own dtype).

    Left to itself, XLA multiplies a device's part of a kernel by all devices' rows and adds up what comes out, which holds every
    activation whole on every device.
    """

    def one(leaf: Any) -> Any:
        parts = spec(leaf.shape, leaf.logical, mesh) if _is_variable(leaf) else PartitionSpec()
        if mesh.shape["fsdp"] == 1 or "fsdp" not in parts:
            return leaf
        whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in parts))
        operand = leaf.dtype if "vocab" in leaf.logical else jnp.dtype(dtype)  # rows of an embedding are read as they are
        return leaf.replace(_collect(leaf[...], NamedSharding(mesh, whole), NamedSharding(mesh, parts), operand))

    return jax.tree.map(one, params, is_leaf=_is_variable)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _collect(x: Array, whole: NamedSharding, parts: NamedSharding, dtype: Any) -> Array:
    return jax.lax.with_sharding_constraint(x.astype(dtype), whole).astype(x.dtype)


def _collect_fwd(x: Array, whole: NamedSharding, parts: NamedSharding, dtype: Any) -> tuple[Array, None]:
    return _collect(x, whole, parts, dtype), None


def _collect_bwd(whole: NamedSharding, parts: NamedSharding, dtype: Any, _: None, grad: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(grad, parts),)


_collect.defvjp(_collect_fwd, _collect_bwd)


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters are spread over; None when they are on one device without a mesh."""
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(params) if isinstance(getattr(leaf, "sharding", None), NamedSharding)]
    return meshes[0] if meshes else None


def _is_variable(leaf: Any) -> bool:
    """A variable with an array; an optimizer that treats only a part of the parameters keeps the others as empty variables."""
    return isinstance(leaf, nnx.Variable) and bool(jax.tree.leaves(leaf))
