"""What a failing command leaves: an explanation on stderr, a report on stdout where JSON was asked for, an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer

from parity_audit.cli.errors import guarded
from parity_audit.core.errors import NotJudged, SpecError, UsageError


def exit_of(error: BaseException, **options) -> int:
    @guarded
    def command(model: str = "", json: bool = False) -> int:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command(**options)
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("no", hint="do this"), 2, "hint: do this"),
        (SpecError("bad", where="a.yaml:3:1"), 2, "--> a.yaml:3:1"),
        (NotJudged("gone"), 3, "nothing was judged\nerror[not-judged]: gone"),
        (OSError(28, "No space left on device"), 3, "error[disk]"),
        (KeyboardInterrupt(), 130, "nothing was judged"),
        (ZeroDivisionError("x"), 3, "error[internal]: parity-audit itself failed: ZeroDivisionError"),
    ],
)
def test_every_way_to_fail_has_its_exit_code_and_words(error, code, says, capsys):
    assert exit_of(error) == code
    assert says in capsys.readouterr().err


def test_a_usage_error_does_not_claim_that_something_ran(capsys):
    exit_of(UsageError("no"))
    assert "nothing was judged" not in capsys.readouterr().err


def test_a_mistake_of_ours_leaves_its_traceback_in_a_file(capsys):
    exit_of(ZeroDivisionError("x"))
    place = next(line for line in capsys.readouterr().err.splitlines() if "-->" in line).split()[-1]

    with open(place) as log:
        assert "ZeroDivisionError: x" in log.read()
    os.unlink(place)


def test_foreign_text_in_an_error_is_not_obeyed(capsys):
    exit_of(NotJudged("engine said \x1b[2J[/red]"))
    assert "engine said \\x1b[2J[/red]" in capsys.readouterr().err


def test_with_json_an_error_is_a_report(capsys):
    exit_of(NotJudged("gone"), model="gemma-2-2b-it", json=True)
    shown = json.loads(capsys.readouterr().out)

    assert (shown["model"], shown["exit_code"], shown["error"]["message"]) == ("gemma-2-2b-it", 3, "gone")


def test_without_json_stdout_stays_empty(capsys):
    exit_of(NotJudged("gone"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_with_130(kind):
    code = "import signal, time\nfrom parity_audit.cli.errors import guarded\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background is born without it
    code += "guarded(lambda: print('on', flush=True) or time.sleep(60))()"
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "on\n"
    time.sleep(0.2)
    started.send_signal(kind)

    assert "nothing was judged" in started.communicate(timeout=20)[1]


def test_a_signal_that_arrives_in_a_finalizer_is_not_lost():
    code = "import time\nfrom parity_audit.cli.errors import guarded\n"
    code += "class Slow:\n    def __del__(self):\n        print('on', flush=True)\n        time.sleep(1)\n"
    code += "def command():\n    Slow()\n    time.sleep(60)\nguarded(command)()"
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "on\n"
    started.send_signal(signal.SIGTERM)

    said = started.communicate(timeout=20)[1]
    assert "nothing was judged" in said
    assert "Exception ignored" not in said


def test_a_reader_that_has_seen_enough_is_no_error():
    code = "from parity_audit.cli.show import _write\n_write('x' * 10_000_000)"
    done = subprocess.run(f'{sys.executable} -c "{code}" | head -c 5', shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("xxxxx", "")


@pytest.mark.parametrize(
    "args",
    [["audit", "no-such-model"], ["no-such-model"], ["--miniature", "no-such-model"], ["-c", "hf", "no-such-model"]],
)
def test_audit_is_the_default_command_wherever_the_options_stand(args):
    done = subprocess.run([sys.executable, "-m", "parity_audit", *args], capture_output=True, text=True)
    assert (done.returncode, "unknown model `no-such-model`" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_the_commands(shell):
    words = {"bash": {"COMP_WORDS": "parity-audit ", "COMP_CWORD": "1"}}.get(
        shell, {"_TYPER_COMPLETE_ARGS": "parity-audit ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    environ = {**os.environ, "_PARITY_AUDIT_COMPLETE": f"complete_{shell}", **words}
    code = "import sys; sys.argv = ['parity-audit']; from parity_audit.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)

    assert all(command in done.stdout for command in ("capture", "doctor", "specs")), done.stderr


def test_help_starts_no_torch():
    code = "import sys\nfrom typer.testing import CliRunner\nfrom parity_audit.cli.app import app\n"
    code += "print(CliRunner().invoke(app, ['audit', '--help']).exit_code, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "0 False\n"


def test_a_command_leaves_the_signals_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    exit_of(UsageError("no"))
    assert signal.getsignal(signal.SIGTERM) is before
