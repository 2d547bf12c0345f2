"""Tools for the test suites of ports: `assert_parity`, and a pytest fixture called `parity_audit`."""

from parity_audit.testing.assertion import assert_parity as assert_parity
