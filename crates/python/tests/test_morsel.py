"""Morsels and their buffers."""

import gc
import importlib.metadata
import mmap
import os
import signal
import socket
import tempfile
import unittest

import numpy

import vellum
from vellum.morsel import Mapping, Morsel, Stat


def mapped(address):
    """Whether an address of this process is mapped, by the kernel's list."""
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def sealed(content):
    """A sealed Morsel with these bytes."""
    morsel = Morsel.create(len(content), backend="memfd")
    with morsel.map(writable=True) as mapping:
        with memoryview(mapping) as view:
            view[:] = content
    morsel.seal()
    return morsel


class Making(unittest.TestCase):
    def test_the_package_has_its_version(self):
        self.assertEqual(vellum.__version__, importlib.metadata.version("vellum"))

    def test_a_new_morsel_is_zeros_without_memory(self):
        morsel = Morsel.create(10_000, backend="memfd")
        self.assertEqual(len(morsel), 10_000)
        self.assertEqual(bytes(morsel), bytes(10_000))
        stat = morsel.stat()
        self.assertIsInstance(stat, Stat)
        self.assertEqual((stat.length, stat.order, stat.backend), (10_000, 1, "memfd"))
        self.assertFalse(stat.sealed)
        self.assertIsNone(stat.mounts)

    def test_shapes_are_as_asked_for(self):
        stat = Morsel.create(1 << 20, order=2, huge=True, address=7 << 40, backend="memfd").stat()
        self.assertEqual((stat.order, stat.huge, stat.address), (2, True, 7 << 40))
        self.assertTrue(stat.inherit)
        self.assertFalse(Morsel.create(1, inherit=False, backend="memfd").stat().inherit)

    def test_arguments_that_cannot_be_are_value_errors(self):
        for arguments in [{"length": 0}, {"length": 1 << 60}, {"length": 5000, "order": 0},
                          {"length": 1, "order": 5}, {"length": 1, "address": 1},
                          {"length": 1, "backend": "x"}]:
            with self.subTest(arguments), self.assertRaises(ValueError):
                Morsel.create(**arguments)
        with self.assertRaises(OverflowError):
            Morsel.create(-1)
        with self.assertRaises(TypeError):
            Morsel()

    def test_names_are_refused_without_the_module(self):
        with self.assertRaises(OSError):
            Morsel.create(1, name="a", backend="memfd")

    def test_a_closed_morsel_says_so(self):
        with Morsel.create(1, backend="memfd") as morsel:
            self.assertFalse(morsel.closed)
            number = morsel.fileno()
        self.assertTrue(morsel.closed)
        with self.assertRaises(OSError):
            os.fstat(number)
        for use in [morsel.stat, morsel.seal, morsel.map, morsel.fileno, lambda: len(morsel),
                    lambda: memoryview(morsel)]:
            with self.assertRaises(ValueError):
                use()
        self.assertIn("closed", repr(morsel))
        morsel.close()


class Content(unittest.TestCase):
    def test_a_file_fills_it(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"0123456789")
            file.flush()
            morsel = Morsel.create(8192, backend="memfd")
            self.assertEqual(morsel.fill(file.name), 10)
            self.assertEqual(morsel.fill(file, start=4, offset=4096, length=3), 3)
            self.assertEqual(morsel.fill(file.fileno(), start=9), 1)
            self.assertEqual(bytes(morsel)[:10], b"9123456789")
            self.assertEqual(bytes(morsel)[4096:4100], b"456\0")
            with self.assertRaises(ValueError):
                morsel.fill(file, offset=1)
            with self.assertRaises(ValueError):
                morsel.fill(file, length=8193)
            with self.assertRaises(OSError):
                morsel.fill(file, start=10)
        with self.assertRaises(FileNotFoundError) as caught:
            morsel.fill("/nowhere/file")
        self.assertEqual(caught.exception.filename, "/nowhere/file")
        with self.assertRaises(OSError):
            morsel.fill(10_000)
        with self.assertRaises(AttributeError):
            morsel.fill(1.5)

    def test_pages_come_and_go(self):
        morsel = Morsel.create(4 * 4096, backend="memfd")
        morsel.populate()
        self.assertEqual(morsel.stat().pages, 4)
        morsel.punch(4096, 8192)
        self.assertEqual(morsel.stat().pages, 2)
        for offset, length in [(1, 4096), (0, 5 * 4096), (2**64 - 1, 2)]:
            with self.assertRaises(ValueError):
                morsel.punch(offset, length)

    def test_a_sealed_morsel_cannot_change(self):
        morsel = sealed(b"abc")
        self.assertTrue(morsel.stat().sealed)
        with self.assertRaises(PermissionError):
            morsel.map(writable=True)
        with self.assertRaises(PermissionError):
            morsel.populate() or morsel.punch()
        with self.assertRaises(OSError):
            mmap.mmap(morsel.fileno(), 3, mmap.MAP_SHARED, mmap.PROT_WRITE)
        self.assertEqual(bytes(morsel), b"abc")

    def test_it_can_be_sealed_although_it_was_read(self):
        morsel = Morsel.create(4, backend="memfd")
        self.assertEqual(bytes(morsel), bytes(4))
        mapping = morsel.map()
        morsel.seal()
        self.assertEqual((bytes(mapping), bytes(morsel)), (bytes(4), bytes(4)))

    def test_it_cannot_be_sealed_while_it_may_be_written(self):
        morsel = Morsel.create(4096, backend="memfd")
        view = memoryview(morsel.map(writable=True))
        with self.assertRaises(OSError):
            morsel.seal()
        del view
        gc.collect()
        morsel.seal()

    def test_a_read_only_morsel_cannot_be_changed(self):
        morsel = Morsel.create(4096, backend="memfd").read_only()
        for use in [lambda: morsel.map(writable=True), morsel.populate, morsel.seal]:
            with self.assertRaises(OSError):
                use()


