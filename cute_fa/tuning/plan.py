"""ForwardPlan: everything a forward kernel is compiled for. Plain, frozen, hashable: it is the compile key.

`tuning/heuristics.py` chooses one for a problem, `kernels/` builds its kernel, `host/cache.py` keys on it, and
`cute-fa inspect` compares what was compiled with what it requires.
"""

from dataclasses import dataclass

from cute_fa.tuning.budget import ForwardTile

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class ForwardPlan:
    """dtype: of q, k, v and out. tile: sizes, stages, warpgroups.

    has_turns: consumer warpgroups issue their products in turn (ping-pong) instead of when they like.
    heads_per_section: under a causal mask, how many heads run side by side (`device/order.py`).
    """

    dtype: str
    tile: ForwardTile
    is_causal: bool
    has_turns: bool
    heads_per_section: int

    @property
    def name(self) -> str:
        """A word for messages, files and test ids, such as forward-d128-bf16-causal-m128n128."""
        t = self.tile
        dims = f"d{t.head_dim}" + (f"-{t.head_dim_v}" if t.head_dim_v != t.head_dim else "")
        mask = "causal" if self.is_causal else "full"
        return f"forward-{dims}-{SHORT_DTYPES[self.dtype]}-{mask}-m{t.tile_m}n{t.tile_n}" + "-turns" * self.has_turns

    @property
    def required_opcodes(self) -> tuple[str, ...]:
        """SASS instructions without which the kernel would not be what it is meant to be."""
        stores = ("UTMASTG", "STSM") if self.tile.has_o_staging else ()
        return ("HGMMA", "UTMALDG", "USETMAXREG", *stores)
