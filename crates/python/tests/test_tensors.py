"""Model files: valid ones from the formats' own libraries, and damaged ones."""

import copy
import gc
import json
import multiprocessing
import os
import pathlib
import struct
import sys
import tempfile
import unittest
from concurrent import futures
from unittest import mock

import gguf
import ml_dtypes
import numpy
import safetensors.numpy

import vellum._native
from vellum import morsel


def keep(*tensors):
    """The data of a worker when it starts."""
    global kept
    kept = tensors


def look():
    tensors, other = kept
    arrays = other["a"], tensors["a"]
    return (list(tensors), int(tensors["a"].sum()), len(tensors["b"]), tensors.metadata,
            os.fstat(tensors.morsel.fileno()).st_ino,
            not any(array.flags.writeable for array in arrays))


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "model"


class Safetensors(Files):
    def write(self, header, data=b""):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    def refused(self, message):
        with self.assertRaisesRegex(morsel.FormatError, message):
            morsel.load_safetensors(self.path)

    def test_every_type_of_numpy_is_read_as_it_was_written(self):
        random = numpy.random.default_rng(1)
        types = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
        written = {name: (random.random((3, 5, 7)) * 100).astype(name) for name in types}
        written["scalar"] = numpy.array(7, "i4")
        written["empty"] = numpy.zeros((0, 4), "f4")
        safetensors.numpy.save_file(written, self.path, {"made": "for a test"})
        tensors = morsel.load_safetensors(self.path)
        self.assertEqual(tensors.metadata, {"made": "for a test"})
        self.assertEqual(tensors.keys(), written.keys())
        for name, array in written.items():
            self.assertEqual(tensors[name].dtype, array.dtype)
            numpy.testing.assert_array_equal(tensors[name], array)
        self.assert_arrays_are_the_file(tensors)

    def assert_arrays_are_the_file(self, tensors):
        file = self.path.read_bytes()
        bases = set()
        for name, array in tensors.items():
            info = tensors.info[name]
            self.assertEqual(array.tobytes(), file[info.offset:info.offset + info.nbytes])
            self.assertFalse(array.flags.writeable)
            if array.nbytes:
                bases.add(array.ctypes.data - info.offset)
                with self.assertRaises(ValueError):
                    array.flags.writeable = True
        self.assertEqual(len(bases), 1, "all arrays are of one mapping")

    def test_types_that_numpy_lacks(self):
        entries = {"b": ("BF16", [2], 0, 4), "e": ("F8_E4M3", [2], 4, 6),
                   "m": ("F8_E5M2", [2], 6, 8)}
        header = {name: {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
                  for name, (kind, shape, start, end) in entries.items()}
        self.write(header, struct.pack("<HH", 0x3F80, 0xC040) + bytes([0x38, 0xB8, 0x3C, 0xBC]))
        tensors = morsel.load_safetensors(self.path)
        self.assertEqual(tensors["b"].dtype, ml_dtypes.bfloat16)
        for name, values in {"b": [1, -3], "e": [1, -1], "m": [1, -1]}.items():
            self.assertEqual(list(tensors[name].astype("f4")), values)
        self.assertEqual(list(morsel.bfloat16_to_float32(tensors["b"])), [1, -3])
        with mock.patch.dict(sys.modules, {"ml_dtypes": None}):
            tensors = morsel.load_safetensors(self.path)
        self.assertEqual([tensors[name].dtype for name in "bem"], ["u2", "u1", "u1"])
        self.assertEqual(list(morsel.bfloat16_to_float32(tensors["b"])), [1, -3])
        with self.assertRaises(TypeError):
            morsel.bfloat16_to_float32(numpy.zeros(2, "f4"))

    def test_tensors_need_not_be_aligned(self):
        entry = {"dtype": "F64", "shape": [2], "data_offsets": [1, 17]}
        byte = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
        self.write({"a": entry, "b": byte}, b"\x01" + struct.pack("<dd", 1.5, 2.5))
        self.assertEqual(list(morsel.load_safetensors(self.path)["a"]), [1.5, 2.5])

    def test_arrays_outlive_everything_else(self):
        safetensors.numpy.save_file({"a": numpy.arange(10_000)}, self.path)
        array = morsel.load_safetensors(self.path)["a"][5:]
        self.path.unlink()
        gc.collect()
        numpy.testing.assert_array_equal(array, numpy.arange(5, 10_000))

    def test_other_processes_get_them_without_a_copy(self):
        written = {"a": numpy.arange(100_000), "b": numpy.arange(7), "c": numpy.zeros(3)}
        safetensors.numpy.save_file(written, self.path, {"made": "for a test"})
        tensors = morsel.load_safetensors(self.path)
        self.path.unlink()
        del tensors["c"]
        tensors["b"] = numpy.arange(9)
        tensors["own"] = None
        inode = os.fstat(tensors.morsel.fileno()).st_ino
        for method in ["spawn", "forkserver", "fork"]:
            with self.subTest(method):
                context = multiprocessing.get_context(method)
                workers = futures.ProcessPoolExecutor(
                    1, context, initializer=keep, initargs=(tensors, copy.copy(tensors)))
                with workers:
                    said = workers.submit(look).result()
                self.assertEqual(said, (["a", "b", "own"], int(written["a"].sum()), 9,
                                        {"made": "for a test"}, inode, True))

    def test_without_numpy_the_extra_is_named(self):
        safetensors.numpy.save_file({"a": numpy.arange(3)}, self.path)
        for call in [lambda: morsel.load_safetensors(self.path),
                     lambda: morsel.load_gguf(self.path),
                     lambda: morsel.bfloat16_to_float32([1])]:
            with mock.patch.dict(sys.modules, {"numpy": None}):
                with self.assertRaisesRegex(ImportError, r"pip install 'vellum\[numpy\]'"):
                    call()

    def test_damaged_files_are_format_errors(self):
        good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        safetensors.numpy.save_file({"a": numpy.arange(100)}, self.path)
        whole = self.path.read_bytes()
        for length in [1, 7, 8, 20, len(whole) - 1]:
            self.path.write_bytes(whole[:length])
            with self.subTest(length=length), self.assertRaises(morsel.FormatError):
                morsel.load_safetensors(self.path)
        self.path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
        self.refused("model: not a safetensors file: as a header's length .* at most 100000000")
        self.write({"a": good | {"data_offsets": [0, 80]}}, bytes(8))
        self.refused("'a'.*not as many bytes")
        self.write({"a": good}, bytes(4))
        self.refused("after the data's end")
        self.write({"a": good, "b": good}, bytes(8))
        self.refused("overlap")
        self.write({"a": good}, bytes(9))
        self.refused("belong to no tensor")
        self.write(b"[]")
        self.refused("not a safetensors file")
        self.write(b'{"a":{},"a":{}}')
        self.refused("damaged")
        self.write({"a": good | {"dtype": "F4"}}, bytes(8))
        self.refused("F4")

    def test_what_is_refused_here_is_refused_by_its_own_library(self):
        entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
        other = entry | {"data_offsets": [4, 8]}
        for entries, data in [({}, 0), ({"a": entry}, 4), ({"a": entry}, 5), ({"a": entry}, 3),
                              ({"a": other}, 8), ({"a": entry, "b": other}, 8),
                              ({"a": entry, "b": entry}, 4), ({"a": entry, "b": entry}, 8)]:
            self.write(entries, bytes(data))
            with self.subTest(entries=entries, data=data):
                self.assertEqual(self.opens(safetensors.numpy.load_file),
                                 self.opens(morsel.load_safetensors))

    def opens(self, load):
        try:
            load(self.path)
        except (ValueError, safetensors.SafetensorError):
            return False
        return True


class Gguf(Files):
    def writer(self):
        return gguf.GGUFWriter(self.path, "llama")

    def finish(self, writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def write(self):
        writer = self.writer()
        writer.add_name("small")
        writer.add_uint64("big", 1 << 63)
        writer.add_float64("half", 0.5)
        writer.add_bool("yes", True)
        writer.add_token_list([b"a", b"\xff", "ü"])
        writer.add_array("numbers", [1, -2])
        random = numpy.random.default_rng(1)
        self.plain = {name: (random.random((3, 64)) * 100).astype(kind) for name, kind in
                      {"f4": "f4", "f2": "f2", "f8": "f8", "i1": "i1", "i4": "i4"}.items()}
        for name, array in self.plain.items():
            writer.add_tensor(name, array)
        self.values = random.random((6, 64)).astype("f4")
        self.blocks = gguf.quants.quantize(self.values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("q", self.blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        self.finish(writer)

    def test_metadata_is_read_as_it_was_written(self):
        self.write()
        metadata = morsel.load_gguf(self.path).metadata
        self.assertEqual(metadata["general.architecture"], "llama")
        self.assertEqual(metadata["general.name"], "small")
        self.assertEqual((metadata["big"], metadata["half"], metadata["yes"]), (1 << 63, 0.5, True))
        self.assertEqual(metadata["tokenizer.ggml.tokens"], ["a", b"\xff", "ü"])
        self.assertEqual(metadata["numbers"], [1, -2])

    def test_tensors_are_the_files_bytes(self):
        self.write()
        tensors = morsel.load_gguf(self.path)
        self.assertEqual(tensors.keys(), self.plain.keys() | {"q"})
        for name, array in self.plain.items():
            self.assertEqual(tensors[name].dtype, array.dtype)
            numpy.testing.assert_array_equal(tensors[name], array)
        self.assertEqual(tensors["q"].shape, (6, 64 // 32 * 34))
        info = tensors.info["q"]
        self.assertEqual((info.kind, info.shape), ("Q8_0", (6, 64)))
        values = gguf.quants.dequantize(tensors["q"], gguf.GGMLQuantizationType.Q8_0)
        numpy.testing.assert_allclose(values, self.values, atol=0.01)
        bases = {array.ctypes.data - tensors.info[name].offset for name, array in tensors.items()}
        self.assertEqual(len(bases), 1, "all arrays are of one mapping")

    def test_its_own_reader_says_the_same(self):
        self.write()
        tensors = morsel.load_gguf(self.path)
        for theirs in gguf.GGUFReader(self.path).tensors:
            ours, info = tensors[theirs.name], tensors.info[theirs.name]
            numpy.testing.assert_array_equal(ours, theirs.data)
            self.assertEqual(info.shape, tuple(reversed(theirs.shape.tolist())))
            self.assertEqual(info.offset, theirs.data_offset)

    def test_types_have_the_sizes_that_their_library_says(self):
        theirs = {(int(kind), kind.name, *sizes)
                  for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
        self.assertLessEqual(set(vellum._native.gguf_kinds()), theirs)

    def test_damaged_files_are_format_errors(self):
        self.write()
        whole = self.path.read_bytes()
        for length in [3, 4, 23, 24, 100, 500, len(whole) - 40]:
            self.path.write_bytes(whole[:length])
            with self.subTest(length=length), self.assertRaises(morsel.FormatError):
                morsel.load_gguf(self.path)
        head = b"GGUF" + struct.pack("<I", 3)
        for content, message in [
            (b"GGML" + whole[4:], "not a GGUF file"),
            (b"GGUF" + struct.pack(">I", 3) + whole[8:], "big-endian"),
            (head + struct.pack("<QQ", 1 << 63, 0), "at most"),
            (head + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62), "ends within"),
            (head + struct.pack("<QQQ", 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 1 << 40, 0, 0)
             + bytes(64), "'a'.*after the file's end"),
        ]:
            self.path.write_bytes(content)
            with self.subTest(message), self.assertRaisesRegex(morsel.FormatError, message):
                morsel.load_gguf(self.path)


if __name__ == "__main__":
    unittest.main()
