"""Commits that return before they are durable."""

import asyncio
import concurrent.futures
import errno
import gc
import os
import subprocess
import sys
import threading

from test_store import POOL, InStore
from vellum.store import Conflict, Store

PATIENCE = 120
MANY = 1000

# The child of a test: its store, and a function that commits.
CHILD = """
import atexit, os, resource, signal, sys
late = []
atexit.register(lambda: [call() for call in late])
from vellum.store import Store
store = Store.open(sys.argv[1])
tree = store.tree("t")
def commit(key):
    transaction = store.begin()
    transaction[tree].put(key, b"v")
    return transaction.commit_future()
"""


# Has the next look at the clock fail that the thread has within the package's native part. Rust
# panics then.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <time.h>

static __thread int fails;

void fail_clock(void) { fails = 1; }

int clock_gettime(clockid_t clock, struct timespec *time)
{
	int (*own)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
	Dl_info caller;

	if (!fails || !dladdr(__builtin_return_address(0), &caller) ||
	    !strstr(caller.dli_fname, "_native"))
		return own(clock, time);
	fails = 0;
	errno = EINVAL;
	return -1;
}
"""


class Commits(InStore):
    def change(self, key, value=b"v", **options):
        transaction = self.store.begin(**options)
        transaction[self.tree].put(key, value)
        return transaction

    def commit(self, key, value=b"v", **options):
        return self.change(key, value, **options).commit_future()

    def all_of(self, futures):
        done, unknown = concurrent.futures.wait(futures, PATIENCE)
        self.assertEqual(len(unknown), 0)
        return [future.exception() for future in done]

    def child(self, code, **environment):
        """Closes the store, and runs code that opens it."""
        self.store.close()
        arguments = [sys.executable, "-c", CHILD + code, self.path]
        environment = os.environ | environment
        child = subprocess.run(
            arguments, capture_output=True, text=True, timeout=PATIENCE, env=environment
        )
        self.assertEqual(child.returncode, 0, child.stderr)
        return child.stdout

    def test_a_future_ends_when_the_commit_is_durable(self):
        for durability in ["synced", "buffered", "none"]:
            transaction = self.change(b"a", durability.encode(), durability=durability)
            future = transaction.commit_future()
            self.assertIsInstance(future, concurrent.futures.Future)
            self.assertTrue(transaction.ended)
            self.assertEqual(self.tree.get(b"a"), durability.encode())
            self.assertFalse(future.cancel())
            self.assertIsNone(future.result(PATIENCE))
            self.assertTrue(future.done())

    def test_many_are_under_way(self):
        futures = [self.commit(b"%d" % n) for n in range(MANY)]
        self.assertEqual(self.all_of(futures), [None] * MANY)

    def test_asyncio_awaits_them(self):
        async def run():
            futures = [asyncio.wrap_future(self.commit(b"%d" % n)) for n in range(MANY)]
            self.assertEqual(await asyncio.gather(*futures), [None] * MANY)
            with self.assertRaises(asyncio.CancelledError):
                task = asyncio.ensure_future(asyncio.wrap_future(self.commit(b"c")))
                task.cancel()
                await task

        asyncio.run(asyncio.wait_for(run(), PATIENCE))
        # A cancelled wait does not end the commit.
        self.assertEqual(self.tree.get(b"c"), b"v")
        self.commit(b"d").result(PATIENCE)

    def test_a_commit_that_fails_has_no_future(self):
        first, second = [self.change(b"a", isolation="snapshot") for _ in range(2)]
        first.commit_future().result(PATIENCE)
        with self.assertRaises(Conflict):
            second.commit_future()
        for transaction in [first, second]:
            with self.assertRaises(ValueError):
                transaction.commit_future()
        self.commit(b"a").result(PATIENCE)

    def test_a_close_ends_them(self):
        late = self.change(b"late")
        futures = [self.commit(b"%d" % n) for n in range(MANY)]
        self.store.close()
        self.assertEqual(self.all_of(futures), [None] * MANY)
        with self.assertRaises(ValueError):
            late.commit_future()

    def test_a_store_without_a_reference_ends_them(self):
        futures = [self.commit(b"%d" % n) for n in range(MANY)]
        # The clean-up has a reference.
        self._cleanups = [one for one in self._cleanups if one[0] != self.store.close]
        self.store = self.tree = None
        gc.collect()
        ends = self.all_of(futures)
        with Store.open(self.path) as store:
            tree = store.tree("t")
            for n in range(MANY):
                self.assertEqual(tree.get(b"%d" % n), b"v")
        self.assertEqual(ends, [None] * MANY)

    def test_exceptions_of_callbacks_do_not_end_the_others(self):
        called = []

        def leave(future):
            called.append(future)
            raise SystemExit if len(called) % 2 else ZeroDivisionError

        with self.assertLogs():
            for n in range(10):
                future = self.commit(b"%d" % n)
                try:
                    future.add_done_callback(leave)
                except SystemExit:
                    # The commit was durable before: this thread has called the function.
                    self.assertTrue(future.done())
                future.result(PATIENCE)
            self.commit(b"last").result(PATIENCE)
            # A callback may still run when its future has ended.
            self.commit(b"last").result(PATIENCE)
        self.assertEqual(len(called), 10)

    def test_a_callback_uses_the_store(self):
        closed = threading.Event()

        def end(_):
            self.tree.put(b"b", b"of the callback")
            self.change(b"c").commit()
            self.store.sync()
            self.store.close()
            closed.set()

        self.commit(b"a").add_done_callback(end)
        self.assertTrue(closed.wait(PATIENCE))
        with Store.open(self.path) as store:
            self.assertEqual(store.tree("t").get(b"b"), b"of the callback")

    def test_threads_that_wait_for_the_log_and_for_each_other(self):
        """All kinds of waits at once, while one thread rarely lets the interpreter go."""
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(0.05)
        ended, counts = threading.Event(), []

        def compute():
            while not ended.is_set():
                sum(range(1000))

        def work(name):
            futures = []
            for n in range(40):
                futures.append(self.commit(b"%d %d" % (name, n)))
                self.change(b"%d" % name).commit()
                if n % 10 == 0:
                    self.store.sync()
                    futures[-1].result(PATIENCE)
            counts.append(self.all_of(futures).count(None))

        busy = threading.Thread(target=compute)
        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in [busy, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        busy.join()
        self.assertEqual(counts, [40] * 4)

    def test_a_store_without_a_log(self):
        path = self.path + ".unlogged"
        with Store.open(path, create=True, log=False, pool_bytes=POOL) as store:
            transaction = store.begin()
            transaction[store.tree("t", create=True)].put(b"a", b"1")
            self.assertIsNone(transaction.commit_future().result(PATIENCE))
            self.assertIsNone(store.begin().commit_future().result(PATIENCE))

    def test_the_end_of_the_interpreter_waits_for_them(self):
        said = self.child(f"""
