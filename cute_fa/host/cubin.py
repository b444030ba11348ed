"""What a compiled kernel is made of: registers, stack, counts of SASS instructions, read from the bytes of its cubin.

A cubin is an ELF file. CUDA's tools read the same facts from it, but they are not on every machine, and Python needs a
millisecond. `host/inspect.py` calls this file; its test compares with ptxas and nvdisasm. The numbers below are not
documented by NVIDIA: they come from such comparisons and hold for sm_90 alone.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

MACHINE_CUDA = 190  # e_machine of the ELF header
SM = 90  # bits 8 to 15 of e_flags

# An instruction has 16 bytes; the low 12 bits of its first word are the opcode, with several for several operand kinds.
INSTRUCTION_BYTES = 16
OPCODES = {
    "HGMMA": (0x9F0, 0xDF0),
    "UTMALDG": (0x5B4, 0x3B4),
    "UTMASTG": (0x3B5,),
    "UTMAREDG": (0x3B6,),
    "UBLKCP": (0x3BA,),
    "UBLKRED": (0x3BB,),
    "REDG": (0x9A6, 0x98E),
    "STSM": (0x844,),
    "LDSM": (0x83B,),
    "LDL": (0x983,),
    "STL": (0x387,),
    "USETMAXREG": (0x9C8,),
    "WARPGROUP": (0x9C5,),
}
NAMES = {code: name for name, codes in OPCODES.items() for code in codes}

# Attributes of the section .nv.info that hold (index of a symbol, value), and the format of attributes with a size.
NUM_REGISTERS, FRAME_BYTES = 0x2F, 0x11
SIZED = 4


@dataclass(frozen=True)
class CubinKernel:
    """registers: per thread at launch, whatever setmaxnreg makes of them later. stack_bytes: local memory per thread.

    opcodes: how often each of `OPCODES` stands in the code; those that do not are left out.
    """

    name: str
    registers: int
    stack_bytes: int
    num_instructions: int
    opcodes: dict[str, int]


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    link: int


def read_kernels(cubin: bytes) -> tuple[CubinKernel, ...]:
    """Every kernel of an sm_90 cubin, in the order of the file."""
    sections = _read_sections(cubin)
    by_name = {section.name: section for section in sections}
    symbols, info = by_name[".symtab"], by_name[".nv.info"]
    names = [_string(sections[symbols.link].data, offset) for offset, in struct.iter_unpack("<I20x", symbols.data)]
    facts = {(attribute, names[symbol]): value for attribute, symbol, value in _read_facts(info.data)}
    kernels = []
    for section in sections:
        name = section.name.removeprefix(".text.")
        if name != section.name:
            words = [word & 0xFFF for word, in struct.iter_unpack("<Q8x", section.data)]
            opcodes = Counter(NAMES[word] for word in words if word in NAMES)
            sizes = (facts[NUM_REGISTERS, name], facts[FRAME_BYTES, name], len(words))
            kernels.append(CubinKernel(name, *sizes, dict(opcodes)))
    return tuple(kernels)


def ptxas_version(cubin: bytes) -> str:
    """The version of the ptxas that made the cubin, such as 13.4.59, from its note `.note.nv.tkinfo`."""
    version = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin)
    return version[1].decode() if version else "unknown"


def _read_sections(cubin: bytes) -> list[_Section]:
    """The sections of the ELF file; bytes that are no sm_90 cubin raise ValueError."""
    is_cubin = cubin[:4] == b"\x7fELF" and struct.unpack_from("<H", cubin, 0x12) == (MACHINE_CUDA,)
    if not is_cubin:
        raise ValueError(f"expected a cubin, got {len(cubin)} bytes that begin with {cubin[:4]!r}")
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    if flags >> 8 & 0xFF != SM:
        raise ValueError(f"expected a cubin for sm_{SM}, got one for sm_{flags >> 8 & 0xFF}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_idx = struct.unpack_from("<HHH", cubin, 0x3A)
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info, sh_addralign, sh_entsize
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + size * idx) for idx in range(count)]
    names = cubin[headers[names_idx][4] :]
    return [_Section(_string(names, h[0]), cubin[h[4] : h[4] + h[5]], h[6]) for h in headers]


def _read_facts(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol index, value) of the wanted attributes. An unsized one has its value in place of the size."""
    offset = 0
    while offset < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == SIZED:
            if attribute in (NUM_REGISTERS, FRAME_BYTES):
                yield attribute, *struct.unpack_from("<II", info, offset)
            offset += size


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
