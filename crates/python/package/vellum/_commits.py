"""The futures of Transaction.commit_future(), and the threads that set them: one, or a few."""

import atexit
import logging
import os
import threading
from concurrent.futures import Future

from vellum._native import Ends

_logger = logging.getLogger("vellum")


def _set_all(ends):
    while ended := ends.wait():
        for future, error in ended:
            try:
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
            except BaseException:
                # The future has its end. It reports an Exception of a callback itself.
                _logger.exception("a callback of a future ended its thread")
        # While the thread waits, it keeps no future.
        del future, error, ended


class _Commits:
    """Those of one process."""

    def __init__(self):
        # The handler of a signal may commit while its thread holds the lock. Then it starts a thread
        # of its own.
        self._lock = threading.RLock()
        self._ends = Ends()
        self._threads = []

    def begin(self):
        with self._lock:
            if not self._threads:
                if not threading.main_thread().is_alive():
                    # No thread can be started, or this process would not wait for it.
                    raise RuntimeError("the interpreter ends: use commit()")
                # A thread that is not a daemon would keep the process from its end.
                thread = threading.Thread(
                    target=_set_all, args=(self._ends,), name="vellum-commits", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        future = Future()
        # A commit cannot be cancelled.
        future.set_running_or_notify_cancel()
        return self._ends, future

    def close(self):
        """Waits until all futures are set. The threads end before the interpreter does."""
        with self._lock:
            threads = self._threads
        self._ends.close()
        for thread in threads:
            thread.join()


_commits = _Commits()


def _forget():
    global _commits
    _commits = _Commits()


# The child of a fork has no thread, and the lock may be held in it.
os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _commits.close())


def begin():
    """A future, and the list on which its end is to be put."""
    return _commits.begin()