told = []
def refused():
    transaction = store.begin()
    transaction[tree].put(b"late", b"v")
    try:
        transaction.commit_future()
    except RuntimeError:
        transaction.commit()
        print("refused after", len(told))
late.append(refused)
for n in range({MANY}):
    commit(b"%d" % n).add_done_callback(told.append)
""")
        self.assertEqual(said, f"refused after {MANY}\n")
        with Store.open(self.path) as store:
            tree = store.tree("t")
            self.assertEqual(len(list(tree.range())), MANY + 1)

    def test_ctrl_c_leaves_no_commit_to_wait_for(self):
        """Neither when it comes before the commit, nor at the end of the interpreter."""
        self.child("""
import vellum._commits
class Interrupted(vellum._commits.Future):
    def set_running_or_notify_cancel(self):
        raise KeyboardInterrupt
own, vellum._commits.Future = vellum._commits.Future, Interrupted
try:
    commit(b"a")
except KeyboardInterrupt:
    vellum._commits.Future = own
    commit(b"b").result(60)
""")
        with Store.open(self.path) as store:
            self.assertEqual([key for key, _ in store.tree("t").range()], [b"b"])

    def test_the_first_commit_may_not_come_at_the_end(self):
        """No thread that sets its future would end in time."""
        said = self.child("""
def first():
    transaction = store.begin()
    transaction[tree].put(b"%d" % len(said), b"v")
    try:
        transaction.commit_future()
    except RuntimeError as error:
        transaction.commit()
        said.append(error)
        print(error)
said = []
late.append(first)
atexit.register(first)
""")
        self.assertEqual(said, "the interpreter ends: use commit()\n" * 2)
        with Store.open(self.path) as store:
            self.assertEqual([key for key, _ in store.tree("t").range()], [b"0", b"1"])

    def test_a_commit_in_the_handler_of_a_signal(self):
        """The signal comes while the first commit starts its thread."""
        said = self.child("""
import threading
own, futures = threading.Thread.start, []
def start(thread):
    threading.Thread.start = own
    signal.raise_signal(signal.SIGUSR1)
    own(thread)
def handle(*_):
    futures.append(commit(b"of the handler"))
    print(futures[0].result(60))
signal.alarm(60)
signal.signal(signal.SIGUSR1, handle)
threading.Thread.start = start
futures.append(commit(b"interrupted"))
print(futures[1].result(60))
""")
        self.assertEqual(said, "None\nNone\n")

    def test_a_panic_in_a_commit_does_not_keep_the_process(self):
        shim = self.path + ".so"
        compile = ["cc", "-shared", "-fPIC", "-o", shim, "-xc", "-", "-ldl"]
        subprocess.run(compile, input=CLOCK, text=True, check=True)
        said = self.child("""
import ctypes
signal.alarm(60)
commit(b"before").result(60)
transaction = store.begin()
transaction[tree].put(b"long", b"v" * 100_000)
clock = ctypes.PyDLL(None)
clock.fail_clock()
try:
    transaction.commit_future()
except BaseException as panic:
    print(type(panic).__name__)
""", LD_PRELOAD=shim)
        self.assertEqual(said, "PanicException\n")
        with Store.open(self.path) as store:
            self.assertEqual([key for key, _ in store.tree("t").range()], [b"before"])

    def test_a_log_that_fails(self):
        said = self.child("""
import concurrent.futures
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
futures = []
try:
    for n in range(1000):
        futures.append(commit(b"%d" % n))
except OSError:
    pass
done, unknown = concurrent.futures.wait(futures, 60)
wrong = [one for one in done if not isinstance(one.exception(), OSError)]
print(len(futures) > 0, len(unknown), len(wrong), futures[0].exception().errno, flush=True)
os._exit(0)
""")
        self.assertEqual(said, f"True 0 0 {errno.EIO}\n")

    def test_the_child_of_a_fork_has_futures_of_its_own(self):
        self.commit(b"a").result(PATIENCE)
        futures = [self.commit(b"%d" % n) for n in range(MANY)]
        late = self.change(b"late")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                late.commit_future()
            except ValueError:
                with Store.open(self.path + ".child", create=True, pool_bytes=POOL) as store:
                    transaction = store.begin()
                    transaction[store.tree("t", create=True)].put(b"a", b"1")
                    transaction.commit_future().result(PATIENCE)
                    code = 0
            finally:
                os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(self.all_of(futures), [None] * MANY)
        self.assertIsNone(late.commit_future().result(PATIENCE))
