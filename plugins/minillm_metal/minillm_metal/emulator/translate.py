"""Translation of Metal source to C++ for the replacement headers. Line numbers are preserved.

Address spaces become types: ``const device T*`` is ``emu::Pointer<emu::Device, const T>``. Code that
Apple's compiler rejects and C++ accepts is rejected here, by name and line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minillm_metal.emulator.fault import KernelFault

__all__ = ["Parameter", "Signature", "parsed", "translated", "uncommented"]

TYPE = r"(?:metal::)?[A-Za-z_]\w*(?:\s*<[^;(){}*&]*?>)?"
SPACES = {"device": "Device", "threadgroup": "Threadgroup", "constant": "Constant"}
SCALARS = "float|half|bfloat16_t|float16_t|bfloat|bool|char|uchar|short|ushort|int|uint|long|ulong"
SCALARS += r"|u?int(?:8|16|32|64)_t|size_t|float[234]|half[234]|T|U"
REFUSED = (
    (r"\bdouble\b", "Metal has no double"),
    (r"\bstd::", "Metal has no std::"),
    (r"\b(?:new|delete|try|catch|throw|virtual|goto|dynamic_cast)\b", "not allowed in Metal"),
    (r"\batomic", "the emulator has no atomics"),
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its type, name, and attribute (``buffer`` or a position in the grid)."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class Signature:
    """A kernel's name and parameters."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        """The parameters that are memory."""
        return tuple(p for p in self.parameters if p.attribute == "buffer")


def parsed(source: str) -> Signature:
    """Read the signature of the only kernel in ``source``; unmarked parameters are buffers."""
    source = uncommented(source)
    start = re.search(r"\[\[\s*kernel\s*\]\]\s*void\s+(\w+)\s*\(", source)
    if not start:
        raise KernelFault("there is no [[kernel]] function in the source")
    depth, end = 1, start.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    found = []
    for one in re.split(r",(?![^<\[(]*[>\])])", source[start.end() : end - 1]):
        mark = re.search(r"\[\[\s*(\w+)", one)
        words = re.sub(r"\[\[.*?\]\]", "", one, flags=re.S).strip()
        type_, name = re.fullmatch(r"(.*?)\s*(\w+)", words, re.S).groups()  # type: ignore[union-attr]
        found.append(Parameter(type_, name, mark[1] if mark else "buffer"))
    return Signature(start[1], tuple(found))


def translated(source: str) -> str:
    """Return C++ for a kernel and its helpers.

    Raises:
        KernelFault: code that Metal does not allow, or that the emulator does not support.
    """
    text = uncommented(source)
    for number, line in enumerate(text.split("\n"), 1):
        for pattern, said in REFUSED:
            if found := re.search(pattern, line):
                raise KernelFault(f"line {number}: {said}: {found[0].strip()}")
        for found in re.finditer(rf"\b(?:{SCALARS})[*&]\s*\w", line):
            before = line[: found.start()].rstrip().removesuffix("const").rstrip()
            if not before.endswith(("device", "constant", "threadgroup", "thread")):
                raise KernelFault(f"line {number}: {found[0]}: a pointer without an address space")
    text = re.sub(r"template\s*\[\[host_name.*?;", "", text, flags=re.S)
    text = re.sub(r"\[\[[^\]]*\]\]", "", text)
    text = re.sub(
        rf"\bthreadgroup\s+({TYPE})\s+(\w+)\s*\[([^\]]+)\]\s*;",
        r'static emu::Array<\1, (\3)> \2("\2");',
        text,
    )
    for word, space in SPACES.items():
        fixed = "const " if word == "constant" else ""
        for pattern, const in (
            (rf"\bconst\s+{word}\s+({TYPE})\s*\*", "const "),
            (rf"\b{word}\s+const\s+({TYPE})\s*\*", "const "),
            (rf"\b{word}\s+({TYPE})\s*\*", fixed),
        ):
            text = re.sub(pattern, rf"emu::Pointer<emu::{space}, {const}\1>", text)
    text = re.sub(rf"\bconst\s+constant\s+({TYPE})\s*&", r"const \1&", text)
    text = re.sub(rf"\bconstant\s+({TYPE})\s*&", r"const \1&", text)
    text = re.sub(
        r"\bconstant\s+(?=constexpr\b)|(?<=\bconstexpr )constant\b|\bthread\b(?!_)", "", text
    )
    for number, line in enumerate(text.split("\n"), 1):
        if found := re.search(r"\b(?:device|threadgroup|constant)\b", line):
            raise KernelFault(f"line {number}: the emulator does not know this {found[0]}: {line}")
    return text


def uncommented(source: str) -> str:
    """Return the source without comments; line numbers are preserved."""
    source = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.S)
    return re.sub(r"//[^\n]*", "", source)
