"""Captures of a port are kept under a key: another function or an edited file must never find them."""

import pytest

from parity_audit.core.backend_ref import parse_backend
from parity_audit.envs.build import python_for


@pytest.fixture
def port(tmp_path):
    file = tmp_path / "port.py"
    file.write_text("def one(model_path, dtype, device): ...\n\n\ndef two(model_path, dtype, device): ...\n")
    return file


def key(file, function="one"):
    return python_for(parse_backend(f"python:{file}:{function}")).key


def test_the_same_port_has_the_same_key(port):
    assert key(port) == key(port)


def test_two_functions_of_one_file_are_two_ports(port):
    assert key(port, "one") != key(port, "two")


def test_an_edited_port_or_neighbour_is_another_port(port):
    before = key(port)
    (port.parent / "layers.py").write_text("SCALE = 16\n")
    with_neighbour = key(port)
    (port.parent / "layers.py").write_text("SCALE = 14\n")

    assert len({before, with_neighbour, key(port)}) == 3
