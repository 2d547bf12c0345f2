"""Options, commands and BACKEND strings that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from robust.case import Case

MODEL = "meta-llama/Llama-3.2-1B"
PORTS = Path(__file__).resolve().parents[2] / "tests" / "ports"
MINI = (MODEL, "--miniature", "-c", "hf")

COMMANDS = [  # arguments, exit code, error code
    (["adit"], 2, "unknown-command"), (["spce", "check"], 2, "unknown-command"), (["dif", "a", "b"], 2, "unknown-command"),
    (["captur", MODEL], 2, "unknown-command"), (["docter"], 2, "unknown-command"), (["evns", "list"], 2, "unknown-command"),
    (["self-test"], 2, "unknown-command"), (["AUDIT"], 2, "unknown-command"),
    (["gemma-2-2b-itt"], 2, "unknown-model"), (["no-such-model-anywhere"], 2, "unknown-model"), ([".."], 2, "unknown-model"),
    (["a/b/c"], 2, "unknown-model"), (["x" * 3000], 2, "unknown-model"), (["bad\x00name"], 2, "unknown-model"),
    (["\x1b[2J"], 2, "unknown-model"), (["modèle"], 2, "unknown-model"), ([" "], 2, "unknown-model"), ([""], 2, "unknown-model"),
    (["audit"], 2, "usage"), (["audit", MODEL, "extra"], 2, "usage"), (["--nonsense"], 2, "usage"), ([MODEL, "--nonsense"], 2, "usage"),
    ([MODEL, "--dtype"], 2, "usage"), (["diff"], 2, "usage"), (["diff", "a"], 2, "usage"), (["specs", "lst"], 2, "usage"),
    (["envs", "remove"], 2, "usage"), (["spec", "chek"], 2, "usage"),
    ([*MINI, "--dtype", "float23"], 2, "unknown-dtype"), ([*MINI, "--dtype", "int8"], 2, "unknown-dtype"),
    ([*MINI, "--dtype", "float64"], 2, "unknown-dtype"), ([*MINI, "--dtype", ""], 2, "unknown-dtype"),
    ([*MINI, "--dtype", "Float32"], 2, "unknown-dtype"), ([*MINI, "--dtype", "__class__"], 2, "unknown-dtype"),
    ([*MINI, "--device", "gpu"], 2, "unknown-device"), ([*MINI, "--device", "cuda:0:1"], 2, "unknown-device"),
    ([*MINI, "--device", "meta"], 2, "unknown-device"), ([*MINI, "--device", ""], 2, "unknown-device"),
    ([*MINI, "--format", "html5"], 2, "unknown-format"), ([*MINI, "--format", ""], 2, "unknown-format"),
    ([*MINI, "--format", "JSON"], 2, "unknown-format"),
    ([*MINI, "--seed", "-1"], 2, "bad-number"), ([*MINI, "--seed", "99999999999999999999"], 2, "bad-number"),
    ([*MINI, "--seed", "x"], 2, "usage"), ([*MINI, "--seed", "1.5"], 2, "usage"),
    ([*MINI, "--target", "nan"], 2, "bad-number"), ([*MINI, "--target", "inf"], 2, "bad-number"),
    ([*MINI, "--target", "-1"], 2, "bad-number"), ([*MINI, "--target", "small"], 2, "usage"),
    ([*MINI, "--timeout", "0"], 2, "bad-number"), ([*MINI, "--timeout", "-5"], 2, "bad-number"),
    ([*MINI, "--timeout", "nan"], 2, "bad-number"), ([*MINI, "--timeout", "inf"], 2, "bad-number"),
    ([*MINI, "--timeout", "soon"], 2, "usage"),
    ([*MINI, "--probe", "shrt"], 2, "unknown-probe"), ([*MINI, "--probe", ""], 2, "unknown-probe"),
    ([*MINI, "--probe", "short", "--probe", "lang"], 2, "unknown-probe"),
    ([MODEL, "--synthetic", "medium"], 2, "unknown-size"), ([MODEL, "--synthetic", ""], 2, "unknown-size"),
    ([MODEL, "--miniature", "--synthetic", "full"], 2, "usage"),
    ([*MINI, "--weights", "/nowhere"], 2, "usage"), ([MODEL, "-c", "hf", "--weights", "/nowhere"], 2, "bad-config"),
    ([MODEL, "-c", "hf", "--weights", "/etc/passwd"], 2, "bad-config"),
    (["specs", "show", "nothing-like-it"], 2, "unknown-model"), (["envs", "remove", "nothing"], 2, "unknown-env"),
    (["envs", "remove", ".."], 2, "unknown-env"), (["envs", "remove", "/"], 2, "unknown-env"), (["envs", "remove", ""], 2, "unknown-env"),
    (["envs", "create", "vlm"], 2, "unknown-backend"), (["spec", "check", "no-such-spec"], 2, "unknown-spec"),
    (["selftest", "--model", "no-such-model"], 2, "corpus"), (["selftest", "--fault", "no-such-fault"], 2, "corpus"),
    (["capture", MODEL, "--miniature", "-b", "vlm"], 2, "unknown-backend"),
    (["capture", MODEL, "--miniature", "--dtype", "float23"], 2, "unknown-dtype"),
    (["diff", "/nowhere", "/nothing"], 3, "capture-broken"), (["diff", "/etc", "/etc"], 3, "capture-broken"),
]  # fmt: skip

BACKENDS = [
    ("", "unknown-backend"), (",", "unknown-backend"), ("==", "unknown-backend"), ("hff", "unknown-backend"), ("HF", "unknown-backend"),
    ("vlm", "unknown-backend"), ("transformerlens", "unknown-backend"), ("hf ==1", "unknown-backend"), ("hf=4", "unknown-backend"),
    ("hf\x00", "unknown-backend"), ("pyhton:a.py", "unknown-backend"),
    ("hf==", "backend-version"), ("hf==not.a.version", "backend-version"), ("hf==4.43.2==5", "backend-version"),
    ("hf==../../etc", "backend-version"), ("hf==;rm", "backend-version"), ("vllm== 1 2", "backend-version"),
    ("hf,", "backend-setting"), ("hf,sdpa", "backend-setting"), ("hf,=3", "backend-setting"), ("hf,a=NaN", "backend-setting"),
    ("hf,a=Infinity", "backend-setting"), ("hf,attn_implementation=spda", "backend-setting"),
    ("hf,attn_implementation=3", "backend-setting"), ("hf,attn_implementation=none", "backend-setting"),
    ("hf,attn_implementation=", "backend-setting"), ('hf,attn_implementation={"a":1}', "backend-setting"),
    ("hf,tf32=maybe", "backend-setting"), ("hf,tf32=1", "backend-setting"), ("hf,rope_teta=3", "backend-setting"),
    ("hf,hiden_act=gelu", "backend-setting"), ("hf,a=" + "[" * 5000, "backend-setting"),
    ("transformer_lens,api=brigde", "backend-setting"), ("transformer_lens==2.3.0,api=bridge", "backend-setting"),
    ("python:", "port-file"), ("python:nowhere.py:load", "port-file"), ("python:/:load", "port-file"), ("python:/dev/null/x:load", "port-file"),
    ("python:" + "x" * 5000, "port-file"), ("python:a\x00b.py:load", "port-file"),
    (f"python:{PORTS}/plain_lama.py:load", "port-file"), (f"python:{PORTS}/plain_llama.py:lod", "port-file"),
    (f"python:{PORTS}/plain_llama.py:load,scael=3", "backend-setting"), (f"python:{PORTS}/plain_llama.py:load,python=/no/python", "port-file"),
    (f"python:{PORTS}/plain_llama.py:load,python=/etc/passwd", "port-file"), (f"python:{PORTS}/plain_llama.py:load,python=/", "port-file"),
    (f"python:{PORTS}/plain_llama.py:load,env=vlm", "unknown-backend"), (f"python:{PORTS}/plain_llama.py:load,env=hf==x", "backend-version"),
    (f"python:{PORTS}/plain_llama.py:load,sites=/nowhere.yaml", "site-map"), (f"python:{PORTS}/plain_llama.py:load,sites=/", "site-map"),
    (f"python:{PORTS}/plain_llama.py:load,sites=/dev/zero", "site-map"),
]  # fmt: skip

PORT_FILES = {
    "syntax error": "def load(:\n", "null bytes": "a\x00b", "empty": "", "deeply nested": "x = " + "(" * 5000, "no function": "x = 3\n",
    "other function": "def laod(a, b, c): pass\n", "text": "this is no program at all\n", "unclosed string": "'''never ends",
    "tabs and spaces": "def load(a, b, c):\n\tif a:\n        pass\n",
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    for args, code, says in COMMANDS:
        shown = " ".join(args)[:60].encode("unicode_escape").decode()
        yield Case(group="command line", name=shown, args=_fixed(args), exit=code, says=says)
    for text, says in BACKENDS:
        shown = text.replace(str(PORTS), "PORTS")[:60].encode("unicode_escape").decode()
        args = [MODEL, "--miniature", "-c", "hf", "-c", text]
        yield Case(group="BACKEND", name=shown or "(empty)", args=_fixed(args), exit=2, says=says)
    for name, content in PORT_FILES.items():
        yield Case(group="port file", name=name, args=_port(content), exit=2, says="port-file")


def _fixed(args: list[str]):  # type: ignore[no-untyped-def]
    return lambda folder: args


def _port(content: str):  # type: ignore[no-untyped-def]
    def args(folder: Path) -> list[str]:
        (folder / "port.py").write_text(content)
        return [*MINI, "-c", f"python:{folder}/port.py:load"]

    return args
