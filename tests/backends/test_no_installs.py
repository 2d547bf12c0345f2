"""Nothing that runs in a worker can change an environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parity_audit.backends.no_installs import installs

REFUSED = [
    ["uv", "pip", "install", "torchvision", "-q"], ["/usr/bin/python3", "-m", "pip", "install", "x"],
    ["/opt/bin/pip3", "uninstall", "-y", "x"],
    ["sh", "-c", "conda install x"], ["uv", "add", "x"],
]  # fmt: skip
ALLOWED = [
    ["gcc", "--version"],
    ["git", "add", "x"],
    ["pip", "list"],
    ["python", "install.py"],
    ["apt", "install", "x"],
    [],
]


@pytest.mark.parametrize("words", REFUSED)
def test_what_installs_packages_is_known(words):
    assert installs([word for part in words for word in part.split()])


@pytest.mark.parametrize("words", ALLOWED)
def test_other_programs_are_not(words):
    assert not installs(words)


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.check_call(['uv', 'pip', 'install', 'x'])",
        "subprocess.run('pip install x', shell=True)",
        "os.system('pip install x')",
    ],
)
def test_in_a_process_that_refuses_them_they_are_not_started(call):
    code = f"""
import os, subprocess
from parity_audit.backends.no_installs import refuse_installs
refuse_installs()
subprocess.run(['true'])
try:
    {call}
except PermissionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout.startswith("an audit changes no environment: `")
    assert done.stdout.rstrip().endswith("install x` was not run"), done.stderr
