"""DFlash in JAX: train drafters, decode in a loop that never leaves the device. See README.md; terms in docs/design.md.

Dimension key: B rows, T context positions, C cache capacity, A anchored blocks a row, K slots a block (J = K - 1 drafted), D width,
N taps (M = N x D), H query heads, G key/value heads, R = H / G, E head width, F MLP width, V vocabulary, L token buffer.
Arrays carry their shape in their name.
"""

from dflash_jax.drafter import ContextFuser, Drafter, DraftModel, KVInjectionAttention
from dflash_jax.engine import Engine
from dflash_jax.errors import DFlashError
from dflash_jax.generate import Generation, generate, stream
from dflash_jax.hf import load_drafter, load_target, save_drafter
from dflash_jax.loss import dflash_loss
from dflash_jax.model_config import DFlashConfig
from dflash_jax.request import Request
from dflash_jax.verify import verify_block
from dflash_jax.widths import WidthTable

__all__ = [
    "ContextFuser",
    "DFlashConfig",
    "DFlashError",
    "DraftModel",
    "Drafter",
    "Engine",
    "Generation",
    "KVInjectionAttention",
    "Request",
    "WidthTable",
    "dflash_loss",
    "generate",
    "load_drafter",
    "load_target",
    "save_drafter",
    "stream",
    "verify_block",
]
