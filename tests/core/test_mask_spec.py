"""MaskSpec against pictures drawn by hand and against the contract read literally, pair by pair."""

import math

import pytest
import torch

from cute_fa.core.mask_spec import MaskSpec

# (left, right, chunk), with None and 0 for no bound, under the name that tables show.
MASKS = {
    "full": (None, None, 0),
    "causal": (None, 0, 0),
    "window(-,2)": (None, 2, 0),
    "window(3,-)": (3, None, 0),
    "window(0,0)": (0, 0, 0),
    "window(2,1)": (2, 1, 0),
    "window(2,0)": (2, 0, 0),
    "window(50,50)": (50, 50, 0),
    "full+chunk(1)": (None, None, 1),
    "full+chunk(3)": (None, None, 3),
    "causal+chunk(4)": (None, 0, 4),
    "window(3,1)+chunk(5)": (3, 1, 5),
}
SEQLENS = [(1, 1), (1, 7), (7, 1), (6, 6), (4, 9), (9, 4), (0, 5), (5, 0)]


def sees(mask, query, key, seqlen_q, seqlen_k) -> bool:
    """The contract: position i + seqlen_k - seqlen_q, both sides inclusive, chunks counted from key 0."""
    left, right, chunk = mask
    position = query + seqlen_k - seqlen_q
    if left is not None and key < position - left:
        return False
    if right is not None and key > position + right:
        return False
    return not chunk or math.floor(key / chunk) == math.floor(position / chunk)


def picture(spec: MaskSpec, seqlen_q: int, seqlen_k: int) -> list[str]:
    """One string a query: # where it sees the key."""
    return [
        "".join("#" if spec.visible(query, key, seqlen_q, seqlen_k) else "." for key in range(seqlen_k))
        for query in range(seqlen_q)
    ]


@pytest.mark.parametrize(
    "spec, seqlen_q, seqlen_k, drawn",
    [
        pytest.param(MaskSpec(right=0), 3, 5, ["###..", "####.", "#####"], id="causal-more-keys"),
        pytest.param(MaskSpec(right=0), 5, 3, ["...", "...", "#..", "##.", "###"], id="causal-more-queries"),
        pytest.param(MaskSpec(1, 1), 4, 4, ["##..", "###.", ".###", "..##"], id="window-both-sides"),
        pytest.param(MaskSpec(left=1), 3, 5, [".####", "..###", "...##"], id="left-only"),
        pytest.param(MaskSpec(right=1), 3, 4, ["###.", "####", "####"], id="right-only"),
        pytest.param(MaskSpec(0, 0), 2, 4, ["..#.", "...#"], id="diagonal"),
        pytest.param(MaskSpec(chunk=2), 3, 5, ["..##.", "..##.", "....#"], id="chunk"),
        pytest.param(MaskSpec(right=0, chunk=3), 4, 4, ["#...", "##..", "###.", "...#"], id="causal-chunk"),
    ],
)
def test_pictures(spec, seqlen_q, seqlen_k, drawn):
    assert picture(spec, seqlen_q, seqlen_k) == drawn, f"{spec} of {seqlen_q} queries and {seqlen_k} keys"


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", SEQLENS, ids=[f"{q}-queries-{k}-keys" for q, k in SEQLENS])
def test_visible_keys_and_counts(name, seqlen_q, seqlen_k):
    mask = MASKS[name]
    spec, num_visible = MaskSpec(*mask), 0
    for query in range(seqlen_q):
        wanted = [key for key in range(seqlen_k) if sees(mask, query, key, seqlen_q, seqlen_k)]
        found = [key for key in range(seqlen_k) if spec.visible(query, key, seqlen_q, seqlen_k)]
        begin, end = spec.keys_of(query, seqlen_q, seqlen_k)
        assert found == wanted, f"visible keys of query {query}"
        assert begin <= end, f"interval of query {query} runs backwards"
        assert list(range(begin, end)) == wanted, f"interval of query {query}"
        num_visible += len(wanted)
    assert spec.num_visible(seqlen_q, seqlen_k) == num_visible, "count of visible pairs"


@pytest.mark.parametrize("name", MASKS)
def test_tensors_give_what_ints_give(name):
    spec = MaskSpec(*MASKS[name])
    query, key = torch.arange(5)[:, None], torch.arange(8)
    seen = spec.visible(query, key, 5, 8).expand(5, 8)
    wanted = [[sees(MASKS[name], q, k, 5, 8) for k in range(8)] for q in range(5)]
    assert seen.dtype == torch.bool, "a mask is bool"
    assert seen.tolist() == wanted, f"{name} on index tensors"


@pytest.mark.parametrize("name", MASKS)
def test_interval_ends_never_move_left(name):
    """What the geometry of blocks rests on; intervals without a key count nowhere."""
    spec = MaskSpec(*MASKS[name])
    for seqlen_q, seqlen_k in SEQLENS:
        found = [spec.keys_of(query, seqlen_q, seqlen_k) for query in range(seqlen_q)]
        found = [(begin, end) for begin, end in found if begin < end]
        for side in (0, 1):
            ends = [interval[side] for interval in found]
            assert ends == sorted(ends), f"{'begin' if side == 0 else 'end'} moves left: {found}"


@pytest.mark.parametrize("name", MASKS)
def test_name(name):
    assert MaskSpec(*MASKS[name]).name == name, f"name of {MASKS[name]}"


def test_names_of_single_facts():
    assert MaskSpec().is_full and not MaskSpec().is_causal, "no bound"
    assert MaskSpec(right=0).is_causal and not MaskSpec(right=0).is_full, "right 0 alone is causal"
    for other in (MaskSpec(left=0), MaskSpec(right=1), MaskSpec(5, 0), MaskSpec(right=0, chunk=4), MaskSpec(chunk=4)):
        assert not other.is_full and not other.is_causal, f"{other} is neither full nor causal"


@pytest.mark.parametrize(
    "bounds, message",
    [
        pytest.param({"left": -1}, "left is negative: -1", id="left"),
        pytest.param({"right": -2}, "right is negative: -2", id="right"),
        pytest.param({"chunk": -3}, "chunk is negative: -3", id="chunk"),
    ],
)
def test_negative_bounds_are_a_fault_of_the_caller(bounds, message):
    with pytest.raises(AssertionError, match=f"^{message}$"):
        MaskSpec(**bounds)


def test_masks_are_keys():
    assert len({MaskSpec(1, 2), MaskSpec(1, 2), MaskSpec(2, 1)}) == 2, "equal masks are one key"
