"""The support matrix as data: which option runs on which backend. The README prints it, every call is checked against it."""

from dataclasses import dataclass

import torch

from cute_fa.core.errors import DeviceError, NotSupportedError, expected
from cute_fa.core.hardware import COMPUTE_CAPABILITY
from cute_fa.core.problem import AttentionProblem


@dataclass(frozen=True)
class Feature:
    """One row: what a call may ask for, and who does it. The reference backend of CPU tensors does every forward."""

    name: str
    meaning: str
    cpu_backward: bool = True
    hopper_forward: bool = False
    hopper_backward: bool = False


_HOPPER = {"hopper_forward": True, "hopper_backward": True}

FEATURES = (
    Feature("dense", "(batch, seqlen, heads, head_dim) tensors, `flash_attn_func`", **_HOPPER),
    Feature("varlen", "packed sequences, `flash_attn_varlen_func`"),
    Feature("kvcache", "`flash_attn_with_kvcache`: append, rotary, slots, left padding", cpu_backward=False),
    Feature("block_table", "paged keys and values"),
    Feature("gqa", "fewer key-value heads than query heads", **_HOPPER),
    Feature("head_dim_v", "head_dim of v unlike that of q and k", **_HOPPER),
    Feature("causal", "`causal=True`, aligned to the bottom right", **_HOPPER),
    Feature("window", "`window_size`, each side alone or both"),
    Feature("attention_chunk", "`attention_chunk`"),
    Feature("softcap", "`softcap`"),
    Feature("alibi_slopes", "`alibi_slopes`, per head or per batch and head"),
    Feature("dropout", "`dropout_p`, counter-based"),
    Feature("learnable_sink", "`learnable_sink` with gradient"),
    Feature("seqused", "`seqused_q`, `seqused_k`"),
    Feature("lse", "`return_lse`, and its gradient", **_HOPPER),
    Feature("return_attn_probs", "`return_attn_probs`", **_HOPPER),
    Feature("deterministic", "`deterministic=True`, gradients bitwise equal from run to run", **_HOPPER),
)


def require(problem: AttentionProblem, device: torch.device) -> None:
    """Raises DeviceError or NotSupportedError when no backend on `device` computes `problem`; before anything compiles.

    Gradients make no difference: what a backend computes in a call of `flash_attn_func` it also differentiates.
    """
    if device.type in ("cpu", "meta"):
        return
    if device.type != "cuda":
        advice = "Move q, k and v to a Hopper GPU, or to the CPU for the reference backend"
        raise DeviceError(expected("q", "a CPU or CUDA tensor", f"device {device}", advice))
    capability = compute_capability(device)
    if capability not in (None, COMPUTE_CAPABILITY):
        needed, found = (".".join(map(str, pair)) for pair in (COMPUTE_CAPABILITY, capability))
        advice = "Use an H100, H200, H20 or GH200, or CPU tensors for the reference backend"
        raise DeviceError(expected("q", f"a GPU of compute capability {needed}", found, advice))
    missing = [feature.name for feature in FEATURES if feature.name in problem.features and not feature.hopper_forward]
    if missing:
        rule = f"a CPU tensor for a call that uses {', '.join(missing)}"
        advice = "No GPU kernel does that yet; move q, k and v to the CPU, where the reference backend takes every option"
        raise NotSupportedError(expected("q", rule, f"device {device}", advice))


def compute_capability(device: torch.device):
    """(major, minor) of a CUDA device, or None where no driver can tell (fake tensors on a machine without a GPU)."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def markdown_table() -> str:
    """The matrix as the README shows it."""
    lines = ["| feature | what a call uses | CPU forward / backward | Hopper forward / backward |", "| --- | --- | --- | --- |"]
    word = {True: "yes", False: "not yet"}
    for f in FEATURES:
        backward = "yes" if f.cpu_backward else "no"
        hopper = f"{word[f.hopper_forward]} / {word[f.hopper_backward]}"
        lines.append(f"| `{f.name}` | {f.meaning} | yes / {backward} | {hopper} |")
    return "\n".join(lines)
