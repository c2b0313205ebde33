"""What decoding and training ask of a target, so that any JAX model can be one."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from dflash_jax.model_config import TargetConfig
from dflash_jax.sharding import Collect


@runtime_checkable
class Target(Protocol):
    """A frozen causal language model. All methods are pure functions of `params` and their arguments, usable under `jax.jit`.

    The object itself is a static argument of jitted functions, so it must be hashable; equal targets share compiled programs.

    A cache is any pytree whose arrays all have the row as their first axis: an engine takes rows out, copies them and puts them
    back. Rows are written at their positions; a query at position p sees the positions 0..p that were written last, so decoding
    rejects drafted tokens by extending again from an earlier position. Positions outside 0..capacity-1 are padding: nothing is
    written there and their outputs are ignored.
    """

    @property
    def config(self) -> TargetConfig:
        """Sizes, stop tokens and context length."""

    @property
    def params(self) -> Any:
        """A pytree of arrays."""

    @property
    def tokenizer(self) -> Any:
        """A `Tokenizer`, or None; only text in and out needs it."""

    def init_cache(self, batch: int, capacity: int) -> Any:
        """An empty cache for `batch` rows of up to `capacity` positions."""

    def extend(
        self, params: Any, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], cache: Any, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T M"], Any]:
        """Append tokens at absolute positions: hidden states after the last norm, taps side by side (M = taps x D), cache."""

    def embed(self, params: Any, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
        """Token embeddings, float32."""

    def unembed(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Logits of final hidden states, float32."""


@runtime_checkable
class TrainableTarget(Target, Protocol):
    """What training a drafter asks on top."""

    def head_kernel(self, params: Any) -> Float[Array, "V D"]:
        """The output embedding, for losses that never form all logits."""


@runtime_checkable
class PackableTarget(Target, Protocol):
    """What training on rows of several documents (`data.packing`) asks on top. Training reads other rows by it too, because it has
    no use for a cache; without it they go through `extend`."""

    def read_documents(
        self,
        params: Any,
        tokens_BT: Int[Array, "B T"],
        starts_BT: Int[Array, "B T"],
        taps: tuple[int, ...],
        collect: Collect | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T M"]]:
        """Hidden states and taps of whole rows, as `extend` gives them for each document alone. Those of padding mean nothing.

        The document of slot t begins at slot `starts_BT[:, t]`: slot t has position t - start and sees the slots start..t.
        `collect`, given where parameters are in parts on several devices, brings together those of `params` or of a part of it:
        best called a layer at a time, so that only one is whole at once.
        """
