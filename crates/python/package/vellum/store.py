"""Stores: ordered maps from keys to values in a file larger than memory, values of any length.

    >>> from vellum.store import Store
    >>> with Store.open("films.vellum", pool_bytes=64 << 20, create=True) as store:
    ...     films = store.tree("films", create=True)
    ...     with open("metropolis.mkv", "rb") as file, films.writer(b"Metropolis") as writer:
    ...         shutil.copyfileobj(file, writer)
    ...     with films.reader(b"Metropolis") as reader:
    ...         reader.seek(-1000, io.SEEK_END)
    ...         reader.read()

A value that is read or written so may be longer than the pool, and is never in memory as a whole.
"""

import io

from vellum._native import Store, Tree

__all__ = ["Store", "Tree", "ValueReader", "ValueWriter"]

# Bytes that are read at a time where all are asked for.
_PART = 1 << 20


def _check_open(file):
    if file.closed:
        raise ValueError("I/O operation on a closed file")


class ValueReader(io.RawIOBase):
    """The value of a key as a file. Made by Tree.reader().

    It is the value that the key had when the reader was made, whatever becomes of the key. Every
    byte was checked before it is handed out. len() of a reader is the value's length.

    A raw file: read(n) may return fewer bytes than there are. io.BufferedReader(reader) returns as
    many as asked for, and has quick readline() and peek().
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
        # A file is one, also if it is empty.
        return True

    def close(self):
        if not self.closed:
            self._native.close()
        super().close()


class ValueWriter(io.RawIOBase):
    """A file whose content becomes the value of a key. Made by Tree.writer().

    The key has the value, at once and as a whole, when finish() returns, or at the end of a with
    statement. If that ends by an exception, or by abort(), the key keeps what it had.

    close() of a writer that was neither finished nor aborted drops the value, too, and raises
    ValueError: so nothing is lost silently by what only closes its file, such as io.BufferedWriter.
    """

    def __init__(self, native):
        self._native = native

    def writable(self):
        return True

    def write(self, data):
        """Writes all of the data. If Ctrl-C interrupts it, tell() has how many bytes were written."""
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
        """Gives the value to its key, and closes the writer. Returns whether the key had another.

        Raises FileExistsError if the key has a value, and Tree.writer() was told that it is new.
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
        # Of one whose making has failed there is nothing.
        if hasattr(self, "_native"):
            self.abort()
