"""The dropout mask: Philox 4x32-10 counted by batch, head, row and column, so that any schedule can reproduce it.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

One Philox call gives four 32-bit words, cut into eight 16-bit words (low half first), one for each of eight entries of
the score matrix. Entries share a call when their row and column agree but for row bit 3, column bit 3 and column bit 0:
the two rows and the two neighbouring columns, twice, that one thread owns in a WGMMA accumulator. So a forward kernel
wastes no word, and a kernel on the transposed scores trades words only between lane l and lane l ^ 4.

    key      seed, low word then high word
    counter  (row group, column group, batch * num_heads + head, offset), each modulo 2^32
             row group    = row    without bit 3
             column group = column without bits 3 and 0
    word     4 * (row bit 3) + 2 * (column bit 3) + (column bit 0)

An entry is dropped when its word is below the threshold, p in units of 2^-16; what is kept is divided by the
probability of keeping in these units, so that the expectation is exact for every p.
"""

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox_4x32(counter, key, rounds: int = 10):
    """Philox 4x32 of four counter words under two key words.

    counter: four int64 tensors (or ints) of words in [0, 2^32) that broadcast; key: two ints. Returns four int64 tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # Products of two 32-bit words wrap in int64, but their bits are right, and the mask removes the sign's copies.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def drop_threshold(dropout_p: float) -> int:
    """The number of 16-bit words, of 65536, that drop an entry: at least 1 for p > 0, at most 65535."""
    return min(max(round(dropout_p * 65536), 1), 65535) if dropout_p > 0 else 0


def keep_scale(dropout_p: float) -> float:
    """The factor on kept entries: one over the probability of keeping."""
    return 65536 / (65536 - drop_threshold(dropout_p))


def keep_mask(rng_state, dropout_p, batch_indices, num_heads, seqlen_q, seqlen_k):
    """True where an entry is kept: bool (batch, num_heads, seqlen_q, seqlen_k).

    rng_state: int64 (2,), seed and offset. batch_indices: int64 (batch,), the sequences' places in the whole batch.
    """
    seed, offset = rng_state.tolist()
    row, column = torch.arange(seqlen_q), torch.arange(seqlen_k)
    row_group = (row >> 4 << 3) | (row & 7)
    column_group = (column >> 4 << 2) | (column >> 1 & 3)
    stream = (batch_indices[:, None] * num_heads + torch.arange(num_heads))[..., None, None] & _WORD
    counter = (
        torch.arange(int(row_group.max()) + 1 if seqlen_q else 0)[:, None],
        torch.arange(int(column_group.max()) + 1 if seqlen_k else 0),
        stream,
        offset & _WORD,
    )
    words = torch.stack(torch.broadcast_tensors(*philox_4x32(counter, (seed & _WORD, seed >> 32 & _WORD))), dim=-1)
    words = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-2)
    word = (row >> 3 & 1)[:, None] * 4 + (column >> 3 & 1) * 2 + (column & 1)
    return words[:, :, row_group[:, None], column_group, word] >= drop_threshold(dropout_p)
