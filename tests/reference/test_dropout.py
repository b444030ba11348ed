"""The dropout mask against published Philox vectors, a scalar reading of its counting, and a fair coin's statistics."""

import itertools
import random

import pytest
import torch

from cute_fa.reference.dropout import drop_threshold, keep_mask, keep_scale, philox_4x32

# counter, key, output of philox4x32-10 from the file kat_vectors of Random123 (Salmon et al. 2011).
KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "digits-of-pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def scalar_philox(counter, key, rounds=10):
    """The paper's definition on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def without_bits(number, bits):
    """`number` with the given bits taken out of its binary digits, highest bit first."""
    digits = list(reversed(f"{number:032b}"))
    for bit in bits:
        del digits[bit]
    return int("".join(reversed(digits)), 2)


def scalar_word(seed, offset, stream, row, column):
    """The 16-bit word of one entry, as the docstring of the module counts it."""
    counter = (without_bits(row, [3]), without_bits(column, [3, 0]), stream % 2**32, offset % 2**32)
    words32 = scalar_philox(counter, (seed % 2**32, (seed >> 32) % 2**32))
    words16 = [half for word in words32 for half in (word % 2**16, word // 2**16)]
    return words16[4 * (row // 8 % 2) + 2 * (column // 8 % 2) + column % 2]


def scalar_keep(seed, offset, threshold, stream, row, column):
    return scalar_word(seed, offset, stream, row, column) >= threshold


def mask_of(seed=5, offset=0, p=0.3, batch=1, heads=1, seqlen_q=64, seqlen_k=64):
    batch_indices = torch.arange(batch) if isinstance(batch, int) else torch.tensor(batch, dtype=torch.int64)
    return keep_mask(torch.tensor([seed, offset]), p, batch_indices, heads, seqlen_q, seqlen_k)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(name):
    counter, key, words = KNOWN_ANSWERS[name]
    assert scalar_philox(counter, key) == words, "the test's own Philox is wrong"
    got = philox_4x32([torch.tensor([word]) for word in counter], key)
    assert tuple(int(word) for word in got) == words, f"{[hex(int(word)) for word in got]}"


@pytest.mark.parametrize("rounds", [1, 7, 10], ids=["one-round", "seven-rounds", "ten-rounds"])
def test_philox_equals_its_scalar_definition(rounds):
    source = random.Random(rounds)
    key = (source.getrandbits(32), source.getrandbits(32))
    counters = [[source.getrandbits(32) for _ in range(4)] for _ in range(200)]
    got = torch.stack(philox_4x32(torch.tensor(counters).unbind(1), key, rounds), dim=1)
    assert got.tolist() == [list(scalar_philox(counter, key, rounds)) for counter in counters], "words differ"


def test_philox_broadcasts_tensors_and_ints():
    rows, columns = torch.arange(3)[:, None], torch.arange(5)
    got = torch.stack(torch.broadcast_tensors(*philox_4x32((rows, columns, 7, 2**32 - 1), (1, 2))), dim=-1)
    for row, column in itertools.product(range(3), range(5)):
        words = scalar_philox((row, column, 7, 2**32 - 1), (1, 2))
        assert tuple(got[row, column].tolist()) == words, f"counter {row}, {column}"


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (1234567, 89), (-1, -1), (-(2**63), 3), (2**63 - 1, 2**63 - 1), (0x1234567800000000, 1 << 31)],
    ids=["zero", "small", "minus-one", "smallest", "largest", "high-word-only"],
)
def test_mask_is_counted_as_the_docstring_says(seed, offset):
    batch, heads, seqlen_q, seqlen_k, threshold = 2, 3, 19, 21, round(0.3 * 65536)
    mask = mask_of(seed, offset, 0.3, batch, heads, seqlen_q, seqlen_k)
    assert mask.shape == (batch, heads, seqlen_q, seqlen_k), f"shape {tuple(mask.shape)}"
    assert mask.dtype == torch.bool, f"dtype {mask.dtype}"
    for entry in itertools.product(*map(range, mask.shape)):
        b, h, row, column = entry
        wanted = scalar_keep(seed, offset, threshold, b * heads + h, row, column)
        assert mask[entry].item() == wanted, f"batch {b}, head {h}, row {row}, column {column}"


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 7), (18, 20)], ids=lambda index: f"{index}")
def test_a_word_at_the_threshold_is_kept(row, column):
    word = scalar_word(5, 0, 0, row, column)
    assert mask_of(p=word / 65536, seqlen_q=19, seqlen_k=21)[0, 0, row, column], "word = threshold"
    assert not mask_of(p=(word + 1) / 65536, seqlen_q=19, seqlen_k=21)[0, 0, row, column], "word = threshold - 1"


SIZES = [(1, 1), (1, 50), (50, 1), (7, 9), (8, 8), (15, 17), (16, 16), (33, 47)]


@pytest.mark.parametrize("seqlens", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_every_size_is_counted_alike(seqlens):
    seqlen_q, seqlen_k = seqlens
    mask = mask_of(-77, 4, 0.5, [3, 0], 2, seqlen_q, seqlen_k)
    for b, h, row, column in itertools.product(*map(range, mask.shape)):
        wanted = scalar_keep(-77, 4, 32768, [3, 0][b] * 2 + h, row, column)
        assert mask[b, h, row, column].item() == wanted, f"batch {b}, head {h}, row {row}, column {column}"


def test_streams_of_batches_and_heads_wrap_at_32_bits():
    mask = mask_of(9, 1, 0.5, [2**31 + 1], 2, 8, 16)
    for h, row, column in itertools.product(range(2), range(8), range(16)):
        wanted = scalar_keep(9, 1, 32768, (2**31 + 1) * 2 + h, row, column)
        assert mask[0, h, row, column].item() == wanted, f"head {h}, row {row}, column {column}"


def test_offsets_count_modulo_32_bits():
    assert torch.equal(mask_of(offset=7), mask_of(offset=7 + 2**32)), "bits above 32 of the offset changed the mask"
    assert torch.equal(mask_of(offset=-1), mask_of(offset=2**32 - 1)), "a negative offset is not its two's complement"


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)], ids=["no-queries", "no-keys", "nothing"])
def test_empty_sequences_have_empty_masks(seqlens):
    assert mask_of(batch=2, heads=3, seqlen_q=seqlens[0], seqlen_k=seqlens[1]).shape == (2, 3, *seqlens), "shape"


def test_no_sequences_have_an_empty_mask():
    assert mask_of(batch=[], heads=3, seqlen_q=4, seqlen_k=5).shape == (0, 3, 4, 5), "shape"


@pytest.mark.parametrize("seqlens", [(1, 1), (13, 40), (40, 13), (39, 39)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_sequence_does_not_know_what_surrounds_it(seqlens):
    seqlen_q, seqlen_k = seqlens
    whole = mask_of(batch=3, heads=2, seqlen_q=40, seqlen_k=40)
    for b in range(3):
        alone = mask_of(batch=[b], heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        assert torch.equal(alone[0], whole[b, :, :seqlen_q, :seqlen_k]), f"sequence {b}"


@pytest.mark.parametrize(
    ("p", "threshold"),
    [
        (0, 0),
        (1e-9, 1),
        (1 / 65536, 1),
        (0.1, 6554),
        (0.5, 32768),
        (1 - 1 / 65536, 65535),
        (1 - 1e-12, 65535),
    ],
    ids=["none", "tiny", "one-step", "tenth", "half", "all-but-one-step", "almost-all"],
)
def test_threshold_and_scale_keep_the_expectation(p, threshold):
    assert drop_threshold(p) == threshold, f"{drop_threshold(p)} words of 65536 drop"
    assert keep_scale(p) * (65536 - threshold) == pytest.approx(65536, rel=1e-15), "scale times rate is not 1"


def test_no_dropout_keeps_everything():
    assert mask_of(p=0.0).all(), "an entry was dropped"


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_rate_of_kept_entries(p):
    mask = mask_of(seed=11, p=p, batch=2, heads=4, seqlen_q=200, seqlen_k=300)
    keep = 1 - round(p * 65536) / 65536
    sigma = (keep * (1 - keep) / mask.numel()) ** 0.5
    assert abs(mask.double().mean().item() - keep) < 5 * sigma, f"rate {mask.double().mean().item()}, not {keep}"


def check_uncorrelated(a, b, what):
    """Correlation of fair masks of n entries has a standard deviation of 1 / sqrt(n)."""
    a, b = (2 * x.double() - 1 for x in (a, b))
    correlation = (a * b).mean().item()
    assert abs(correlation) < 5 / a.numel() ** 0.5, f"{what}: correlation {correlation:.4f} over {a.numel()} entries"


@pytest.mark.parametrize("lag", [1, 2, 4, 7, 8, 9, 16, 32])
def test_rows_and_columns_are_uncorrelated(lag):
    mask = mask_of(seed=21, p=0.5, heads=2, seqlen_q=256, seqlen_k=256)
    check_uncorrelated(mask[..., lag:, :], mask[..., :-lag, :], f"rows {lag} apart")
    check_uncorrelated(mask[..., lag:], mask[..., :-lag], f"columns {lag} apart")
    check_uncorrelated(mask[..., lag:, lag:], mask[..., :-lag, :-lag], f"entries {lag} apart on diagonals")


def test_heads_and_batches_are_uncorrelated():
    mask = mask_of(seed=22, p=0.5, batch=3, heads=3, seqlen_q=128, seqlen_k=128).flatten(0, 1)
    for a, b in itertools.combinations(range(9), 2):
        check_uncorrelated(mask[a], mask[b], f"streams {a} and {b}")


@pytest.mark.parametrize("other", [1, -1, 1 << 32, 1 << 40], ids=["next", "previous", "next-high-word", "high-bit"])
def test_seeds_are_uncorrelated(other):
    check_uncorrelated(*(mask_of(seed=seed, p=0.5, seqlen_q=256, seqlen_k=256) for seed in (23, 23 + other)), "seeds")


@pytest.mark.parametrize("other", [1, -1, 1 << 31], ids=["next", "previous", "high-bit"])
def test_offsets_are_uncorrelated(other):
    masks = (mask_of(offset=offset, p=0.5, seqlen_q=256, seqlen_k=256) for offset in (6, 6 + other))
    check_uncorrelated(*masks, "offsets")


def test_a_mask_is_not_its_transpose():
    mask = mask_of(seed=24, p=0.5, seqlen_q=256, seqlen_k=256)[0, 0]
    above = torch.ones(256, 256, dtype=torch.bool).triu(1)
    check_uncorrelated(mask[above], mask.T[above], "transposed entries")
