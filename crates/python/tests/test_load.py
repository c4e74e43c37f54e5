"""Files, with and without the cache daemon, which $VELLUM names as a program."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings

import numpy
import safetensors.numpy

from vellum.morsel import Morsel, load_safetensors

SOCKET = "VELLUM_MORSELD"


class Loading(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        before = os.environ.get(SOCKET)
        self.addCleanup(lambda: os.environ.pop(SOCKET) if before is None
                        else os.environ.update({SOCKET: before}))
        self.socket = os.environ[SOCKET] = str(self.folder / "socket")

    def file(self, content):
        path = self.folder / "file"
        path.write_bytes(content)
        return path

    def daemon(self, *options):
        program = os.environ.get("VELLUM")
        self.assertTrue(program, "VELLUM must name the program vellum, which has the daemon")
        command = [program, "morseld", "--socket", self.socket, *options]
        daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.terminate)
        end = time.monotonic() + 200
        while not self.listens():
            self.assertLess(time.monotonic(), end, "the daemon does not listen")
            self.assertIsNone(daemon.poll(), "the daemon has ended")
            time.sleep(0.01)
        return daemon

    def listens(self):
        # The socket's file exists a moment before the daemon listens.
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self.socket) == 0

    def test_without_a_daemon_it_is_ones_own(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            morsel = Morsel.load(self.file(b"0123456789" * 1000))
        self.assertFalse(morsel.shared)
        self.assertTrue(morsel.stat().sealed)
        self.assertEqual(bytes(morsel), b"0123456789" * 1000)

    def test_files_that_cannot_be_loaded_say_why(self):
        with self.assertRaises(FileNotFoundError):
            Morsel.load(self.folder / "nothing")
        with self.assertRaises(OSError):
            Morsel.load(self.folder)
        with self.assertRaises(ValueError):
            Morsel.load(self.file(b""))
        with self.assertRaises(TypeError):
            Morsel.load(7)

    def test_with_a_daemon_two_processes_have_one_memory(self):
        self.daemon()
        path = self.file(b"abc" * 100_000)
        morsel = Morsel.load(path)
        self.assertTrue(morsel.shared)
        self.assertEqual(bytes(morsel), b"abc" * 100_000)
        inode = os.fstat(morsel.fileno()).st_ino
        script = ("import os, sys; from vellum.morsel import Morsel; m = Morsel.load(sys.argv[1]);"
                  "print(m.shared, os.fstat(m.fileno()).st_ino)")
        said = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True,
                              check=True)
        self.assertEqual(said.stdout.split(), ["True", str(inode)])

    def test_what_the_daemon_gave_outlives_it(self):
        daemon = self.daemon()
        morsel = Morsel.load(self.file(b"abc"))
        daemon.terminate()
        daemon.wait()
        self.assertEqual(bytes(morsel), b"abc")
        self.assertFalse(Morsel.load(self.file(b"abc")).shared)

    def test_a_daemon_that_refuses_is_warned_of(self):
        self.daemon("--limit", "1MiB")
        with self.assertWarnsRegex(RuntimeWarning, "limit"):
            morsel = Morsel.load(self.file(bytes(2 << 20)))
        self.assertFalse(morsel.shared)

    def test_a_warning_names_the_caller(self):
        path = self.folder / "model"
        safetensors.numpy.save_file({"a": numpy.zeros(1 << 20, "u1")}, path)
        self.daemon("--limit", "4KiB")
        for load in [Morsel.load, load_safetensors]:
            with self.subTest(load), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load(path)
            self.assertEqual([warning.filename for warning in caught], [__file__])

    def test_what_would_block_is_not_opened(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        with Morsel.create(4096) as morsel:
            for path in [pipe, str(pipe), os.fsencode(pipe), "/dev/zero", self.folder]:
                for load in [Morsel.load, load_safetensors, morsel.fill]:
                    with self.subTest(path=path, load=load):
                        with self.assertRaisesRegex(OSError, "regular file") as caught:
                            load(path)
                        self.assertEqual(caught.exception.filename, os.fsdecode(path))

    def test_paths_may_be_bytes(self):
        path = os.fsencode(self.file(b"abc"))
        self.assertEqual(bytes(Morsel.load(path)), b"abc")
        with Morsel.create(4096) as morsel:
            self.assertEqual(morsel.fill(path), 3)
        with self.assertRaises(FileNotFoundError):
            load_safetensors(path + b"\xff")

    def test_ctrl_c_ends_a_load(self):
        # A program in the background may ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        # A program that reads the request and does not answer, and then a signal.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.socket)
            listener.listen()
            accepted = []

            def answer():
                accepted.append(listener.accept())
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=answer)
            thread.start()
            try:
                with self.assertRaises(KeyboardInterrupt):
                    Morsel.load(self.file(b"abc"))
            finally:
                thread.join()
                for connection, _ in accepted:
                    connection.close()


if __name__ == "__main__":
    unittest.main()