class Buffers(unittest.TestCase):
    def test_arrays_are_the_memory_itself(self):
        mapping = sealed(bytes(range(256)) * 32).map()
        array = numpy.frombuffer(mapping, "u1")
        self.assertEqual(array.ctypes.data, mapping.address)
        self.assertEqual(len(array), len(mapping))
        self.assertEqual(array[300], 300 % 256)
        part = numpy.frombuffer(mapping, "<u4", 2, 8)
        self.assertEqual(part.ctypes.data, mapping.address + 8)

    def test_buffers_of_a_morsel_are_one_mapping(self):
        morsel = sealed(b"abcd")
        first, second = numpy.frombuffer(morsel, "u1"), numpy.frombuffer(morsel, "u1")
        self.assertEqual(first.ctypes.data, second.ctypes.data)
        self.assertIsInstance(memoryview(morsel).obj, Mapping)

    def test_buffers_outlive_the_morsel_and_its_mapping(self):
        morsel = sealed(b"here" * 5000)
        direct, mapping = numpy.frombuffer(morsel, "u1"), morsel.map()
        array = numpy.frombuffer(mapping, "u1")[100:]
        addresses = [direct.ctypes.data, array.ctypes.data]
        morsel.close()
        del morsel, mapping
        gc.collect()
        self.assertEqual(direct.tobytes(), b"here" * 5000)
        self.assertEqual(array.tobytes(), b"here" * 4975)
        self.assertTrue(all(map(mapped, addresses)))
        del direct, array
        gc.collect()
        self.assertFalse(any(map(mapped, addresses)))

    def test_a_mapping_with_buffers_cannot_be_closed(self):
        mapping = sealed(b"abc").map()
        view, array = memoryview(mapping), numpy.frombuffer(mapping, "u1")
        address = mapping.address
        with self.assertRaises(BufferError):
            mapping.close()
        del view, array
        gc.collect()
        mapping.close()
        self.assertTrue(mapping.closed)
        self.assertFalse(mapped(address))
        for use in [lambda: memoryview(mapping), lambda: mapping.address]:
            with self.assertRaises(ValueError):
                use()
        mapping.close()

    def test_read_only_is_read_only(self):
        for morsel in [sealed(b"abcd"), Morsel.create(4, backend="memfd")]:
            for buffer in [morsel, morsel.map()]:
                view = memoryview(buffer)
                self.assertTrue(view.readonly)
                with self.assertRaises(TypeError):
                    view[0] = 1
                array = numpy.frombuffer(buffer, "u1")
                with self.assertRaises(ValueError):
                    array[0] = 1
                with self.assertRaises(ValueError):
                    array.flags.writeable = True
                # A call that explicitly asks for a writable buffer.
                with tempfile.TemporaryFile() as file, self.assertRaises(TypeError):
                    file.write(b"xxxx")
                    file.seek(0)
                    file.readinto(buffer)

    def test_writable_buffers_share_the_memory(self):
        morsel = Morsel.create(8, backend="memfd")
        writer = numpy.frombuffer(morsel.map(writable=True), "<u4")
        reader = numpy.frombuffer(morsel, "<u4")
        self.assertNotEqual(writer.ctypes.data, reader.ctypes.data)
        writer[1] = 7
        self.assertEqual(list(reader), [0, 7])

    def test_a_forked_child_keeps_mappings(self):
        array = numpy.frombuffer(sealed(b"abcd"), "u1")
        child = os.fork()
        if child == 0:
            os._exit(0 if array.tobytes() == b"abcd" else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


class Sharing(unittest.TestCase):
    def test_it_goes_through_a_socket(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sealed(b"shared").send(ours)
            received = Morsel.receive(theirs)
            self.assertTrue(received.shared)
            self.assertEqual(bytes(received), b"shared")
            ours.send(b"x")
            with self.assertRaises(OSError):
                Morsel.receive(theirs)

    def test_a_sockets_timeout_is_kept_to(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.settimeout(0.01)
            with self.assertRaises(TimeoutError):
                Morsel.receive(theirs)
            theirs.settimeout(200)
            sealed(b"abc").send(ours)
            self.assertEqual(bytes(Morsel.receive(theirs)), b"abc")
            theirs.setblocking(False)
            for silent in [theirs, theirs.fileno()]:
                with self.assertRaises(BlockingIOError):
                    Morsel.receive(silent)

    def test_ctrl_c_ends_a_receive(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            self.addCleanup(signal.signal, signal.SIGALRM, before)
            with self.assertRaises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                Morsel.receive(theirs)

    def test_a_descriptor_stays_the_callers(self):
        morsel = sealed(b"abc")
        again = Morsel.from_fd(morsel)
        number = morsel.fileno()
        self.assertNotEqual(again.fileno(), number)
        again.close()
        self.assertEqual(bytes(Morsel.from_fd(number)), b"abc")

    def test_other_descriptors_are_refused(self):
        with tempfile.TemporaryFile() as file:
            for other in [file, 10_000, -1]:
                with self.assertRaises(OSError):
                    Morsel.from_fd(other)
        with self.assertRaises(AttributeError):
            Morsel.from_fd("name")


if __name__ == "__main__":
    unittest.main()
