"""The list of tests that `make test` leaves to `make test-long`."""

from __future__ import annotations

import re

from scripts.long_tests import FILE, long_tests

LOG = """\
========== slowest durations ==========
22.29s call     tests/a_test.py::test_b[int8-two words]
11.73s call     tests/a_test.py::test_b[other]
0.50s setup    tests/a_test.py::test_a
0.49s teardown tests/a_test.py::test_c
FAILED tests/a_test.py::test_d - 3.00s
"""


def test_durations_of_a_log_make_the_list():
    assert long_tests(LOG) == ["tests/a_test.py::test_a", "tests/a_test.py::test_b"]


def test_every_entry_is_a_test():
    for entry in FILE.read_text("utf-8").splitlines():
        file, name, *_ = entry.split("::")
        source = (FILE.parents[1] / file).read_text("utf-8")
        defined = re.search(rf"^(def {name}\(|{name} = |class {name}\b)", source, re.M)
        assert defined, f"{entry} is no test: correct tests/long_tests.txt"
