"""Runs the tests in this folder, and prints results like those of Rust's tests, for one count.

    python crates/python/tests [NAME ...]
"""

import pathlib
import sys
import unittest


class Report(unittest.TextTestResult):
    def say(self, test, outcome):
        print(f"test {test.id()} ... {outcome}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.say(test, "ok")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.say(test, "FAILED")

    def addError(self, test, error):
        super().addError(test, error)
        self.say(test, "FAILED")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.say(subtest, "FAILED")


def main():
    folder = str(pathlib.Path(__file__).parent)
    loader = unittest.TestLoader()
    if len(sys.argv) > 1:
        loader.testNamePatterns = [f"*{name}*" for name in sys.argv[1:]]
    suite = loader.discover(folder)
    runner = unittest.TextTestRunner(sys.stdout, resultclass=Report, verbosity=0)
    result = runner.run(suite)
    failed = len(result.failures) + len(result.errors)
    passed = max(result.testsRun - failed - len(result.skipped), 0)
    state = "ok" if result.wasSuccessful() and passed else "FAILED"
    print(f"test result: {state}. {passed} passed; {failed} failed; {len(result.skipped)} ignored")
    return 0 if state == "ok" else 1


sys.exit(main())
