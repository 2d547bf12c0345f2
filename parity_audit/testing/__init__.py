"""For the test-suites of ports: `assert_parity`, and a pytest fixture of the package's name."""

from parity_audit.testing.assertion import assert_parity as assert_parity
