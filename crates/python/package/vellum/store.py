"""Stores: ordered maps from keys to values in a file larger than memory, values of any length.

    >>> from vellum.store import Store
    >>> with Store.open("films.vellum", pool_bytes=64 << 20, create=True) as store:
    ...     films = store.tree("films", create=True)
    ...     with open("metropolis.mkv", "rb") as file, films.writer(b"Metropolis") as writer:
    ...         shutil.copyfileobj(file, writer)
    ...     with films.reader(b"Metropolis") as reader:
    ...         reader.seek(-1000, io.SEEK_END)
    ...         reader.read()

Such a value may be longer than the pool, and is never in memory as a whole.

An empty tree is filled fastest by load(), which takes any iterable of sorted pairs:

    >>> store.tree("years", create=True).load((b"%d" % year, b"") for year in range(1900, 2000))
    100

A transaction changes entries of any trees, all or none; a snapshot is a view that does not change:

    >>> def sell(transaction):
    ...     left = int(transaction[stock].get(b"apples"))
    ...     transaction[stock].put(b"apples", b"%d" % (left - 1))
    ...     transaction[orders].put(b"order 7", b"an apple", new=True)
    >>> store.transact(sell)
    >>> with store.begin() as transaction:       # commits at the end; an exception aborts
    ...     transaction[stock].remove_range(b"a", b"b")
    >>> store.backup("films.backup")             # a store itself; others go on meanwhile
    >>> with store.snapshot() as snapshot:
    ...     for order, thing in snapshot[orders].prefix(b"order "):
    ...         print(order, thing)
"""

import io

# Here, so that a commit in the handler of a signal never finds it half imported.
import vellum._commits
from vellum._native import (
    Check,
    Conflict,
    ControlSocket,
    Entries,
    Savepoint,
    Snapshot,
    Store,
    Transaction,
    TransactionTree,
    Tree,
    TreeView,
    restore,
)

__all__ = [
    "Check",
    "Conflict",
    "ControlSocket",
    "Entries",
    "Savepoint",
    "Snapshot",
    "Store",
    "Transaction",
    "TransactionTree",
    "Tree",
    "TreeView",
    "ValueReader",
    "ValueWriter",
    "restore",
]

# Bytes that readall() reads at a time.
_PART = 1 << 20


def _check_open(file):
    if file.closed:
        raise ValueError("I/O operation on a closed file")


class ValueReader(io.RawIOBase):
    """The value of a key as a file. Made by Tree.reader().

    The reader keeps the value that the key had when the reader was made, even if the key changes.
    It checks every byte before it returns it. len() of a reader is the value's length.

    A raw file: read(n) may return fewer than n bytes before the end. io.BufferedReader(reader)
    returns n bytes, and has a fast readline() and peek().
    """

    def __init__(self, native):
        self._native = native

    def readable(self):
        return True

    def seekable(self):
        return True

    def readinto(self, buffer):
        _check_open(self)
        with memoryview(buffer) as view, view.cast("B") as target:
            if target.readonly:
                raise TypeError("the buffer is read-only")
            return self._native.readinto(target)

    def write(self, data):
        raise io.UnsupportedOperation("a reader of a value cannot write; see Tree.writer()")

    def readall(self):
        return b"".join(iter(lambda: self.read(_PART), b""))

    def seek(self, offset, whence=io.SEEK_SET):
        _check_open(self)
        if whence == io.SEEK_CUR:
            offset += self._native.tell()
        elif whence == io.SEEK_END:
            offset += len(self._native)
        elif whence != io.SEEK_SET:
            raise ValueError(f"whence is 0, 1 or 2, not {whence!r}")
        if offset < 0:
            raise ValueError(f"a seek to {offset}, before the beginning")
        return self._native.seek(offset)

    def tell(self):
        _check_open(self)
        return self._native.tell()

    def __len__(self):
        return len(self._native)

    def __bool__(self):
        # A file is true, even if it is empty.
        return True

    def close(self):
        if not self.closed:
            self._native.close()
        super().close()


class ValueWriter(io.RawIOBase):
    """A file whose content becomes the value of a key. Made by Tree.writer().

    The key gets the value atomically when finish() returns, or at the end of a with statement. After
    an exception in the with statement, or abort(), the key keeps its old value.

    close() of a writer that was neither finished nor aborted also drops the value, and raises
    ValueError. So a wrapper that only closes its file, such as io.BufferedWriter, loses no value
    silently.
    """

    def __init__(self, native):
        self._native = native

    def writable(self):
        return True

    def write(self, data):
        """Writes all of the data. If Ctrl-C interrupts it, tell() returns how much was written."""
        _check_open(self)
        with memoryview(data) as view, view.cast("B") as source:
            self._native.write(source)
            return len(source)

    def readinto(self, buffer):
        raise io.UnsupportedOperation("a writer of a value cannot read; see Tree.reader()")

    def tell(self):
        _check_open(self)
        return self._native.tell()

    def finish(self):
        """Gives the value to its key, and closes the writer. Returns whether it replaced a value.

        Raises FileExistsError if the key has a value and Tree.writer() was called with new=True.
        """
        _check_open(self)
        try:
            return self._native.finish()
        finally:
            super().close()

    def abort(self):
        """Drops the value, and closes the writer."""
        self._native.abort()
        super().close()

    def close(self):
        if not self.closed:
            unfinished = self._native.abort()
            super().close()
            if unfinished:
                raise ValueError("a writer was closed before finish(): its value was dropped")

    def __exit__(self, kind, error, traceback):
        if self.closed:
            return
        if kind is None:
            self.finish()
        else:
            self.abort()

    def __del__(self):
        # A writer whose construction failed has no native part.
        if hasattr(self, "_native"):
            self.abort()
