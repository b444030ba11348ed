"""Named shapes, options and memory layouts that gradcheck and the tests run attention on."""

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int

    def tensors(self, dtype, device, generator):
        """q, k, v, normal random, rounded to dtype."""
        sizes = (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
        )
        return tuple(torch.randn(size, generator=generator).to(device, dtype) for size in sizes)


SHAPES = (
    Shape("one-token", 1, 1, 1, 1, 1, 64, 64),
    Shape("one-query", 2, 1, 129, 4, 4, 64, 64),
    Shape("one-key", 1, 65, 1, 2, 2, 64, 64),
    Shape("tile-d64", 1, 128, 128, 2, 2, 64, 64),
    Shape("below-tile", 1, 127, 127, 2, 2, 64, 64),
    Shape("above-tile", 1, 129, 129, 2, 2, 128, 128),
    Shape("more-keys", 1, 65, 203, 2, 2, 128, 128),
    Shape("more-queries", 1, 203, 65, 2, 2, 64, 64),
    Shape("gqa", 2, 64, 97, 6, 2, 64, 64),
    Shape("mqa", 2, 33, 64, 7, 1, 128, 128),
    Shape("d8", 2, 40, 56, 2, 2, 8, 8),
    Shape("d256", 1, 64, 80, 2, 1, 256, 256),
    Shape("d192-128", 1, 72, 72, 4, 2, 192, 128),
    Shape("d40-72", 1, 48, 50, 4, 4, 40, 72),
)


def options(shape: Shape, device="cpu"):
    """Every option of the scores as keyword arguments of `flash_attn_func`, by name. Tensors are float32, on `device`."""
    heads, longest = shape.heads_q, max(shape.seqlen_q, shape.seqlen_k)
    slopes = 2.0 ** -torch.arange(1, heads + 1, device=device)
    batch_slopes = slopes * torch.linspace(0.5, 2, shape.batch, device=device)[:, None]
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window_size": (longest // 3, longest // 5)},
        "window-left": {"window_size": (longest // 4, -1)},
        "window-right": {"window_size": (None, longest // 4)},
        "window-causal": {"window_size": (longest // 4, 5), "causal": True},
        "chunk": {"attention_chunk": longest // 3 + 1},
        "scale": {"softmax_scale": -0.3},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": slopes},
        "alibi-batch": {"alibi_slopes": batch_slopes},
        "sink": {"learnable_sink": torch.linspace(-1, 3, heads, device=device)},
        "dropout": {"dropout_p": 0.25},
        "lse": {"return_lse": True},
    }


@dataclass(frozen=True)
class Packing:
    """How a shape's sequences lie in packed tensors, (batch * seqlen, heads, head_dim), cut to different lengths.

    arguments: of `flash_attn_varlen_func`. places: begins and lengths, as `plain.plain_varlen` takes them. page_size: 0
    where keys and values are not paged; pages lie in reverse order.
    """

    arguments: dict
    places: dict
    seqlen_k: int
    page_size: int = 0

    def paged(self, x):
        """Packed keys or values, differentiably cut into pages where this packing has pages."""
        if not self.page_size:
            return x
        sequences = x.unflatten(0, (-1, self.seqlen_k))
        padding = -self.seqlen_k % self.page_size
        padded = torch.nn.functional.pad(sequences, (0, 0, 0, 0, 0, padding))
        return padded.flatten(0, 1).unflatten(0, (-1, self.page_size)).flip(0)


def packings(shape: Shape, device="cpu") -> dict[str, Packing]:
    """Packed forms of a shape by name: varlen (sequences back to back, unused rows behind them), seqused, block_table."""

    def lengths(seqlen):
        return [seqlen - b * (seqlen // 2 + 1) for b in range(shape.batch)]

    def index(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    def packing(begins_q, begins_k, cu_seqlens, page_size=0, **arguments):
        arguments |= cu_seqlens | {"max_seqlen_q": shape.seqlen_q, "max_seqlen_k": shape.seqlen_k}
        places = dict(lengths_q=lengths_q, lengths_k=lengths_k, begins_q=begins_q[:-1], begins_k=begins_k[:-1])
        return Packing(arguments, places, shape.seqlen_k, page_size)

    lengths_q, lengths_k = lengths(shape.seqlen_q), lengths(shape.seqlen_k)
    tight_q, tight_k = ([0, *accumulate(x)] for x in (lengths_q, lengths_k))
    loose_q, loose_k = ([b * x for b in range(shape.batch + 1)] for x in (shape.seqlen_q, shape.seqlen_k))
    tight = {"cu_seqlens_q": index(tight_q), "cu_seqlens_k": index(tight_k)}
    loose = {"cu_seqlens_q": index(loose_q), "cu_seqlens_k": index(loose_k)}
    pages = -(-shape.seqlen_k // 16)
    table = torch.arange(shape.batch * pages, device=device).flip(0).view(shape.batch, pages).int()
    return {
        "varlen": packing(tight_q, tight_k, tight),
        "seqused": packing(loose_q, loose_k, loose, seqused_q=index(lengths_q), seqused_k=index(lengths_k)),
        "block_table": packing(tight_q, loose_k, tight, page_size=16, block_table=table),
    }


def _sliced(x):
    """Every second row and head of a larger tensor."""
    batch, seqlen, heads, head_dim = x.shape
    larger = torch.full((batch, 2 * seqlen, 2 * heads, head_dim), torch.nan, dtype=x.dtype, device=x.device)
    larger[:, ::2, ::2] = x
    return larger[:, ::2, ::2]


def _padded(x, by: int):
    """Rows `by` elements longer than head_dim."""
    return torch.nn.functional.pad(x, (0, by), value=torch.nan)[..., : x.shape[-1]]


# Name -> the numbers of a (batch, seqlen, heads, head_dim) tensor in another place, with NaN in between where there is room.
LAYOUTS = {
    "heads-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch-inside": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "sliced": _sliced,
    "8-columns-apart": lambda x: _padded(x, 8),
    "3-columns-apart": lambda x: _padded(x, 3),
    "dim-outside": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "misaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}
