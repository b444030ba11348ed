"""How an operator of this package is defined: schema from a NamedTuple, and implementations or what it is made of."""

from functools import wraps
from typing import Optional, get_type_hints

import torch

from cute_fa.host.cache import PACKAGE, source_digest

_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    Optional[torch.Tensor]: "Tensor?",
    int: "SymInt",
    Optional[int]: "SymInt?",
    float: "float",
    bool: "bool",
}


def schema_of(tensors, arguments: type, returns: int, keywords: tuple[str, ...] = ()) -> str:
    """The schema of an operator that takes `tensors` (names; "x?" is optional, "x!" is written to), then the fields of the
    NamedTuple class `arguments`, then `keywords`, written as in a schema, and returns that many tensors."""
    parts = []
    for index, name in enumerate(tensors):
        kind = "Tensor?" if name.endswith("?") else f"Tensor({chr(97 + index)}!)" if name.endswith("!") else "Tensor"
        parts.append(f"{kind} {name.rstrip('?!')}")
    hints = get_type_hints(arguments)
    parts += [f"{_SCHEMA_TYPES[hints[name]]} {name}" for name in arguments._fields]
    parts += ["*", *keywords] if keywords else []
    return f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * returns)})"


# torch.compile's caches know an operator by name and arguments. A composite is called with this as an argument, so that no
# graph is found that holds what an earlier version of it was made of.
REVISION = int(source_digest(PACKAGE, ("ops",))[:12], 16)

# Keeps registrations alive.
_library = torch.library.Library("cute_fa", "FRAGMENT")


def define(name, tensors, arguments, returns, cpu, fake, cuda=None) -> None:
    """Registers `cute_fa::name`, which has no derivative: schema, implementations on CPU and CUDA tensors, fake."""
    qualified = f"cute_fa::{name}"
    torch.library.define(qualified, schema_of(tensors, arguments, returns))
    torch.library.impl(qualified, "cpu", _without_autocast(cpu))
    if cuda is not None:
        torch.library.impl(qualified, "cuda", cuda)
    torch.library.register_fake(qualified, fake)


def define_composite(name, tensors, arguments, returns, function) -> None:
    """Registers `cute_fa::name`, made of other operators: with their derivatives and fakes, and in compiled graphs they
    stand in its place. It also takes `revision`, for REVISION, which changes nothing."""

    def without_revision(*given, revision=0):
        return function(*given)

    _library.define(f"{name}{schema_of(tensors, arguments, returns, ('int revision=0',))}")
    _library.impl(name, without_revision, "CompositeImplicitAutograd")


def _without_autocast(function):
    """`function` computing as it is written: autocast has done its work on the arguments. One context a call, for threads."""

    @wraps(function)
    def wrapped(*arguments):
        with torch.autocast("cpu", enabled=False):
            return function(*arguments)

    return wrapped


def autocast(*tensors):
    """The tensors as torch.autocast wants them: fp32 is cast where autocast is on for their device, all else stays."""
    device_type = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors)
