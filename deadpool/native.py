"""Reaching C++ objects of torch that Python does not expose, checked before first use.

Everything here is version-dependent; each capability is probed, and callers go on without it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist


def native_pointer(wrapped: Any) -> int:
    """Address of the C++ object behind a pybind11 object (simple layout: the value pointer follows
    the PyObject header)."""
    return ctypes.c_void_p.from_address(id(wrapped) + object.__basicsize__).value or 0


@functools.cache
def layout_is_known() -> bool:
    """Whether `native_pointer` finds objects: on a throw-away group, rank and size must stand next
    to each other behind the pointer."""
    rank, size = 0x1234567, 0x2345678
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    pointer = native_pointer(group)
    if pointer == 0:
        return False
    words = list((ctypes.c_uint32 * 16).from_address(pointer))
    return (rank, size) in itertools.pairwise(words)


@functools.cache
def torch_function(symbol: str, *argument_types: Any) -> Any:
    """A function of libtorch_cpu by its mangled name, returning nothing; None where this torch
    lacks it or objects cannot be found."""
    library_path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        function = getattr(ctypes.CDLL(library_path), symbol)
    except (OSError, AttributeError):
        return None
    if not layout_is_known():
        return None
    function.argtypes = argument_types
    function.restype = None
    return function


def type_name(pointer: int) -> str:
    """Mangled name of the dynamic type of a polymorphic C++ object (Itanium ABI: the type_info
    stands before the vtable, its name behind its own vtable pointer)."""
    vtable = ctypes.c_void_p.from_address(pointer).value or 0
    type_info = ctypes.c_void_p.from_address(vtable - ctypes.sizeof(ctypes.c_void_p)).value or 0
    name = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value or b""
    return name.decode().lstrip("*")
