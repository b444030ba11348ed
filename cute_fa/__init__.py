"""Exact attention for NVIDIA Hopper: the public names, resolved on first use.

Importing this package imports nothing else: no torch, no DSL, no driver. The first access to a public name
imports `cute_fa.api`, and with it torch; the DSL is imported by the first call that needs a kernel.
"""

from importlib import import_module

__version__ = "0.1.0"

# The file that each public name comes from.
HOMES = {
    "flash_attn_func": "cute_fa.api",
    "flash_attn_qkvpacked_func": "cute_fa.api",
    "flash_attn_kvpacked_func": "cute_fa.api",
    "flash_attn_varlen_func": "cute_fa.api",
    "flash_attn_varlen_qkvpacked_func": "cute_fa.api",
    "flash_attn_varlen_kvpacked_func": "cute_fa.api",
    "flash_attn_with_kvcache": "cute_fa.api",
    "NotSupportedError": "cute_fa.core.errors",
    "DeviceError": "cute_fa.core.errors",
}

__all__ = ["__version__", *HOMES]


def __getattr__(name: str):
    if name not in HOMES:
        raise AttributeError(f"module 'cute_fa' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *HOMES])
