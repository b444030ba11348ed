"""MaskSpec: which keys a query sees. The one definition that reference, geometry and kernels share.

Query i of seqlen_q stands at position i + seqlen_k - seqlen_q among the keys: the last query is aligned with the last
key ("bottom right"), for causal masks, windows and chunks alike. The keys that a query sees are always one interval,
whose two ends never move left as i grows; block geometry (`cute_fa/device/band.py`) rests on that.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MaskSpec:
    """A band of visible keys around each query's position, optionally cut at the borders of chunks.

    left, right: how many keys before and after the position are visible, the position itself included in both;
        None means no bound on that side. Causal is right = 0.
    chunk: 0, or the length of the chunks into which positions are cut; a query sees only keys of its own chunk.
    """

    left: int | None = None
    right: int | None = None
    chunk: int = 0

    def __post_init__(self):
        for name, bound in (("left", self.left), ("right", self.right), ("chunk", self.chunk)):
            assert bound is None or bound >= 0, f"{name} is negative: {bound}"

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None and not self.chunk

    @property
    def is_causal(self) -> bool:
        return self == MaskSpec(right=0)

    @property
    def name(self) -> str:
        """A word for tables and test ids: full, causal, window(l,r), each with +chunk(n) where it applies."""
        if self.left is None and self.right in (None, 0):
            band = "full" if self.right is None else "causal"
        else:
            sides = ("-" if side is None else str(side) for side in (self.left, self.right))
            band = f"window({','.join(sides)})"
        return f"{band}+chunk({self.chunk})" if self.chunk else band

    def visible(self, query, key, seqlen_q, seqlen_k):
        """Whether `query` sees `key`, for indices inside the sequences.

        Plain arithmetic, so it takes ints as well as index tensors that broadcast, and returns what `&` makes of them.
        """
        position = query + seqlen_k - seqlen_q
        seen = key >= 0
        if self.left is not None:
            seen = seen & (key >= position - self.left)
        if self.right is not None:
            seen = seen & (key <= position + self.right)
        if self.chunk:
            seen = seen & (key // self.chunk == position // self.chunk)
        return seen

    def keys_of(self, query: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The visible keys of one query as a half-open interval; empty intervals have begin = end."""
        position = query + seqlen_k - seqlen_q
        begin, end = 0, seqlen_k
        if self.left is not None:
            begin = max(begin, position - self.left)
        if self.right is not None:
            end = min(end, position + self.right + 1)
        if self.chunk:
            first = position // self.chunk * self.chunk
            begin, end = max(begin, first), min(end, first + self.chunk)
        return begin, max(begin, end)

    def num_visible(self, seqlen_q: int, seqlen_k: int) -> int:
        """Exact count of visible (query, key) pairs of one head."""
        if self.is_full:
            return seqlen_q * seqlen_k
        intervals = (self.keys_of(query, seqlen_q, seqlen_k) for query in range(seqlen_q))
        return sum(end - begin for begin, end in intervals)
