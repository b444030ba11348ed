"""Trainer: the steps of one run, its validation loss, a sample, and the state from which it goes on exactly."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from cute_fa.core.errors import expected
from cute_fa.examples.train_gpt.data import Corpus
from cute_fa.examples.train_gpt.model import GPT
from cute_fa.examples.train_gpt.train_config import TrainConfig

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
NUM_VALIDATION_WINDOWS = 128


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear up to the peak, then falling with the inverse square root of the step, whatever the number of steps."""
    position = (step + 1) / config.warmup
    return config.learning_rate * min(position, 1 / math.sqrt(position))


@dataclass(frozen=True)
class StepResult:
    """loss: nats a byte on the batch of `step`, before its update."""

    step: int
    loss: float
    tokens_per_s: float


class Trainer:
    """Model, optimizer and text of one run. `step` counts the updates done.

    On the CPU everything is fp32; on a GPU parameters are fp32 and autocast runs the matmuls and attention in bf16.
    Only training steps are compiled, if any: they have one shape. `model` is the plain module either way.
    """

    def __init__(self, config: TrainConfig):
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(expected("device", "cpu where torch finds no GPU", config.device, "Use cpu"))
        self.config = config
        self.corpus = Corpus(config.text, config.seqlen)
        self.model = GPT(config).to(config.device)
        self._trained_model = torch.compile(self.model) if config.is_compiled else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
        )
        self.step = 0
        self._stopped = False

    @classmethod
    def from_state(cls, state: dict, **changes) -> "Trainer":
        """The trainer that `state()` describes. changes: new values of config fields, steps, device and is_compiled above all."""
        trainer = cls(TrainConfig(**state["config"] | changes))
        if trainer.corpus.digest != state["text_digest"]:
            advice = "Bring back the text that the run began with"
            raise ValueError(expected("text", "the text of the run", f"another one in {trainer.corpus.name}", advice))
        if trainer.config.steps <= state["step"]:
            rule = f"more than the {state['step']} steps done"
            raise ValueError(expected("steps", rule, trainer.config.steps, "Ask for a larger total"))
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.step = state["step"]
        return trainer

    def state(self) -> dict:
        """All that decides the coming steps, in types that torch.load reads with weights_only."""
        return {
            "config": asdict(self.config),
            "step": self.step,
            "text_digest": self.corpus.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def run(self) -> Iterator[StepResult]:
        """Trains from `step` up to `config.steps`, or until `stop()`; yields after each step."""
        self._stopped = False
        while self.step < self.config.steps and not self._stopped:
            yield self._train_step()

    def stop(self):
        """Lets `run()` end after the step in hand; signal handlers may call it."""
        self._stopped = True

    def _train_step(self) -> StepResult:
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        loss = self._loss(self._trained_model, self.corpus.batch(self.config.seed, self.step, self.config.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.item()  # waits for the device, so that the time is that of the whole step
        num_tokens = self.config.batch * self.config.seqlen
        result = StepResult(self.step, loss, num_tokens / (time.perf_counter() - begin))
        self.step += 1
        return result

    def _loss(self, model, windows: torch.Tensor) -> torch.Tensor:
        """Mean nats a byte over windows (n, seqlen + 1)."""
        windows = windows.to(self.config.device)
        logits = self._logits(model, windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def _logits(self, model, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.config.device, torch.bfloat16, enabled=self.config.device == "cuda"):
            return model(tokens)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean nats a byte on the held-out tail, over at most 128 sequences spread through it."""
        windows = self.corpus.held_out_windows(NUM_VALIDATION_WINDOWS)
        batches = windows.split(self.config.batch)
        return sum(self._loss(self.model, batch).item() * len(batch) for batch in batches) / len(windows)

    @torch.no_grad()
    def sample(self, num_bytes: int, temperature: float = 0.8) -> bytes:
        """Bytes that the model writes after a line's end; the same for the same weights and seed."""
        generator = torch.Generator().manual_seed(self.config.seed)
        text = list(b"\n")
        for _ in range(num_bytes):
            context = torch.tensor([text[-self.config.seqlen :]], device=self.config.device)
            logits = self._logits(self.model, context)[0, -1].float().cpu()
            probabilities = torch.softmax(logits / temperature, dim=-1)
            text.append(torch.multinomial(probabilities, 1, generator=generator).item())
        return bytes(text[1:])
