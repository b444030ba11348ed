"""Winners: which forward plans were the fastest on an H200, as a table. `python -m benchmarks.tune` prints its rows.

`heuristics.forward_plan` takes the first row that holds for a problem. A row is there because a run measured it: no
number of one changes without a new run. Rows hold for both dtypes, which have the same sizes and
nearly the same instructions.
"""

from dataclasses import dataclass

from cute_fa.tuning.budget import ForwardTile
from cute_fa.tuning.plan import ForwardPlan


@dataclass(frozen=True)
class ForwardWinner:
    """For which problems it holds, what runs there, and which run shows it.

    head_dim, head_dim_v: compiled tiles. max_seqlen: the longest seqlen_k, None for no end.
    measured: a run in `benchmarks/results/` with rows of this plan.
    """

    head_dim: int
    head_dim_v: int
    is_causal: bool
    max_seqlen: int | None
    num_consumer_warpgroups: int
    tile_n: int
    num_q_stages: int
    num_kv_stages: int
    has_o_staging: bool
    has_turns: bool
    measured: str

    @property
    def tile_m(self) -> int:
        return 64 * self.num_consumer_warpgroups

    def holds(self, head_dim: int, head_dim_v: int, is_causal: bool, seqlen_k: int) -> bool:
        mine = (self.head_dim, self.head_dim_v, self.is_causal)
        return mine == (head_dim, head_dim_v, is_causal) and (self.max_seqlen is None or seqlen_k <= self.max_seqlen)

    def plan(self, dtype: str) -> ForwardPlan:
        tile = ForwardTile(
            self.head_dim,
            self.head_dim_v,
            self.tile_m,
            self.tile_n,
            self.num_consumer_warpgroups,
            self.num_q_stages,
            self.num_kv_stages,
            self.has_o_staging,
        )
        return ForwardPlan(dtype, tile, self.is_causal, self.has_turns)


# Rows of one pair of head dims and mask: shorter sequences first. Where plans are within 2% of each other, which is what two
# runs differ by, that one stays which serves other lengths too, unless another one was ahead in every run.
FORWARD_WINNERS = (
    #             dim,   v, causal, seqlen, wgs, keys, q, kv, staged, turns, measured
    ForwardWinner( 64,  64,   True,   2048,   2,  128, 2,  3,   True,  True, "20261130T145818Z-tune"),
    ForwardWinner( 64,  64,   True,   None,   3,  128, 2,  2,   True,  True, "20261130T145818Z-tune"),
    ForwardWinner( 64,  64,  False,   8192,   3,  128, 2,  2,   True,  True, "20261130T145818Z-tune"),
    ForwardWinner( 64,  64,  False,   None,   3,   96, 2,  3,   True,  True, "20261130T145818Z-tune"),
    ForwardWinner(128, 128,   True,   None,   2,  128, 2,  2,   True,  True, "20261130T145909Z-tune"),
    ForwardWinner(128, 128,  False,   None,   2,  128, 2,  2,   True,  True, "20261130T145909Z-tune"),
    ForwardWinner(256, 256,   True,   None,   2,   64, 1,  2,  False, False, "20261130T150002Z-tune"),
    ForwardWinner(256, 256,  False,   None,   2,   64, 1,  2,  False, False, "20261130T150002Z-tune"),
)
