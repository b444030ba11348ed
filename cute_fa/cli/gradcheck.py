"""`cute-fa gradcheck`: forward and all gradients of a device against the float64 oracle, for every shape and option."""

from enum import Enum
from typing import Annotated, NamedTuple

import typer

from cute_fa.core.errors import NotSupportedError, expected


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Entry(NamedTuple):
    """One tensor of one case, and how it compares; `comparison.share` above 1 is a miss."""

    dtype: str
    option: str
    shape: str
    tensor: str
    comparison: object

    def __str__(self) -> str:
        c = self.comparison
        numbers = f"error {c.error:.2e}, torch {c.torch_error:.2e}, bound {c.bound:.2e}"
        return f"{self.dtype} {self.option} {self.shape} {self.tensor}: {numbers}"


def gradcheck(
    device: Annotated[Device, typer.Option(help="Where flash_attn_func runs.")] = Device.cpu,
    option: Annotated[str, typer.Option(help="Check one option only, such as causal or softcap.")] = "",
    verbose: Annotated[bool, typer.Option(help="Print every tensor of every case.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
) -> None:
    """Compare out, lse and every gradient with an fp64 oracle, in bfloat16 and float16.

    The error of each tensor may be at most twice that of plain torch at the same dtype (three times with softcap), plus
    half a unit of rounding. Prints the tightest tensor of each option; exits with 1 on a miss. Options that the GPU has
    no kernel for are left out and named, unless --option asks for one.
    """
    import torch
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    names = case_names()
    if option and option not in names:
        raise ValueError(expected("option", f"one of {', '.join(names)}", option, "Leave it out to check them all"))
    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError(expected("device", "cpu where torch finds no GPU", device.value, "Use cpu"))
    names = [option] if option else names
    console = Console(highlight=False)
    table = Table("dtype", "option", "tightest", "error", "torch", "bound", "share", box=SIMPLE_HEAD, pad_edge=False)
    misses, lacking, num_tensors = [], {}, 0  # lacking: a dict for its order
    for dtype in (torch.bfloat16, torch.float16):
        for name in names:
            try:
                entries = list(compared(name, dtype, device.value, seed))
            except NotSupportedError:
                if option or device is Device.cpu:
                    raise
                lacking[name] = True
                continue
            num_tensors += len(entries)
            misses += [entry for entry in entries if not entry.comparison.ok]
            if verbose:
                console.print(*map(str, entries), sep="\n")
            tightest = max(entries, key=lambda entry: entry.comparison.share)
            c = tightest.comparison
            numbers = (f"{c.error:.1e}", f"{c.torch_error:.1e}", f"{c.bound:.1e}", f"{c.share:.2f}")
            cells = (tightest.dtype, name, f"{tightest.tensor} {tightest.shape}", *numbers)
            table.add_row(*cells, style=None if c.ok else "red")
    console.print(table)
    for miss in misses:
        console.print(f"MISS {miss}", style="red")
    if lacking:
        console.print(f"not on {device.value} yet: {', '.join(lacking)}", soft_wrap=True)
    num_options = len(names) - len(lacking)
    console.print(f"{num_tensors} tensors on {device.value}, {num_options} options: {len(misses)} beyond their bound")
    if misses:
        raise typer.Exit(1)


def case_names() -> list[str]:
    """Every option of the scores, then every packed form."""
    from cute_fa.testing.inputs import SHAPES, options, packings

    return [*options(SHAPES[0]), *packings(SHAPES[0])]


def compared(name: str, dtype, device: str, seed: int):
    """The entries of one option over all shapes. Packed forms run causal, so that each sequence needs its own alignment."""
    import torch

    from cute_fa import flash_attn_func, flash_attn_varlen_func
    from cute_fa.testing.gradients import check_attention, check_varlen
    from cute_fa.testing.inputs import SHAPES, options, packings

    for shape in SHAPES:
        torch.manual_seed(seed)  # of dropout
        generator = torch.Generator().manual_seed(seed)
        tensors, packing = shape.tensors(dtype, device, generator), packings(shape, device).get(name)
        if packing:
            found = check_varlen(flash_attn_varlen_func, *tensors, packing, {"causal": True}, generator)
        else:
            found = check_attention(flash_attn_func, *tensors, options(shape, device)[name], generator)
        for tensor, comparison in found.items():
            yield Entry("bf16" if dtype == torch.bfloat16 else "fp16", name, shape.name, tensor, comparison)
