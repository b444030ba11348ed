"""Plans: everything a kernel is compiled for. Plain, frozen, hashable: a plan is the compile key.

`tuning/heuristics.py` chooses them for a problem, `kernels/` builds their kernels, `host/cache.py` keys on them, and
`cute-fa inspect` compares what was compiled with what they require. Every plan has a name for messages, files and test
ids, the bytes of shared memory that its kernel takes, and the SASS instructions without which the kernel would not be
what it is meant to be.
"""

from dataclasses import dataclass

from cute_fa.tuning.budget import CHUNK_BYTES, CONVERTERS, BackwardTile, DqTile, ForwardTile

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def usual_forward_tile(head_dim: int, head_dim_v: int, num_warpgroups: int, tile_n: int) -> ForwardTile:
    """The tile whose name needs no more words: a second stage for Q and staging for O where both fit, else neither.

    It may not fit all the same.
    """
    sizes = (head_dim, head_dim_v, 64 * num_warpgroups, tile_n, num_warpgroups)
    roomy = ForwardTile(*sizes, num_q_stages=2, has_o_staging=True)
    return roomy if roomy.fits else ForwardTile(*sizes, num_q_stages=1, has_o_staging=False)


@dataclass(frozen=True)
class ForwardPlan:
    """dtype: of q, k, v and out. tile: sizes, stages, warpgroups.

    has_turns: consumer warpgroups issue their products in turn (ping-pong) instead of when they like.
    """

    dtype: str
    tile: ForwardTile
    is_causal: bool
    has_turns: bool

    @property
    def has_half_blocks(self) -> bool:
        """Whether a warpgroup that sees only the left half of its first block, as on a diagonal, computes only that.

        The half must be as wide as a warpgroup is high.
        """
        return self.is_causal and self.tile.tile_n == 128

    @property
    def name(self) -> str:
        """Such as forward-d128-bf16-causal-m128n128-turns; then what is not usual, such as -q1-kv3-direct."""
        return "-".join([_name("forward", self), *["turns"] * self.has_turns, *_unusual_words(self)])

    @property
    def smem_bytes(self) -> int:
        return self.tile.smem_bytes

    @property
    def required_opcodes(self) -> tuple[str, ...]:
        stores = ("UTMASTG", "STSM") if self.tile.has_o_staging else ()
        return ("HGMMA", "UTMALDG", "USETMAXREG", *stores)


@dataclass(frozen=True)
class BackwardPlan:
    """The main kernel of a backward call. dtype: of q, k, v, dout and the gradients.

    schedule: order of one step, words of `tuning/schedule.py`.
    has_16bit_ds: dS = P (dP - delta) is computed on 16-bit numbers, which takes fewer registers and rounds more.
    is_persistent: a CTA takes one tile after another, and converters (`kernels/backward/dq_rows.py`) work beside, where there
        is room for them; else a tile is a CTA, and all dQ is left to the kernel behind.
    heads_per_section: under a causal mask, how many query heads run side by side (`device/order.py`).
    """

    dtype: str
    tile: BackwardTile
    is_causal: bool
    is_deterministic: bool
    schedule: str
    has_16bit_ds: bool
    needs_dq: bool
    needs_dk: bool
    needs_dv: bool
    is_persistent: bool
    heads_per_section: int

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return self.needs_dq, self.needs_dk, self.needs_dv

    def num_counters(self, num_heads: int, num_blocks: int, num_ctas: int) -> int:
        """Words of `kernels/backward/counters.py`. num_heads: query heads of all batches. num_blocks: of queries, of all heads."""
        return 1 + num_heads + CONVERTERS * num_ctas + self.is_deterministic * num_blocks

    @property
    def has_dq_writer(self) -> bool:
        """Whether a warp adds dQ; else, if it is needed, consumers do."""
        return self.needs_dq and self.tile.has_dq_staging

    @property
    def is_shortest_first(self) -> bool:
        """Whether the tiles of a section come from the last keys, which the fewest queries see, to the first ones."""
        return self.is_causal and self.is_deterministic

    @property
    def has_converters(self) -> bool:
        """Whether warps of the main kernel turn dQ into rows; in a fixed order they have other work."""
        has_idle_warps = self.is_persistent and not self.is_deterministic
        return self.needs_dq and has_idle_warps and self.tile.has_room_for_converters

    @property
    def needs_ds(self) -> bool:
        return self.needs_dq or self.needs_dk

    @property
    def name(self) -> str:
        """Such as backward-d128-bf16-causal-m64n128; the gradients where not all are needed."""
        needed = [name for name in ("dq", "dk", "dv") if getattr(self, f"needs_{name}")]
        words = ["deterministic"] * self.is_deterministic + ["persistent"] * self.is_persistent
        return "-".join([_name("backward", self), *words, *(needed if len(needed) < 3 else [])])

    @property
    def smem_bytes(self) -> int:
        return self.tile.smem_bytes + self.has_converters * CONVERTERS * CHUNK_BYTES

    @property
    def required_opcodes(self) -> tuple[str, ...]:
        opcodes = ["HGMMA", "UTMALDG", "USETMAXREG"]
        opcodes += ["UTMASTG", "STSM"] * (self.needs_dk or self.needs_dv)
        opcodes += ["UBLKRED" if self.has_dq_writer else "REDG"] * self.needs_dq
        return tuple(opcodes)


@dataclass(frozen=True)
class PreprocessPlan:
    """The kernel before the main one: delta, and lse in units of log2; zeros for dQ if needs_dq. dtype: of out and dout."""

    dtype: str
    head_dim_v: int
    needs_dq: bool

    smem_bytes = 0
    required_opcodes = ()

    @property
    def name(self) -> str:
        return f"preprocess-d{self.head_dim_v}-{SHORT_DTYPES[self.dtype]}" + "-zeros" * self.needs_dq


@dataclass(frozen=True)
class PostprocessPlan:
    """The kernel after the main one: dq from its fp32 accumulator, of blocks that it left. dtype: of dq."""

    dtype: str
    tile: DqTile

    smem_bytes = 0
    required_opcodes = ()

    @property
    def name(self) -> str:
        kind = "-shared" * self.tile.has_p_in_smem
        return f"postprocess-d{self.tile.head_dim}-{SHORT_DTYPES[self.dtype]}-m{self.tile.tile_m}{kind}"


Plan = ForwardPlan | BackwardPlan | PreprocessPlan | PostprocessPlan


def symbol(plan: Plan) -> str:
    """The plan's name as a C identifier: what profilers show, and what object files export."""
    return "cute_fa_" + plan.name.replace("-", "_")


def _name(direction: str, plan: ForwardPlan | BackwardPlan) -> str:
    t = plan.tile
    dims = f"d{t.head_dim}" + (f"-{t.head_dim_v}" if t.head_dim_v != t.head_dim else "")
    mask = "causal" if plan.is_causal else "full"
    return f"{direction}-{dims}-{SHORT_DTYPES[plan.dtype]}-{mask}-m{t.tile_m}n{t.tile_n}"


def _unusual_words(plan: ForwardPlan) -> list[str]:
    """Stages of Q, stages of K and of V, how O is stored."""
    t = plan.tile
    usual = usual_forward_tile(t.head_dim, t.head_dim_v, t.num_consumer_warpgroups, t.tile_n)
    words = []
    if t.num_q_stages != usual.num_q_stages:
        words.append(f"q{t.num_q_stages}")
    if t.num_kv_stages != usual.num_kv_stages:
        words.append(f"kv{t.num_kv_stages}")
    if t.has_o_staging != usual.has_o_staging:
        words.append("staged" if t.has_o_staging else "direct")
    return words
