"""Transactions, snapshots, and stores with a log."""

import collections
import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

from test_store import LONG, POOL, InStore, noise
from vellum.store import Conflict, Snapshot, Store, Transaction, Tree, TreeView


class Transactions(InStore):
    def setUp(self):
        super().setUp()
        self.other = self.store.tree("other", create=True)

    def test_all_changes_or_none(self):
        with self.store.begin() as transaction:
            self.assertIsInstance(transaction, Transaction)
            transaction[self.tree].put(b"a", b"1")
            transaction[self.other].put(b"b", b"2", new=True)
            with self.assertRaises(FileExistsError):
                transaction[self.other].put(b"b", b"3", new=True)
            self.assertEqual(transaction[self.tree].get(b"a"), b"1")
            self.assertEqual((self.tree.get(b"a"), self.other.get(b"b")), (None, None))
            self.assertFalse(transaction.ended)
        self.assertTrue(transaction.ended)
        self.assertEqual((self.tree.get(b"a"), self.other.get(b"b")), (b"1", b"2"))
        with self.assertRaises(ZeroDivisionError):
            with self.store.begin() as transaction:
                self.assertTrue(transaction[self.tree].remove(b"a"))
                self.assertFalse(transaction[self.tree].remove(b"a"))
                1 / 0
        self.assertTrue(transaction.ended)
        self.assertEqual(self.tree.get(b"a"), b"1")

    def test_a_block_may_end_its_transaction(self):
        with self.store.begin() as transaction:
            transaction[self.tree].put(b"a", b"1")
            transaction.commit()
        with self.store.begin() as transaction:
            transaction[self.tree].put(b"a", b"2")
            transaction.abort()
            transaction.abort()
        self.assertEqual(self.tree.get(b"a"), b"1")
        transaction = self.store.begin()
        transaction[self.tree].put(b"a", b"3")
        del transaction
        gc.collect()
        self.assertEqual(self.tree.get(b"a"), b"1")

    def test_a_transaction_sees_one_moment(self):
        self.tree.put(b"a", b"1")
        with self.store.begin() as transaction:
            self.tree.put(b"a", b"2")
            self.tree.put(b"b", b"2")
            view = transaction[self.tree]
            self.assertEqual(view.get(b"a"), b"1")
            self.assertTrue(b"a" in view and b"b" not in view)
            self.assertEqual(list(view.range()), [(b"a", b"1")])
            self.assertEqual(view.multi_get([b"b", b"a", b"a"]), [None, b"1", b"1"])
            self.assertEqual(view.name, "t")

    def test_a_conflict_is_an_exception_of_its_own(self):
        self.assertFalse(issubclass(Conflict, (OSError, ValueError)))
        self.tree.put(b"a", b"1")
        with self.assertRaisesRegex(Conflict, "try again"):
            with self.store.begin() as transaction:
                transaction[self.other].put(b"b", transaction[self.tree].get(b"a"))
                self.tree.put(b"a", b"2")
        self.assertTrue(transaction.ended)
        self.assertIsNone(self.other.get(b"b"))
        # A key that was not there counts as well, and so does a range.
        for read in [lambda tree: tree.get(b"new"), lambda tree: list(tree.prefix(b"n"))]:
            with self.assertRaises(Conflict):
                with self.store.begin() as transaction:
                    read(transaction[self.tree])
                    transaction[self.other].put(b"b", b"")
                    self.tree.put(b"new", b"2")
            self.tree.remove(b"new")

    def test_isolation(self):
        def skew(isolation):
            """Each of two transactions removes a doctor if another one stays."""
            self.tree.put(b"Ada", b"")
            self.tree.put(b"Ben", b"")
            both = [self.store.begin(isolation=isolation, durability="none") for _ in range(2)]
            for transaction, name in zip(both, [b"Ada", b"Ben"]):
                self.assertEqual(len(list(transaction[self.tree].range())), 2)
                transaction[self.tree].remove(name)
            for transaction in both:
                transaction.commit()
            return len(list(self.tree.range()))

        self.assertEqual(skew("snapshot"), 0)
        with self.assertRaises(Conflict):
            skew("serializable")
        one, two = [self.store.begin(isolation="snapshot") for _ in range(2)]
        one[self.tree].put(b"Ada", b"1")
        two[self.tree].put(b"Ada", b"2")
        one.commit()
        self.assertRaises(Conflict, two.commit)

    def test_a_transaction_depends_on_what_it_has_passed(self):
        for number in range(2000):
            self.tree.put(b"%04d" % number, b"")
        for behind, kind in [(b"0001x", Conflict), (b"1500x", None)]:
            transaction = self.store.begin(durability="none")
            entries = transaction[self.tree].range()
            for _ in range(10):
                next(entries)
            transaction[self.other].put(b"a", b"")
            self.tree.put(behind, b"")
            if kind:
                self.assertRaises(kind, transaction.commit)
            else:
                transaction.commit()

    def test_transact_tries_again(self):
        self.tree.put(b"n", b"0")
        calls = []

        def add(transaction):
            tree = transaction[self.tree]
            number = int(tree.get(b"n"))
            calls.append(number)
            if len(calls) < 6:
                self.tree.put(b"n", b"%d" % (number + 10))
            tree.put(b"n", b"%d" % (number + 1))
            return number

        self.assertEqual(self.store.transact(add), 50)
        self.assertEqual((len(calls), self.tree.get(b"n")), (6, b"51"))
        with self.assertRaises(ZeroDivisionError):
            self.store.transact(lambda transaction: 1 / 0)

        def end(transaction):
            transaction[self.tree].put(b"n", b"none")
            transaction.abort()
            return "ended"

        self.assertEqual(self.store.transact(end, isolation="snapshot", durability="none"), "ended")
        self.assertEqual(self.tree.get(b"n"), b"51")
        self.assertRaises(TypeError, self.store.transact, 5)

        def interrupted(transaction):
            transaction[self.tree].put(b"n", b"none")
            raise KeyboardInterrupt

        self.assertRaises(KeyboardInterrupt, self.store.transact, interrupted)
        self.assertEqual(self.tree.get(b"n"), b"51")

    def test_a_finished_transaction_says_so(self):
        transaction = self.store.begin()
        view, savepoint = transaction[self.tree], transaction.savepoint()
        view.put(b"a", b"1")
        entries = view.range()
        transaction.commit()
        uses = [transaction.commit, transaction.savepoint, savepoint.rollback, savepoint.release]
        uses += [lambda: next(entries), lambda: view.get(b"a"), lambda: b"a" in view]
        uses += [lambda: view.put(b"a", b""), lambda: view.remove(b"a"), view.remove_range]
        uses += [lambda: view.multi_get([b"a"]), lambda: list(view.prefix(b"a"))]
        uses += [lambda: transaction[self.tree].get(b"a")]
        for use in uses:
            with self.assertRaisesRegex(ValueError, "the transaction has ended"):
                use()
        transaction.abort()
        self.assertEqual(self.tree.get(b"a"), b"1")

    def test_what_is_refused_says_why(self):
        self.assertRaisesRegex(ValueError, "isolation", self.store.begin, isolation="none")
        self.assertRaisesRegex(ValueError, "durability", self.store.begin, durability="always")
        self.assertRaises(TypeError, self.store.begin, "snapshot")
        self.assertRaises(TypeError, Transaction)
        with Store.open(self.path + ".b", pool_bytes=POOL, create=True) as second:
            foreign = second.tree("t", create=True)
            with self.store.begin() as transaction, self.store.snapshot() as snapshot:
                for use in [transaction[foreign].get, snapshot[foreign].get]:
                    self.assertRaisesRegex(ValueError, "another store", use, b"a")
                view = transaction[self.tree]
                for wrong in ["t", self.store, None, view]:
                    with self.assertRaises(TypeError):
                        transaction[wrong]
                for use in [view.get, view.range, view.prefix, view.remove]:
                    self.assertRaises(TypeError, use, "text")
                self.assertRaises(TypeError, view.multi_get, [b"a", "text"])
                self.assertRaises(ValueError, view.put, bytes(100_000), b"")
                for value in [noise(POOL), noise(POOL // 5)]:
                    with self.assertRaises(OSError) as raised:
                        for number in range(4):
                            view.put(b"%d" % number, value)
                    self.assertIn(raised.exception.errno, [errno.E2BIG, errno.EFBIG])

    def test_what_outlives_its_store_says_so(self):
        self.tree.put(b"a", b"1")
        self.tree.put(b"b", b"1")
        transaction, snapshot = self.store.begin(), self.store.snapshot()
        views = [transaction[self.tree], snapshot[self.tree], self.tree]
        entries = [view.range() for view in views]
        for iterator in entries:
            next(iterator)
        views[0].put(b"a", b"2")
        self.store.close()
        uses = [self.store.begin, self.store.snapshot, lambda: views[0].put(b"a", b"2")]
        uses += [transaction.commit, lambda: self.store.transact(print)]
        uses += [lambda iterator=iterator: next(iterator) for iterator in entries]
        uses += [lambda view=view: view.get(b"a") for view in views]
        for use in uses:
            self.assertRaisesRegex(ValueError, "closed|ended", use)
        snapshot.close()
        with Store.open(self.path, pool_bytes=POOL) as store:
            self.assertEqual(store.tree("t").get(b"a"), b"1")


class Savepoints(InStore):
    def test_an_exception_undoes_a_part(self):
        with self.store.begin() as transaction:
            view = transaction[self.tree]
            view.put(b"a", b"1")
            with self.assertRaises(ZeroDivisionError):
                with transaction.savepoint():
                    view.put(b"a", b"2")
                    view.put(b"b", b"2")
                    with transaction.savepoint():
                        view.put(b"c", b"2")
                    1 / 0
            with transaction.savepoint():
                view.put(b"d", b"4")
        self.assertEqual(list(self.tree.range()), [(b"a", b"1"), (b"d", b"4")])

    def test_rollback(self):
        transaction = self.store.begin()
        view = transaction[self.tree]
        view.put(b"a", b"1")
        first = transaction.savepoint()
        self.assertEqual(view.remove_range(), 1)
        second = transaction.savepoint()
        view.put(b"a", b"2")
        second.rollback()
        self.assertIsNone(view.get(b"a"))
        entries = view.range()
        first.rollback()
        self.assertEqual(list(entries), [(b"a", b"1")])
        self.assertRaisesRegex(ValueError, "savepoint", second.rollback)
        view.put(b"a", b"3")
        first.rollback()
        # The exception of the block is raised, not that of its savepoint.
        with self.assertRaises(ZeroDivisionError):
            with transaction.savepoint():
                first.rollback()
                1 / 0
        with self.assertRaises(ZeroDivisionError):
            with transaction.savepoint():
                transaction.commit()
                1 / 0
        self.assertEqual(self.tree.get(b"a"), b"1")

    def test_release(self):
        with self.store.begin() as transaction:
            view = transaction[self.tree]
            first, second = transaction.savepoint(), transaction.savepoint()
            view.put(b"a", b"1")
            third = transaction.savepoint()
            second.release()
            for gone in [second.release, second.rollback, third.release, third.rollback]:
                self.assertRaisesRegex(ValueError, "savepoint", gone)
            first.rollback()
            self.assertIsNone(view.get(b"a"))
            view.put(b"a", b"2")
            first.release()
            self.assertRaisesRegex(ValueError, "savepoint", first.rollback)
        self.assertEqual(self.tree.get(b"a"), b"2")

    def test_the_end_of_a_with_statement_releases(self):
        # Together, the values that are replaced are larger than the most that a transaction keeps.
        with self.store.begin() as transaction:
            view = transaction[self.tree]
            for number in range(20):
                with transaction.savepoint() as savepoint:
                    view.put(b"a", noise(POOL // 10))
                with self.assertRaises(ZeroDivisionError):
                    with transaction.savepoint():
                        view.put(b"a", b"")
                        1 / 0
                self.assertRaisesRegex(ValueError, "savepoint", savepoint.rollback)
            # Nothing is left to release.
            with transaction.savepoint() as first:
                with transaction.savepoint():
                    first.release()
            with transaction.savepoint():
                transaction.commit()
        self.assertTrue(self.tree.get(b"a") == noise(POOL // 10))


class Ranges(InStore):
    def test_ranges_of_trees_snapshots_and_transactions(self):
        for letter in b"hbdfgcea":
            self.tree.put(bytes([letter]), bytes([letter]) * 2)
        with self.store.snapshot() as snapshot, self.store.begin() as transaction:
            views = [self.tree, snapshot[self.tree], transaction[self.tree]]
            for view in views:
                self.assertIsInstance(view, TreeView)
                for arguments, keys in [
                    ((), b"abcdefgh"),
                    ((b"c", b"f"), b"cde"),
                    ((b"bb", b"ee"), b"cde"),
                    ((None, b"c"), b"ab"),
                    ((b"g",), b"gh"),
                    ((b"f", b"c"), b""),
                    ((b"c", b"c"), b""),
                    ((b"c\0", b"f\0"), b"def"),
                    ((b"", b""), b""),
                ]:
                    found = list(view.range(*arguments))
                    self.assertEqual(b"".join(key for key, _ in found), keys)
                    self.assertTrue(all(value == key * 2 for key, value in found))
                    back = list(view.range(*arguments, reverse=True))
                    self.assertEqual(back, found[::-1])
                for prefix, keys in [(b"", b"abcdefgh"), (b"d", b"d"), (b"dd", b""), (b"\xff", b"")]:
                    found = list(view.prefix(prefix))
                    self.assertEqual(b"".join(key for key, _ in found), keys)
                    self.assertEqual(list(view.prefix(prefix, reverse=True)), found[::-1])
                self.assertEqual(view.multi_get([]), [])
                self.assertEqual(view.multi_get([b"c", b"x"]), [b"cc", None])
                entries = view.range()
                self.assertIs(iter(entries), entries)
                self.assertEqual(sum(1 for _ in entries), 8)
                self.assertEqual((next(entries, "end"), next(entries, "end")), ("end", "end"))

    def test_long_ranges_while_the_tree_changes(self):
        count = 20_000
        with self.store.begin(durability="none") as transaction:
            for number in range(0, count, 10):
                transaction[self.tree].put(b"%06d" % number, b"")
        for number in range(count):
            self.tree.put(b"%06d" % number, b"%d" % number)
        with self.store.snapshot() as snapshot, self.store.begin() as transaction:
            seen, view = 0, transaction[self.tree]
            for (key, value), (same, _) in zip(snapshot[self.tree].range(), view.range()):
                self.assertEqual((int(key), int(value), key), (seen, seen, same))
                if seen % 3 == 0:
                    self.assertTrue(self.tree.remove(key))
                seen += 1
            self.assertEqual(seen, count)
            transaction.abort()
        self.assertEqual(len(list(self.tree.range())), count - (count + 2) // 3)

    def test_an_iterator_sees_the_changes_of_its_transaction(self):
        for number in range(500):
            self.tree.put(b"%03d" % number, b"")
        with self.store.begin(durability="none") as transaction:
            view, seen = transaction[self.tree], 0
            for key, value in view.range():
                self.assertEqual((int(key), value), (seen, b"new" if seen % 10 else b""))
                if seen % 10 == 0:
                    for ahead in range(seen + 1, seen + 10):
                        view.put(b"%03d" % ahead, b"new")
                view.remove(key)
                seen += 1
            self.assertEqual(seen, 500)
            self.assertEqual(list(view.range()), [])
        self.assertEqual(list(self.tree.range()), [])

    def test_values_longer_than_the_pool(self):
        self.tree.put(b"a", b"1")
        self.write(b"b", noise(LONG))
        self.tree.put(b"c", b"3")
        with self.store.snapshot() as snapshot, self.store.begin() as transaction:
            self.write(b"b", b"short")
            for view in [snapshot[self.tree], transaction[self.tree]]:
                self.assertTrue(view.get(b"b") == noise(LONG))
                self.assertTrue(view.multi_get([b"a", b"b"]) == [b"1", noise(LONG)])
                self.check_long(view)
            transaction.abort()
        self.write(b"b", noise(LONG))
        self.check_long(self.tree)

    def check_long(self, view):
        for reverse in [False, True]:
            entries = sorted(view.range(reverse=reverse))
            self.assertEqual([key for key, _ in entries], [b"a", b"b", b"c"])
            self.assertTrue(entries[1][1] == noise(LONG))


class Snapshots(InStore):
    def test_a_snapshot_does_not_change(self):
        self.tree.put(b"a", b"1")
        with self.store.snapshot() as snapshot:
            self.assertIsInstance(snapshot, Snapshot)
            view = snapshot[self.tree]
            self.tree.put(b"a", b"2")
            self.tree.put(b"b", b"2")
            later = self.store.tree("later", create=True)
            later.put(b"a", b"2")
            self.assertEqual((view.get(b"a"), view.get(b"b")), (b"1", None))
            self.assertEqual(list(view.range()), [(b"a", b"1")])
            self.assertEqual(list(snapshot[later].range()), [])
            self.assertFalse(hasattr(view, "put"))
            entries = view.range()
            self.assertFalse(snapshot.closed)
        self.assertTrue(snapshot.closed)
        snapshot.close()
        for use in [lambda: view.get(b"a"), lambda: next(entries), lambda: b"a" in view]:
            self.assertRaisesRegex(ValueError, "the snapshot is closed", use)
        self.assertRaises(TypeError, Snapshot)


class Logs(InStore):
    def test_a_killed_process_loses_nothing_that_was_committed(self):
        program = """if True:
            import os, signal, sys
            from vellum.store import Store
            store = Store.open(sys.argv[1], pool_bytes=1 << 20, create=True)
            tree = store.tree("t", create=True)
            for number in range(100):
                with store.begin() as transaction:
                    transaction[tree].put(b"%d" % number, b"x")
                    transaction[tree].put(b"last", b"%d" % number)
            store.begin(durability="buffered")[tree].put(b"last", b"aborted")
            os.kill(os.getpid(), signal.SIGKILL)
        """
        path = self.path + ".log-test"
        ended = subprocess.run([sys.executable, "-c", program, path])
        self.assertEqual(ended.returncode, -signal.SIGKILL)
        self.assertTrue(os.path.isdir(path + ".log"))
        with self.assertRaises(OSError) as raised:
            Store.open(path, read_only=True)
        self.assertEqual(raised.exception.errno, errno.EUCLEAN)
        with Store.open(path, pool_bytes=POOL) as store:
            tree = store.tree("t")
            self.assertEqual((len(list(tree.range())), tree.get(b"last")), (101, b"99"))

    def test_the_folder_of_the_log(self):
        folder = self.path + ".folder"
        with Store.open(self.path + ".b", pool_bytes=POOL, create=True, log_folder=folder) as store:
            with store.begin(durability="buffered") as transaction:
                transaction[store.tree("t", create=True)].put(b"a", b"1")
            self.assertNotEqual(os.listdir(folder), [])
            self.assertFalse(os.path.exists(self.path + ".b.log"))
        self.assertEqual(os.listdir(folder), [])
        for options in [{"log": True}, {"log_folder": folder}]:
            with self.assertRaisesRegex(ValueError, "log"):
                Store.open(self.path + ".b", read_only=True, **options)


class Waiting(InStore):
    def test_threads_count(self):
        def count():
            for _ in range(50):
                self.store.transact(add, durability="none")

        def add(transaction):
            number = int(transaction[self.tree].get(b"n") or b"0")
            transaction[self.tree].put(b"n", b"%d" % (number + 1))

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.tree.get(b"n"), b"200")

    def test_threads_share_a_transaction(self):
        transaction = self.store.begin(durability="none")
        view, entries, failed = transaction[self.tree], None, []

        def use(thread):
            try:
                for number in range(300):
                    view.put(b"%d %d" % (thread, number), b"")
                    if len(list(view.prefix(b"%d " % thread))) != number + 1:
                        failed.append(number)
                    with transaction.savepoint():
                        view.get(b"0 0")
            except ValueError as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        # One thread commits while others use the transaction and one iterator of it.
        entries, ends = view.range(), []

        def use_until_the_end():
            try:
                while True:
                    view.put(b"0 0", b"")
                    next(entries, None)
            except ValueError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=use_until_the_end) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        transaction.commit()
        for thread in threads:
            thread.join()
        self.assertEqual([end[:25] for end in ends], ["the transaction has ended"] * 3)
        self.assertEqual(len(list(self.tree.range())), 900)

    def test_other_threads_go_on(self):
        """One thread counts while another one waits for its commits to be durable."""
        ended, turns = threading.Event(), []

        def count():
            while not ended.is_set():
                turns.append(time.monotonic())
                time.sleep(0.0001)

        # Commits that sync the file, with 8 MiB each.
        with Store.open(self.path + ".b", pool_bytes=64 * POOL, create=True) as store:
            tree = store.tree("t", create=True)
            counter = threading.Thread(target=count)
            counter.start()
            during = 0
            # A busy machine may keep the counter waiting for whole commits.
            for commits in range(400):
                if commits >= 20 and during > 4:
                    break
                transaction = store.begin()
                for number in range(8):
                    transaction[tree].put(b"%d" % number, bytes(POOL))
                begin = time.monotonic()
                transaction.commit()
                end = time.monotonic()
                during += sum(begin < turn < end for turn in turns)
            ended.set()
            counter.join()
        self.assertGreater(during, 4)

    def test_ctrl_c_ends_an_iteration(self):
        for number in range(10_000):
            self.tree.put(b"%05d" % number, b"")
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        # No step of these iterators runs Python code.
        entries = itertools.chain(*[self.tree.range() for _ in range(10_000)])
        with self.assertRaises(KeyboardInterrupt):
            # The signal may come before the next call begins.
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            collections.deque(entries, maxlen=0)
        self.assertIsNotNone(next(entries, None), "it has ended by itself")

    def test_the_child_of_a_fork_leaves_its_parents_transaction_alone(self):
        self.tree.put(b"a", b"1")
        transaction, snapshot = self.store.begin(), self.store.snapshot()
        view, seen = transaction[self.tree], snapshot[self.tree]
        view.put(b"a", b"2")
        entries, savepoint = view.range(), transaction.savepoint()
        uses = [transaction.commit, transaction.abort, snapshot.close, savepoint.rollback]
        uses += [lambda: view.get(b"a"), lambda: seen.get(b"a"), lambda: next(entries)]
        uses += [lambda: view.put(b"a", b""), view.range, self.store.begin, self.store.snapshot]
        child = os.fork()
        if child == 0:
            refused = 0
            for use in uses:
                try:
                    use()
                except ValueError:
                    refused += 1
            del transaction, snapshot, view, seen, entries, savepoint, uses, use
            self.store = self.tree = None
            gc.collect()
            os._exit(0 if refused == 11 else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual((seen.get(b"a"), next(entries)), (b"1", (b"a", b"2")))
        transaction.commit()
        snapshot.close()
        self.assertIsInstance(self.tree, Tree)
        self.assertEqual(self.tree.get(b"a"), b"2")
