"""The GPT: causal, positions relative, sizes and FLOPs as counted by hand, both attentions alike."""

import pytest
import torch

from cute_fa.examples.train_gpt.model import GPT, Rotary
from cute_fa.examples.train_gpt.train_config import preset

SIZES = {"width": 32, "layers": 2, "heads": 2, "seqlen": 12}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 256


@pytest.fixture(params=["cute_fa", "sdpa"])
def model(request):
    return GPT(preset("cpu", **SIZES, attention=request.param))


@torch.no_grad()
def test_a_byte_does_not_see_later_ones(model):
    changed = TOKENS.clone()
    changed[:, 7] += 1
    before, after = model(TOKENS), model(changed)
    assert before.shape == (2, 12, 256), "logits for each position and byte"
    assert before[:, :7].equal(after[:, :7]), "positions before the change stay"
    assert ((before - after)[:, 7:].abs().amax(-1) > 1e-6).all(), "the changed one and all later ones see it"


@torch.no_grad()
def test_both_attentions_give_the_same_logits():
    ours, torchs = (GPT(preset("cpu", **SIZES, attention=name))(TOKENS) for name in ("cute_fa", "sdpa"))
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


def test_weights_follow_from_the_seed():
    first, same, other = (GPT(preset("cpu", **SIZES, seed=seed)) for seed in (3, 3, 4))
    assert all(a.equal(b) for a, b in zip(first.parameters(), same.parameters())), "same seed, same weights"
    assert not first.head.weight.equal(other.head.weight), "another seed, other weights"


def test_sizes_counted_by_hand():
    model = GPT(preset("cpu", **SIZES))
    # A block has 12 width^2 weights in its four matrices and two norms; embedding and head have 256 rows each.
    assert model.num_parameters == 2 * (12 * 32 * 32 + 2 * 32) + 2 * 256 * 32 + 32, "weights of blocks, ends and norms"
    in_matmuls = 2 * (12 * 32 * 32 + 2 * 32) + 256 * 32 + 32
    assert model.flops_per_token == 6 * in_matmuls + 12 * 2 * 32 * 12 / 2, "6 for each weight, and causal attention"


def test_gpu_preset_has_the_size_of_gpt_2():
    config = preset("cuda")
    assert 12 * config.layers * config.width**2 == pytest.approx(126e6, rel=0.01), "the small one: 124M"
    assert config.width / config.heads == 128, "head_dim"


def test_rotary_makes_products_depend_on_the_distance():
    rotary, generator = Rotary(seqlen=9, head_dim=8), torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 9, 1, 8) for _ in range(2))
    products = (rotary(q)[0, :, 0] @ rotary(k)[0, :, 0].T).double()  # (9 query, 9 key positions)
    for distance in range(-8, 9):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert products[0].std() > 0.1, "and they do depend on it"
    torch.testing.assert_close(products[4, 4].float(), q[0, 0, 0] @ k[0, 0, 0])  # no turn at distance 0
