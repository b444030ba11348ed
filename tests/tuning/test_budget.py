"""Shared memory and registers of tiles, against sizes of kernels that were compiled for sm_90a and run."""

import pytest

from cute_fa.tuning.budget import REGISTER_SPLITS, BackwardTile, ForwardTile, RegisterSplit

KB = 1024

# tile, KiB of Q, K, V and O alone, registers of S + P + O
FORWARD = {
    "d64-192x128": (ForwardTile(64, 64, 192, 128, 3, num_q_stages=2), 136, 32 + 64 + 32),
    "d128-128x128": (ForwardTile(128, 128, 128, 128, 2, num_q_stages=2), 224, 64 + 64 + 32),
    "d128-128x176": (ForwardTile(128, 128, 128, 176, 2, has_o_staging=False), 208, 64 + 88 + 44),
    "d256-128x80": (ForwardTile(256, 256, 128, 80, 2, has_o_staging=False), 224, 128 + 40 + 20),
    "d256-128x64": (ForwardTile(256, 256, 128, 64, 2, has_o_staging=False), 192, 128 + 32 + 16),
}

# tile, dynamic shared memory of the compiled kernel in bytes, registers of dK + dV + the larger half of a step
BACKWARD = {
    "d64-128x128": (BackwardTile(64, 64, 128, 128), 199_680, 32 + 32 + 2 * 64),
    "d128-64x128": (BackwardTile(128, 128, 64, 128), 198_656, 64 + 64 + 2 * 32),
    "d128-80x128": (BackwardTile(128, 128, 80, 128), 231_424, 64 + 64 + 2 * 40),
    "d256-64x64": (
        BackwardTile(256, 256, 64, 64, has_p_in_smem=True, has_dq_staging=False),
        231_424,
        64 + 64 + 64,
    ),
    "d192-64x64": (BackwardTile(192, 192, 64, 64, has_p_in_smem=True), 231_424, 48 + 48 + 48),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_smem_is_the_buffers_and_one_kilobyte_of_barriers(name):
    tile, buffers_kb, _ = FORWARD[name]
    assert tile.smem_bytes == (buffers_kb + 1) * KB, f"{tile.smem_bytes} bytes"


@pytest.mark.parametrize(("name", "smem_bytes"), [("d64-192x128", 140_288), ("d128-128x128", 230_400)])
def test_forward_smem_is_that_of_compiled_kernels(name, smem_bytes):
    assert FORWARD[name][0].smem_bytes == smem_bytes, "dynamic shared memory of the launch"


@pytest.mark.parametrize("name", FORWARD)
def test_forward_registers(name):
    tile, _, registers = FORWARD[name]
    assert tile.registers_per_thread == registers, "S, P in 16 bits and O over the consumer threads"
    assert tile.fits, "compiled for sm_90a it has no spills"


def test_forward_with_unequal_head_dims():
    tile = ForwardTile(192, 128, 128, 128, 2, has_o_staging=False)
    assert tile.smem_bytes == (48 + 2 * 48 + 2 * 32 + 1) * KB, "Q and K rows have 192 elements, V rows 128"
    assert tile.registers_per_thread == 64 + 32 + 64, "O has head_dim_v columns"


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_smem_is_that_of_compiled_kernels(name):
    tile, smem_bytes, _ = BACKWARD[name]
    assert tile.smem_bytes == smem_bytes, "dynamic shared memory of the launch"


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_registers(name):
    tile, _, registers = BACKWARD[name]
    assert tile.registers_per_thread == registers, "dK, dV and S, dP or dQ, P, dS over the consumer threads"
    assert tile.fits, "compiled for sm_90a it has no spills"


@pytest.mark.parametrize(
    "name, k, v, q, do, ds, p, dq, others",
    [
        ("d64-128x128", 16, 16, 16, 16, 32, 0, 32, 3),
        ("d128-64x128", 32, 32, 16, 16, 16, 0, 32, 2),
        ("d256-64x64", 32, 32, 32, 32, 8, 8, 0, 2),
        ("d192-64x64", 24, 24, 24, 24, 8, 8, 48, 2),
    ],
    ids=["d64-128x128", "d128-64x128", "d256-64x64", "d192-64x64"],
)
def test_backward_smem_buffer_by_buffer(name, k, v, q, do, ds, p, dq, others):
    """KiB of each. others: 2 x 2 stages of lse and delta, 4 bytes a query, 28 barriers of 8 bytes, and two tiles, rounded up."""
    assert BACKWARD[name][0].smem_bytes == (k + v + 2 * (q + do + ds + p) + dq + others) * KB, "two stages of four"


# tile, whether dQ^T is computed, whether lse or delta has no room (more than 240 - 32 registers with it)
SHAPES = {
    "d64-128x128": (BackwardTile(64, 64, 128, 128), False, True),  # 192 + 32
    "d64-64x128": (BackwardTile(64, 64, 64, 128), False, False),  # 128 + 16
    "d96-64x128": (BackwardTile(96, 96, 64, 128), False, False),  # 160 + 16
    "d128-64x128": (BackwardTile(128, 128, 64, 128), True, False),  # 192 + 16, which is all there is
    "d128-80x128": (BackwardTile(128, 128, 80, 128), True, True),  # 208 + 20
    "d192-64-64x128": (BackwardTile(192, 64, 64, 128), False, True),  # 208 + 16
    "d128-64x64-shared": (BackwardTile(128, 128, 64, 64, has_p_in_smem=True), False, False),  # 96 + 16
    "d256-64x64-shared": (BackwardTile(256, 256, 64, 64, has_p_in_smem=True), False, False),  # 192 + 16
}


@pytest.mark.parametrize("tile, is_transposed, is_tight", SHAPES.values(), ids=SHAPES)
def test_what_a_backward_tile_asks_of_its_kernel(tile, is_transposed, is_tight):
    assert tile.dq.is_transposed == is_transposed, "at head_dim 128, unless P is in shared memory"
    assert tile.has_tight_registers == is_tight, f"{tile.registers_per_thread} registers of matrices"


def test_backward_with_unequal_head_dims():
    tile = BackwardTile(192, 128, 64, 64)
    k, v, q, do, ds, dq = 24, 16, 2 * 24, 2 * 16, 2 * 8, 48
    assert tile.smem_bytes == (k + v + q + do + ds + dq + 2) * KB, "2 x 2 x 64 lse and delta, 28 barriers, two tiles: 1312 bytes"


def test_backward_operands_count_where_they_outweigh_the_scores():
    tile = BackwardTile(256, 128, 64, 64)
    assert tile.registers_per_thread == 64 + 32 + (64 + 8 + 8), "dK + dV, then dQ, P and dS"


@pytest.mark.parametrize(
    "tile",
    [
        ForwardTile(128, 128, 128, 128, 2, num_q_stages=2, num_kv_stages=3),
        ForwardTile(256, 256, 128, 96, 2, has_o_staging=False),
        ForwardTile(64, 64, 192, 144, 3),
        ForwardTile(128, 128, 192, 128, 3, num_kv_stages=1, has_o_staging=False),
        BackwardTile(128, 128, 96, 128),
        BackwardTile(192, 128, 64, 128, has_dq_staging=False),
    ],
    ids=["smem-forward", "smem-d256", "spills-d64", "spills-d128", "smem-backward", "registers-backward"],
)
def test_tiles_that_do_not_fit(tile):
    assert not tile.fits, f"{tile.smem_bytes} bytes, {tile.registers_per_thread} registers"


@pytest.mark.parametrize(
    ("num_consumer_warpgroups", "registers"), [(2, (168, 24, 240)), (3, (128, 32, 160))], ids=["two", "three"]
)
def test_register_splits(num_consumer_warpgroups, registers):
    split = REGISTER_SPLITS[num_consumer_warpgroups]
    assert (split.launch, split.producer, split.consumer) == registers, "launch, producer, consumer"
    assert split.fits, "the SM's registers hold the CTA"
    assert all(number % 8 == 0 and 24 <= number <= 256 for number in registers), "what setmaxnreg takes"
    threads = 128 * (1 + num_consumer_warpgroups)
    assert split.launch * threads <= 65536 < (split.launch + 8) * threads, "the launch takes all it can"


@pytest.mark.parametrize(
    "split",
    [RegisterSplit(2, 168, 32, 240), RegisterSplit(2, 176, 24, 240), RegisterSplit(3, 128, 24, 168)],
    ids=["more-than-launched", "more-than-the-sm", "three-greedy-consumers"],
)
def test_splits_that_do_not_fit(split):
    assert not split.fits, f"{split}"
