"""Stores, and values as files."""

import array
import errno
import gc
import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import vellum
from vellum.store import Store, Tree, ValueReader, ValueWriter, restore

POOL = 1 << 20
# Much longer than the pool, and not a multiple of any unit.
LONG = 23 * POOL + 12345


def noise(length, seed=1):
    return random.Random(seed).randbytes(length)


class InStore(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "a.vellum")
        self.store = Store.open(self.path, pool_bytes=POOL, create=True)
        self.addCleanup(self.store.close)
        self.tree = self.store.tree("t", create=True)

    def write(self, key, value, **options):
        with self.tree.writer(key, **options) as writer:
            self.assertEqual(writer.write(value), len(value))

    def read(self, key):
        with self.tree.reader(key) as reader:
            return reader.read()


class Stores(InStore):
    def test_entries_survive(self):
        self.assertIs(vellum.store.Store, Store)
        self.tree.put(b"a", b"one")
        self.tree.put(b"a", b"two")
        self.tree.put(b"", b"", new=True)
        with self.assertRaises(FileExistsError):
            self.tree.put(b"a", b"three", new=True)
        large = noise(3 * POOL)
        self.tree.put(b"large", large, new=True)
        self.assertTrue(self.tree.remove(b""))
        self.assertFalse(self.tree.remove(b""))
        self.store.sync()
        self.store.close()
        with Store.open(self.path, pool_bytes=POOL) as store:
            self.assertEqual(store.trees(), ["t"])
            tree = store.tree("t")
            self.assertIsInstance(tree, Tree)
            self.assertEqual((tree.name, tree.get(b"a"), tree.get(b"")), ("t", b"two", None))
            self.assertTrue(tree.get(b"large") == large)

    def test_what_is_refused_says_why(self):
        def number(kind, use):
            with self.assertRaises(kind) as raised:
                use()
            return getattr(raised.exception, "errno", None)

        self.assertEqual(number(OSError, lambda: Store.open(self.path)), errno.EBUSY)
        self.assertEqual(number(FileNotFoundError, lambda: Store.open("none")), errno.ENOENT)
        self.assertEqual(number(FileNotFoundError, lambda: self.store.tree("x")), errno.ENOENT)
        number(KeyError, lambda: self.tree.reader(b"none"))
        number(ValueError, lambda: self.tree.put(bytes(100_000), b""))
        number(ValueError, lambda: self.tree.writer(bytes(100_000)))
        number(ValueError, lambda: Store.open("x", pool_bytes=1, create=True))
        number(ValueError, lambda: Store.open("x", read_only=True, create=True))
        number(TypeError, lambda: self.tree.get("text"))
        number(TypeError, Store)
        self.assertFalse(os.path.exists("x"))
        with open(self.path + ".x", "wb") as file:
            file.write(b"no store")
        medium = number(OSError, lambda: Store.open(self.path + ".x"))
        self.assertEqual(medium, errno.EMEDIUMTYPE)

    def test_the_pool_changes_its_size(self):
        for number in range(2000):
            self.tree.put(b"%d" % number, noise(500))
        self.store.resize_pool(POOL // 2)
        self.assertEqual(self.tree.get(b"7"), noise(500))
        self.store.resize_pool(POOL)
        self.assertEqual(self.tree.get(b"1999"), noise(500))
        for wrong in [2 * POOL, 4096]:
            with self.assertRaises(ValueError):
                self.store.resize_pool(wrong)

    def test_a_read_only_store_is_not_changed(self):
        self.tree.put(b"a", b"one")
        self.store.close()
        with Store.open(self.path, read_only=True) as one, Store.open(self.path, read_only=True):
            tree = one.tree("t")
            self.assertEqual(tree.reader(b"a").read(), b"one")
            for use in [lambda: tree.put(b"a", b""), lambda: tree.writer(b"a")]:
                with self.assertRaises(OSError) as raised:
                    use()
                self.assertEqual(raised.exception.errno, errno.EROFS)

    def test_what_outlives_its_store_says_so(self):
        for key, length in [(b"short", 10), (b"whole", 5000), (b"long", LONG)]:
            self.write(key, noise(length))
        readers = [self.tree.reader(key) for key in [b"short", b"whole", b"long"]]
        writer, late = self.tree.writer(b"new"), self.tree.writer(b"new")
        writer.write(noise(LONG))
        self.store.close()
        self.assertTrue(self.store.closed)
        self.store.close()
        with Store.open(self.path, pool_bytes=POOL) as again:
            uses = [reader.read for reader in readers]
            uses += [writer.finish, lambda: late.write(noise(LONG))]
            uses += [lambda: self.tree.get(b"short"), lambda: self.tree.reader(b"short")]
            uses += [lambda: self.store.tree("t"), self.store.sync]
            for use in uses:
                with self.assertRaisesRegex(ValueError, "closed"):
                    use()
            late.abort()
            for reader in readers:
                reader.close()
            self.assertIsNone(again.tree("t").get(b"new"))
            self.assertEqual(len(again.tree("t").get(b"long")), LONG)

    def test_the_child_of_a_fork_leaves_its_parents_store_alone(self):
        self.write(b"a", noise(9000))
        self.write(b"b", noise(LONG))
        readers = [self.tree.reader(b"a"), self.tree.reader(b"b")]
        writer = self.tree.writer(b"c")
        writer.write(noise(LONG))
        self.tree.remove(b"b")
        uses = [self.store.sync, self.store.close, lambda: self.tree.get(b"a"), readers[0].read,
                readers[1].read, lambda: writer.write(b"x"), lambda: self.tree.put(b"a", b"")]
        child = os.fork()
        if child == 0:
            refused = 0
            for use in uses:
                try:
                    use()
                except ValueError:
                    refused += 1
            readers[0].close()
            writer.abort()
            del readers, writer, uses, use
            self.store = self.tree = None
            gc.collect()
            os._exit(0 if refused == 7 else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertTrue(readers[0].read() == noise(9000) and readers[1].read() == noise(LONG))
        writer.finish()
        self.assertTrue(self.read(b"c") == noise(LONG))

    def test_a_reader_keeps_an_unreachable_store(self):
        self.write(b"a", noise(LONG))
        reader = self.tree.reader(b"a")
        self.tree.remove(b"a")
        self.tree = None
        gc.collect()
        self.assertTrue(reader.read() == noise(LONG))


class Reading(InStore):
    def test_values_of_all_lengths_come_back(self):
        for length in [0, 1, 100, 4096, 5000, 300_000, LONG]:
            value = noise(length, length)
            self.write(b"key", value)
            with self.tree.reader(b"key") as reader:
                self.assertIsInstance(reader, io.RawIOBase)
                self.assertEqual((len(reader), bool(reader)), (length, True))
                self.assertTrue(reader.read() == value)
                self.assertEqual((reader.read(), reader.read(5)), (b"", b""))

    def test_it_is_a_file(self):
        value = noise(LONG)
        self.write(b"key", value)
        reader = self.tree.reader(b"key")
        self.assertTrue(reader.readable() and reader.seekable() and not reader.writable())
        self.assertIsInstance(reader, ValueReader)
        self.assertEqual(reader.seek(LONG // 2), LONG // 2)
        self.assertEqual(reader.read(10), value[LONG // 2:][:10])
        self.assertEqual(reader.seek(-5, io.SEEK_CUR), LONG // 2 + 5)
        self.assertEqual(reader.tell(), LONG // 2 + 5)
        self.assertEqual(reader.seek(-3, io.SEEK_END), LONG - 3)
        self.assertEqual(reader.read(), value[-3:])
        self.assertEqual((reader.seek(LONG + 9), reader.read()), (LONG + 9, b""))
        for offset, whence in [(-1, 0), (-LONG - 1, 2), (0, 3), (-LONG - 10, 1)]:
            with self.assertRaises(ValueError):
                reader.seek(offset, whence)
        with self.assertRaises(io.UnsupportedOperation):
            reader.write(b"x")
        with self.assertRaises(io.UnsupportedOperation):
            reader.fileno()
        reader.close()
        reader.close()
        self.assertTrue(reader.closed)
        for use in [reader.read, reader.tell, lambda: reader.seek(0), reader.__enter__]:
            with self.assertRaises(ValueError):
                use()

    def test_buffers_of_all_kinds_are_filled(self):
        value = noise(1 << 16)
        self.write(b"key", value)
        with self.tree.reader(b"key") as reader:
            for buffer in [bytearray(100), array.array("d", [0] * 9), memoryview(bytearray(64))]:
                at = reader.tell()
                self.assertEqual(reader.readinto(buffer), len(memoryview(buffer).cast("B")))
                self.assertEqual(bytes(buffer), value[at:reader.tell()])
            self.assertEqual(reader.readinto(bytearray()), 0)
            for buffer in [b"read-only", memoryview(bytearray(9))[::2], "text", 5]:
                with self.assertRaises(TypeError):
                    reader.readinto(buffer)

    def test_wrappers_of_the_standard_library_work(self):
        lines = b"".join(b"line %d\n" % number for number in range(200_000))
        self.write(b"key", lines)
        with io.BufferedReader(self.tree.reader(b"key")) as file:
            self.assertEqual(file.peek(4)[:4], b"line")
            self.assertEqual(file.read(100_000), lines[:100_000])
            file.seek(0)
            self.assertEqual(sum(1 for _ in file), 200_000)
        with io.TextIOWrapper(io.BufferedReader(self.tree.reader(b"key"))) as file:
            self.assertEqual(file.readline(), "line 0\n")
        with self.tree.reader(b"key") as reader, tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(reader, copy)
            copy.seek(0)
            self.assertTrue(copy.read() == lines)
        with self.tree.reader(b"key") as reader:
            digest = hashlib.file_digest(reader, "sha256").digest()
            self.assertEqual(digest, hashlib.sha256(lines).digest())

    def test_a_reader_keeps_its_value(self):
        self.write(b"key", noise(LONG))
        reader = self.tree.reader(b"key")
        self.write(b"key", noise(LONG, 2))
        self.tree.remove(b"key")
        self.assertTrue(reader.read() == noise(LONG))


class Writing(InStore):
    def test_it_is_a_file(self):
        writer = self.tree.writer(b"key")
        self.assertIsInstance(writer, ValueWriter)
        self.assertTrue(writer.writable() and not writer.readable() and not writer.seekable())
        self.assertEqual(writer.write(array.array("d", [1.0, 2.0])), 16)
        self.assertEqual(writer.write(b""), 0)
        self.assertEqual(writer.write(memoryview(b"abc")), 3)
        writer.writelines([b"d", b"e"])
        writer.flush()
        self.assertEqual(writer.tell(), 21)
        for data in ["text", 5, memoryview(b"abcd")[::2]]:
            with self.assertRaises(TypeError):
                writer.write(data)
        with self.assertRaises(io.UnsupportedOperation):
            writer.read()
        self.assertIsNone(self.tree.get(b"key"))
        self.assertFalse(writer.finish())
        self.assertTrue(writer.closed)
        for use in [writer.finish, writer.tell, lambda: writer.write(b"x")]:
            with self.assertRaises(ValueError):
                use()
        writer.close()
        writer.abort()
        self.assertEqual(self.tree.get(b"key")[16:], b"abcde")
        with self.tree.writer(b"key") as writer:
            self.assertTrue(writer.finish())
        self.assertEqual(self.tree.get(b"key"), b"")

    def test_a_file_is_copied(self):
        with tempfile.TemporaryFile() as file:
            file.write(noise(LONG))
            file.seek(0)
            with self.tree.writer(b"key") as writer:
                shutil.copyfileobj(file, writer)
        with self.tree.reader(b"key") as reader, self.tree.writer(b"copy") as writer:
            shutil.copyfileobj(reader, writer, 3 << 20)
        self.assertTrue(self.read(b"copy") == noise(LONG))

    def test_an_exception_drops_the_value(self):
        self.write(b"key", b"before")
        with self.assertRaises(ZeroDivisionError):
            with self.tree.writer(b"key") as writer:
                writer.write(noise(LONG))
                1 / 0
        self.assertTrue(writer.closed)
        self.assertEqual(self.read(b"key"), b"before")

    def test_what_is_not_finished_was_never_there(self):
        before = os.path.getsize(self.path)
        for _ in range(10):
            writer = self.tree.writer(b"key")
            writer.write(noise(LONG))
            writer.abort()
            writer = self.tree.writer(b"key")
            writer.write(noise(LONG))
            with self.assertRaisesRegex(ValueError, "finish"):
                writer.close()
            self.assertTrue(writer.closed)
            writer = self.tree.writer(b"key")
            writer.write(noise(LONG))
            del writer
            gc.collect()
        self.assertIsNone(self.tree.get(b"key"))
        # All of them used the same space.
        self.assertLess(os.path.getsize(self.path), before + 3 * LONG)

    def test_a_wrapper_that_only_closes_does_not_lose_silently(self):
        with self.assertRaisesRegex(ValueError, "finish"):
            with io.BufferedWriter(self.tree.writer(b"key")) as file:
                file.write(b"abc")
        self.assertIsNone(self.tree.get(b"key"))
        with self.tree.writer(b"key") as writer:
            file = io.BufferedWriter(writer)
            file.write(b"abc")
            file.flush()
        self.assertEqual(self.tree.get(b"key"), b"abc")

    def test_a_new_key_is_refused_where_there_is_one(self):
        self.write(b"key", noise(LONG), new=True)
        for length in [3, LONG]:
            with self.assertRaises(FileExistsError):
                self.write(b"key", noise(length, 2), new=True)
        self.assertTrue(self.read(b"key") == noise(LONG))


class Waiting(InStore):
    def test_threads_stream_at_once(self):
        def work(number):
            for round in range(3):
                value = noise(2 * POOL, number * 100 + round)
                self.write(b"%d" % number, value)
                if self.read(b"%d" % number) != value:
                    failed.append(number)

        failed = []
        self.write(b"shared", noise(LONG))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        reader = self.tree.reader(b"shared")

        def read(part):
            for _ in range(50):
                reader.read(part)

        threads += [threading.Thread(target=read, args=(1000 * part,)) for part in range(1, 4)]
        for thread in threads[4:]:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])

    def test_other_threads_go_on(self):
        """One thread counts while another is in a single long call."""
        # A busy machine may keep the counter waiting for the whole time of a write.
        for _ in range(20):
            during, seconds = self.turns_during_a_write()
            if during > 4:
                return
        self.fail(f"{during} turns in {seconds} s")

    def turns_during_a_write(self):
        ended, turns = threading.Event(), []

        def count():
            while not ended.is_set():
                turns.append(time.monotonic())
                time.sleep(0.001)

        counter = threading.Thread(target=count)
        counter.start()
        value = bytes(64 * POOL)
        with self.tree.writer(b"key") as writer:
            begin = time.monotonic()
            writer.write(value)
            written = time.monotonic()
        ended.set()
        counter.join()
        return sum(begin < turn < written for turn in turns), written - begin

    def test_ctrl_c_ends_a_write(self):
        # One call writes all of this, part by part.
        value = bytes(256 * POOL)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        with self.assertRaises(KeyboardInterrupt):
            with self.tree.writer(b"key") as writer:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                try:
                    writer.write(value)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    written = writer.tell()
        self.assertLess(written, len(value))
        self.assertIsNone(self.tree.get(b"key"))

    def test_ctrl_c_ends_a_read(self):
        with self.tree.writer(b"key") as writer:
            for _ in range(64):
                writer.write(bytes(POOL))
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        with self.tree.reader(b"key") as reader, self.assertRaises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            for _ in range(1000):
                reader.seek(0)
                reader.readall()

    def test_a_long_value_takes_little_memory(self):
        program = """if True:
            import resource, sys
            from vellum.store import Store
            peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            store = Store.open(sys.argv[1], pool_bytes=1 << 20, create=True)
            tree, count = store.tree("t", create=True), 0
            buffer = bytearray(1 << 20)
            tree.put(b"short", bytes(1000))
            before = peak()
            with tree.writer(b"k") as writer:
                for _ in range(256):
                    writer.write(buffer)
            with tree.reader(b"k") as reader:
                while read := reader.readinto(buffer):
                    count += read
            print(count, peak() - before)
            store.close()
        """
        command = [sys.executable, "-c", program, self.path + ".long"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        count, kib = map(int, found.split())
        self.assertEqual(count, 256 << 20)
        self.assertLess(kib, 16 << 10)


class Maintenance(InStore):
    def beside(self, name):
        return os.path.join(os.path.dirname(self.path), name)

    def values(self, name):
        with Store.open(self.beside(name), pool_bytes=POOL) as store:
            return dict(store.tree("t").range())

    def test_backups_are_restored(self):
        self.tree.put(b"a", b"1")
        told = []
        length = self.store.backup(
            self.beside("full"), progress=lambda done, total: told.append((done, total))
        )
        self.assertEqual(length, os.path.getsize(self.beside("full")))
        self.assertTrue(told and all(0 < done <= total for done, total in told), told)
        self.tree.put(b"b", b"2")
        self.store.backup(self.beside("one"), since=self.beside("full"), bytes_per_second=1 << 40)
        with self.assertRaises(FileExistsError):
            self.store.backup(self.beside("full"))
        restore(self.beside("first"), self.beside("full"))
        restore(self.beside("second"), self.beside("full"), [self.beside("one")])
        self.assertEqual(self.values("first"), {b"a": b"1"})
        self.assertEqual(self.values("second"), {b"a": b"1", b"b": b"2"})
        self.store.backup(self.beside("full"), replace=True, check=False)
        self.assertEqual(self.values("full"), {b"a": b"1", b"b": b"2"})
        with self.assertRaises(OSError):
            restore(self.beside("third"), self.beside("one"))

    def test_an_increment_reads_what_changed_or_all(self):
        self.write(b"long", noise(3 * POOL))
        self.store.backup(self.beside("0"))
        totals = []
        for number, read_all in enumerate([False, False, True], 1):
            self.tree.put(b"a", str(number).encode())
            told = []
            self.store.backup(
                self.beside(str(number)),
                since=self.beside(str(number - 1)),
                read_all=read_all,
                progress=lambda done, total: told.append(total),
            )
            totals.append(told[-1])
        _, changed, whole = totals
        self.assertLess(changed, 3 * POOL)
        self.assertGreater(whole, 3 * POOL)
        increments = [self.beside(name) for name in "123"]
        self.store.repair_from(self.beside("0"), increments)
        with self.assertRaises(OSError):
            self.store.repair_from(self.beside("0"), increments[:2])
        self.store.backup(self.beside("4"))
        self.store.repair_from(self.beside("4"), progress=lambda done, total: told.append(done))
        self.assertGreater(told[-1], 3 * POOL)
        restore(self.beside("last"), self.beside("0"), increments)
        self.assertEqual(self.values("last")[b"a"], b"3")

    def test_an_exception_ends_the_call(self):
        self.write(b"long", noise(3 * POOL))
        # Its pages move.
        self.write(b"other", noise(POOL))

        def fail(done, total):
            raise KeyError(done)

        for call in [
            lambda: self.store.backup(self.beside("full"), progress=fail),
            lambda: self.store.check(progress=fail),
            lambda: self.store.check(free_lost=True, progress=fail),
            lambda: self.store.compact(progress=fail) if self.tree.remove(b"long") else None,
        ]:
            with self.assertRaises(KeyError):
                call()
        self.assertEqual(os.listdir(os.path.dirname(self.path)).count("full"), 0)
        self.tree.put(b"a", b"1")
        self.assertEqual(self.tree.get(b"a"), b"1")

    def test_a_check_counts_and_a_compaction_shortens(self):
        self.write(b"long", noise(3 * POOL))
        check = self.store.check()
        self.assertEqual((check.lost_pages, check.damage), (0, []))
        self.assertGreater(check.pages_checked, 3 * POOL // 4096)
        self.assertIn("damaged=0", repr(check))
        self.assertEqual(self.store.check(free_lost=True).lost_pages, 0)
        self.tree.remove(b"long")
        self.store.sync()
        before = os.path.getsize(self.path)
        shorter = self.store.compact()
        self.assertEqual(before - shorter, os.path.getsize(self.path))
        self.assertGreater(shorter, 2 * POOL)

    def test_another_process_asks_for_a_backup(self):
        self.tree.put(b"a", b"1")
        ask = [os.environ["VELLUM"], "backup", self.path, self.beside("full")]
        self.assertNotEqual(subprocess.run(ask, capture_output=True).returncode, 0)
        with self.store.control_socket(self.path) as socket:
            subprocess.run(ask, check=True, capture_output=True)
            self.assertFalse(socket.closed)
        self.assertTrue(socket.closed)
        self.assertEqual(self.values("full"), {b"a": b"1"})
        self.assertFalse(os.path.exists(self.path + ".control"))
        with self.assertRaises(ValueError):
            self.store.control_socket(self.beside("full"))
        with self.assertRaises(FileNotFoundError):
            self.store.control_socket(self.beside("none"))

    def test_a_closed_store_is_refused(self):
        self.store.close()
        for call in [
            lambda: self.store.backup(self.beside("full")),
            self.store.check,
            self.store.compact,
        ]:
            with self.assertRaises(ValueError):
                call()


if __name__ == "__main__":
    unittest.main()
