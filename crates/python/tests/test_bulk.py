"""Bulk loads: Tree.load()."""

import errno
import itertools
import os
import signal
import threading
import time

from test_store import LONG, POOL, InStore, noise
from vellum.store import Store

# Entries that take ten times the pool.
MANY = 60_000


def pair(number):
    return b"key %09d" % number, b"%0150d" % number


class Loading(InStore):
    def assert_empty(self):
        self.assertEqual(list(self.tree.range()), [])

    def assert_sound(self):
        self.store.sync()
        found = self.store.check()
        self.assertEqual((found.damage, found.lost_pages), ([], 0))

    def test_a_load_larger_than_the_pool_survives(self):
        self.assertEqual(self.tree.load(map(pair, range(MANY))), MANY)
        self.assert_sound()
        self.tree.put(*pair(MANY), new=True)
        self.store.close()
        with Store.open(self.path, pool_bytes=POOL) as store:
            self.assertTrue(all(map(lambda found, number: found == pair(number),
                                    store.tree("t").range(), range(MANY + 1))))
            self.assertEqual(len(list(store.tree("t").range())), MANY + 1)

    def test_iterables_of_all_kinds_are_taken(self):
        pairs = [pair(number) for number in range(5000)]
        kinds = [pairs, tuple(pairs), dict(pairs).items(), iter(pairs), (each for each in pairs),
                 zip(*zip(*pairs)), sorted(reversed(pairs))]
        for number, kind in enumerate(kinds):
            tree = self.store.tree(f"tree {number}", create=True)
            self.assertEqual(tree.load(kind), len(pairs))
            self.assertEqual(list(tree.range()), pairs)
            # The entries of one tree go into another.
            copy = self.store.tree(f"copy {number}", create=True)
            self.assertEqual(copy.load(tree.range()), len(pairs))
            self.assertEqual(list(copy.range()), pairs)
        self.assert_sound()

    def test_no_entries_are_a_load(self):
        self.assertEqual((self.tree.load([]), self.tree.load({}.items())), (0, 0))
        self.assert_empty()
        self.assertEqual(self.tree.load([(b"", b"")]), 1)
        self.assertEqual(list(self.tree.range()), [(b"", b"")])

    def test_values_of_all_lengths_come_back(self):
        lengths = [0, 1, 1000, 5000, 300_000, LONG]
        values = [noise(length, length) for length in lengths]
        keys = [b"%d" % number for number in range(len(lengths))]
        self.assertEqual(self.tree.load(zip(keys, values)), len(keys))
        for key, value in zip(keys, values):
            self.assertTrue(self.tree.get(key) == value if len(value) < LONG
                            else self.read(key) == value)
        self.assert_sound()

    def test_keys_that_do_not_ascend_are_named(self):
        for late, name in [(b"b", '"b"'), (b"a", '"a"'), (b"", '""'), (b"\x00", r'"\\x00"')]:
            with self.assertRaisesRegex(ValueError, f"entry 2, {name},"):
                self.tree.load([(b"a!", b"1"), (b"b", b"2"), (late, b"3"), (b"c", b"4")])
            self.assert_empty()
        # Behind the part that a load takes from Python at a time, too.
        with self.assertRaisesRegex(ValueError, "entry 10000, "):
            self.tree.load(itertools.chain(map(pair, range(10_000)), [pair(9999)]))
        self.assert_empty()
        self.assert_sound()

    def test_what_is_no_pair_of_bytes_is_refused(self):
        for wrong in [None, 7, b"ab", (b"a",), (b"a", b"b", b"c"), (b"a", "text"), ("a", b"b"),
                      (b"a", None)]:
            with self.assertRaises((TypeError, ValueError)):
                self.tree.load([pair(1), wrong])
            self.assert_empty()
        for wrong in [None, 7, Loading]:
            with self.assertRaises(TypeError):
                self.tree.load(wrong)
        with self.assertRaisesRegex(ValueError, "100000 bytes"):
            self.tree.load([(bytes(100_000), b"")])
        with self.assertRaises(AttributeError):
            with self.store.begin() as transaction:
                transaction[self.tree].load([])
        self.assert_empty()

    def test_a_tree_with_entries_is_refused(self):
        self.tree.put(b"a", b"one")
        taken = iter([pair(1)])
        with self.assertRaises(OSError) as raised:
            self.tree.load(taken)
        self.assertEqual(raised.exception.errno, errno.ENOTEMPTY)
        self.assertEqual(len(list(taken)), 1)
        self.assertEqual(list(self.tree.range()), [(b"a", b"one")])
        # Once they are removed, the tree is one to load into.
        self.tree.remove(b"a")
        self.assertEqual(self.tree.load([pair(1)]), 1)

    def test_a_tree_that_gets_entries_meanwhile_is_left_as_it_is(self):
        def puts():
            yield pair(1)
            self.tree.put(b"a", b"one")
            yield pair(2)

        def loads():
            yield pair(1)
            self.assertEqual(self.tree.load([pair(5)]), 1)

        for iterable, left in [(puts, (b"a", b"one")), (loads, pair(5))]:
            with self.assertRaises(OSError) as raised:
                self.tree.load(iterable())
            self.assertEqual(raised.exception.errno, errno.ENOTEMPTY)
            self.assertEqual(list(self.tree.range()), [left])
            self.tree.remove(left[0])
        self.assert_sound()

    def test_an_exception_of_the_iterable_cancels_the_load(self):
        class Mine(BaseException):
            pass

        for kind in [ZeroDivisionError, Mine, KeyError, GeneratorExit]:
            for after in [0, 1, 30_000]:
                mine = kind("mine")

                def pairs():
                    yield from map(pair, range(after))
                    raise mine

                with self.assertRaises(kind) as raised:
                    self.tree.load(pairs())
                self.assertIs(raised.exception, mine)
                self.assert_empty()
        self.assert_sound()
        self.assertEqual(self.tree.load([pair(1)]), 1)

    def test_an_iterator_that_ended_is_asked_no_more(self):
        class Resumes:
            ends = 0

            def __iter__(self):
                return self

            def __next__(self):
                self.ends += 1
                if self.ends == 1:
                    raise StopIteration
                return pair(self.ends)

        resumes = Resumes()
        self.assertEqual((self.tree.load(resumes), resumes.ends), (0, 1))

    def test_the_iterable_may_use_the_store(self):
        other = self.store.tree("other", create=True)

        def pairs():
            for number in range(20_000):
                if number % 5000 == 0:
                    other.put(*pair(number))
                    self.store.sync()
                    self.assert_empty()
                    self.assertIsNone(self.tree.get(pair(0)[0]))
                yield pair(number)

        self.assertEqual(self.tree.load(pairs()), 20_000)
        self.assertEqual(len(list(other.range())), 4)
        self.assert_sound()

    def test_a_load_fails_during_a_check(self):
        # The load gives its space back while the check, which keeps changes waiting, waits for Python.
        begun = threading.Event()

        def progress(done, total):
            begun.set()
            time.sleep(0.001)

        def pairs():
            yield from map(pair, range(30_000))
            checker.start()
            self.assertTrue(begun.wait(60))
            raise ZeroDivisionError

        checker = threading.Thread(target=self.store.check, kwargs={"progress": progress})
        for number in range(20_000):
            self.store.tree("other", create=True).put(*pair(number))
        with self.assertRaises(ZeroDivisionError):
            self.tree.load(pairs())
        checker.join()
        self.assert_empty()
        self.assert_sound()

    def test_a_store_that_is_closed_meanwhile_has_none_of_it(self):
        def pairs():
            yield from map(pair, range(10_000))
            self.store.close()
            yield pair(10_000)

        with self.assertRaisesRegex(ValueError, "closed"):
            self.tree.load(pairs())
        with self.assertRaisesRegex(ValueError, "closed"):
            self.tree.load([])
        self.store = Store.open(self.path, pool_bytes=POOL)
        self.addCleanup(self.store.close)
        self.tree = self.store.tree("t")
        self.assert_empty()
        self.assert_sound()

    def test_a_read_only_store_is_refused(self):
        self.store.close()
        with Store.open(self.path, read_only=True) as store:
            with self.assertRaises(OSError) as raised:
                store.tree("t").load([pair(1)])
            self.assertEqual(raised.exception.errno, errno.EROFS)

    def test_the_child_of_a_fork_leaves_the_load_alone(self):
        def pairs():
            yield from map(pair, range(10_000))
            if os.fork() == 0:
                children.append(os.getpid())
                return
            yield pair(10_000)

        children = []
        try:
            loaded = self.tree.load(pairs())
        except BaseException as error:
            if not children:
                raise
            os._exit(0 if isinstance(error, ValueError) and "fork" in str(error) else 1)
        if children:
            os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.wait()[1]), 0)
        self.assertEqual((loaded, len(list(self.tree.range()))), (10_001, 10_001))
        self.assert_sound()

    def test_ctrl_c_ends_a_load(self):
        def endless():
            return map(pair, itertools.count())

        # One that runs no code of Python, and one that does.
        built_in = zip(map(b"%09d".__mod__, itertools.count()), itertools.repeat(b""))
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        for pairs in [built_in, endless()]:
            with self.assertRaises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                try:
                    self.tree.load(pairs)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            self.assert_empty()
        self.assert_sound()

    def test_threads_load_at_once(self):
        def work(number):
            tree = self.store.tree(f"tree {number}", create=True)
            loaded.append(tree.load(map(pair, range(number, 20_000))))

        loaded = []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(loaded), [19_997, 19_998, 19_999, 20_000])
        for number in range(4):
            self.assertEqual(next(self.store.tree(f"tree {number}").range()), pair(number))
        self.assert_sound()

    def test_other_threads_go_on(self):
        # A busy machine may keep the counter waiting for the whole time of a load.
        for attempt in range(20):
            if self.turns_during_a_load(attempt) > 4:
                return
        self.fail("no other thread had a turn")

    def turns_during_a_load(self, attempt):
        ended, turns = threading.Event(), []

        def count():
            while not ended.is_set():
                turns.append(time.monotonic())
                time.sleep(0.001)

        def pairs():
            times.append(time.monotonic())
            yield b"long", value
            times.append(time.monotonic())

        value, times = bytes(64 * POOL), []
        counter = threading.Thread(target=count)
        counter.start()
        self.store.tree(f"turns {attempt}", create=True).load(pairs())
        ended.set()
        counter.join()
        # The load has the value before it asks for the next pair.
        return sum(times[0] < turn < times[1] for turn in turns)
