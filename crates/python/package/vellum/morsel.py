"""Morsels: memory that processes share by a descriptor, and model files in them.

    >>> from vellum import morsel
    >>> tensors = morsel.load_safetensors("model.safetensors")
    >>> tensors["embed.weight"]            # a read-only numpy array of the file's own bytes
    >>> tensors.metadata

If Vellum's cache daemon runs, all processes that load a file share its memory. Otherwise each
process reads the file for itself. The attribute `shared` of a loaded Morsel tells the two apart.
"""

import copyreg
import os
from dataclasses import dataclass
from multiprocessing import reduction

from vellum._native import (
    FormatError,
    Mapping,
    Morsel,
    Stat,
    gguf_layout,
    load_file,
    safetensors_layout,
)

__all__ = [
    "FormatError",
    "Mapping",
    "Morsel",
    "Stat",
    "TensorInfo",
    "Tensors",
    "bfloat16_to_float32",
    "load_gguf",
    "load_safetensors",
]

# The types that NumPy has, by their names in each format.
_SAFETENSORS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
    "C64": "<c8",
}
_GGUF = {
    "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}
# Types that only the package ml_dtypes has, and their substitutes without it.
_EXTENDED = {
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "F8_E8M0": ("float8_e8m0fnu", "u1"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The description of a tensor in its file."""

    kind: str
    """The type of its elements, by the format's name: 'BF16', 'Q4_K'."""
    shape: tuple[int, ...]
    """Its dimensions in elements, even if the array has quantised blocks of bytes."""
    offset: int
    """The position of its first byte in the file."""
    nbytes: int
    """Its length in bytes."""


class Tensors(dict):
    """The tensors of a file: read-only arrays by name. They share the Morsel's memory, and keep it.

    metadata: the file's own metadata. info: a TensorInfo for each name. morsel: the file.

    multiprocessing sends Tensors and Morsels to other processes, also to spawned ones, which then
    share the memory. A pickle alone is useless: it stands for a descriptor.
    """

    # The format of the file, and the file's own arrays; None unless a function below loaded them.
    _format = None
    _own = None

    def __init__(self, morsel, metadata, info):
        super().__init__()
        self.morsel = morsel
        self.metadata = metadata
        self.info = info

    def __copy__(self):
        other = type(self)(self.morsel, self.metadata, self.info)
        other.__dict__.update(self.__dict__)
        other.update(self)
        return other

    def __reduce_ex__(self, protocol):
        if self._format is None:
            return super().__reduce_ex__(protocol)
        # The other process has the file's memory, so the pickle leaves out arrays of the file.
        own = self._own
        others = {name: array for name, array in self.items()
                  if name not in own or array is not own[name]}
        return _restored_tensors, (self.morsel, self._format, list(self), others)


def _restored_tensors(morsel, format, names, others):
    tensors = _tensors(morsel, format)
    tensors.clear()
    for name in names:
        tensors[name] = others[name] if name in others else tensors._own[name]
    return tensors


def _reduced_morsel(morsel):
    return _restored_morsel, (reduction.DupFd(morsel.fileno()),)


def _restored_morsel(descriptor):
    fd = descriptor.detach()
    try:
        return Morsel.from_fd(fd)
    finally:
        os.close(fd)


copyreg.pickle(Morsel, _reduced_morsel)


def load_safetensors(path):
    """The tensors of a safetensors file, as Tensors, without a copy.

    Types that NumPy lacks (BF16, F8_*) are those of the package ml_dtypes if it is installed, and
    otherwise unsigned integers with the same bits; see bfloat16_to_float32.

    Raises FormatError for a file that violates the format, OSError if it cannot be read.
    """
    return _load(path, "safetensors")


def load_gguf(path):
    """The tensors of a GGUF file, as Tensors, without a copy.

    The last dimension of a shape is the one whose elements are adjacent: the reverse of the file's
    order. A tensor of a quantised type is an array of bytes: its last dimension is the bytes of a
    row, and info[name].shape has the elements. For BF16 see load_safetensors. A text in the metadata
    that is not UTF-8 is a bytes object.

    Raises FormatError for a file that violates the format, OSError if it cannot be read.
    """
    return _load(path, "gguf")


def bfloat16_to_float32(array):
    """An array of float32 with the values of an array of bfloat16, given as uint16 or bfloat16."""
    numpy = _numpy()
    array = numpy.asarray(array)
    if array.dtype.itemsize != 2:
        raise TypeError(f"elements of {array.dtype} are not bfloat16, which has 2 bytes")
    bits = array.view("<u2").astype("<u4") << 16
    return bits.view("<f4")


def _load(path, format):
    _numpy()
    # Warnings name the caller of the function that calls this one.
    morsel = load_file(path, 3)
    try:
        return _tensors(morsel, format)
    except FormatError as error:
        raise FormatError(f"{os.fsdecode(path)}: {error}") from None


def _tensors(morsel, format):
    layout, array = {
        "safetensors": (safetensors_layout, _safetensors_array),
        "gguf": (gguf_layout, _gguf_array),
    }[format]
    mapping = morsel.map()
    metadata, described = layout(mapping)
    info = {name: TensorInfo(*rest) for name, *rest in described}
    tensors = Tensors(morsel, metadata, info)
    tensors._format = format
    tensors._own = {name: array(mapping, entry) for name, entry in info.items()}
    tensors.update(tensors._own)
    return tensors


def _numpy():
    try:
        import numpy
    except ImportError as error:
        text = "arrays need NumPy: pip install 'vellum[numpy]'"
        raise ImportError(text, name="numpy") from error
    return numpy


def _safetensors_array(mapping, info):
    dtype = _SAFETENSORS.get(info.kind) or _extended(info.kind)
    return _array(mapping, info, dtype, info.shape)


def _gguf_array(mapping, info):
    if info.kind == "BF16" or info.kind in _GGUF:
        dtype = _GGUF.get(info.kind) or _extended(info.kind)
        return _array(mapping, info, dtype, info.shape)
    # Blocks of several elements, as rows of bytes.
    rows = info.shape[:-1]
    count = 1
    for length in rows:
        count *= length
    return _array(mapping, info, "u1", (*rows, info.nbytes // count if count else 0))


def _extended(kind):
    name, bits = _EXTENDED[kind]
    try:
        import ml_dtypes
    except ImportError:
        return bits
    # Older versions have fewer types.
    return getattr(ml_dtypes, name, bits)


def _array(mapping, info, dtype, shape):
    numpy = _numpy()
    dtype = numpy.dtype(dtype)
    if info.nbytes == 0:
        # NumPy rejects an empty part of a buffer.
        empty = numpy.empty(shape, dtype)
        empty.flags.writeable = False
        return empty
    count = info.nbytes // dtype.itemsize
    flat = numpy.frombuffer(mapping, dtype, count, info.offset)
    return flat.reshape(shape)
