"""TrainConfig: everything that decides a run's losses, as plain facts, and a preset for each device. No torch."""

from dataclasses import dataclass, replace

from cute_fa.core.errors import expected

ATTENTIONS = ("cute_fa", "sdpa")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    steps: total number of optimizer steps. Nothing else depends on it, so a run may be extended.
    batch, seqlen: sequences a step, and bytes a sequence.
    learning_rate: the peak, reached after `warmup` steps.
    attention: "cute_fa", or "sdpa" for torch's scaled_dot_product_attention, to compare.
    text: path of the file to train on; empty for Python's standard library.
    is_compiled: whether the training steps run through torch.compile. It changes rounding alone.
    """

    device: str
    steps: int
    batch: int
    seqlen: int
    width: int
    layers: int
    heads: int
    learning_rate: float
    warmup: int
    attention: str = "cute_fa"
    text: str = ""
    seed: int = 0
    is_compiled: bool = False

    def __post_init__(self):
        for name, choices in (("device", DEVICES), ("attention", ATTENTIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(expected(name, " or ".join(choices), getattr(self, name), "Choose one of these"))
        for name in ("steps", "batch", "seqlen", "width", "layers", "heads", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(expected(name, "a whole number >= 1", getattr(self, name), "Choose a larger one"))
        if self.width % (2 * self.heads):  # rotary positions turn pairs of features
            rule = f"a divisor of half the width, {self.width / 2:g}"
            raise ValueError(expected("heads", rule, self.heads, "Change either"))
        if not 0 <= self.seed < 2**63:
            raise ValueError(expected("seed", "a whole number from 0 to 2**63 - 1", self.seed, "Choose another"))


# The CPU preset suits two cores and fp32; the GPU preset is a model of GPT-2's size (126M parameters) in bf16.
PRESETS = {
    "cpu": TrainConfig(
        device="cpu", steps=200, batch=16, seqlen=128, width=128, layers=4, heads=4, learning_rate=4e-3, warmup=30
    ),
    "cuda": TrainConfig(
        device="cuda", steps=500, batch=32, seqlen=1024, width=1024, layers=10, heads=8, learning_rate=1e-3, warmup=100
    ),
}


def preset(device: str, **changes) -> TrainConfig:
    """The default run on a device, with some of its fields changed."""
    return replace(PRESETS.get(device, PRESETS["cpu"]), device=device, **changes)
