"""`parity-audit`: parse, call the api, render, exit. No logic lives here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parity_audit.cli import completion
from parity_audit.cli.asked import keep_cards
from parity_audit.cli.bisect import bisect
from parity_audit.cli.cache import cache
from parity_audit.cli.ci import ci
from parity_audit.cli.divergence import check_divergence
from parity_audit.cli.errors import guarded, run_app
from parity_audit.cli.history import history
from parity_audit.cli.invariance import invariance
from parity_audit.cli.lint import lint
from parity_audit.cli.logprobs import logprobs
from parity_audit.cli.matrix import matrix
from parity_audit.cli.memory import bytes_of
from parity_audit.cli.mistyped import refuse_mistyped
from parity_audit.cli.plan import plan
from parity_audit.cli.progress import progress_for
from parity_audit.cli.sections import doctor, envs, specs
from parity_audit.cli.selftest import selftest
from parity_audit.cli.show import FORMATS, require_format, show_file
from parity_audit.cli.spec import spec
from parity_audit.core.card import Question
from parity_audit.core.errors import UsageError
from parity_audit.core.version import __version__
from parity_audit.workers.client import TIMEOUT

EXAMPLES = """
Examples:

    parity-audit gemma-2-2b-it --miniature

    parity-audit gemma-2-2b-it -r hf==4.43.2,attn_implementation=sdpa -c transformer_lens==2.3.0 --miniature

    parity-audit ./my-checkpoint -c vllm --device cuda --json > report.json

Exit codes: 0 parity, 1 mismatch, 2 wrong usage, 3 could not compare reliably, 130 Ctrl-C.
"""


class _DefaultGroup(typer.core.TyperGroup):
    """`parity-audit MODEL` is `parity-audit audit MODEL`, wherever the options stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *ctx.help_option_names)}
        if args and args[0].partition("=")[0] not in own and args[0] not in self.commands:
            refuse_mistyped(args[0], self.commands)
            args = ["audit", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DefaultGroup, help="Is a model port computing the same function as its reference?", epilog=EXAMPLES,
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(specs, name="specs")
app.add_typer(envs, name="envs")
app.add_typer(cache, name="cache")
app.add_typer(spec, name="spec")
app.command()(doctor)

Model = Annotated[
    str,
    typer.Argument(
        help="Hub id, alias or local directory, for example `gemma-2-2b-it`.", autocompletion=completion.models
    ),
]
Candidates = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        "-c",
        help="BACKEND to judge: name[==version][,key=value...]. Repeatable. Default: all that run.",
        autocompletion=completion.backends,
    ),
]
ReferenceOption = Annotated[
    str, typer.Option("--reference", "-r", help="BACKEND that is believed.", autocompletion=completion.backends)
]
Miniature = Annotated[
    bool, typer.Option("--miniature", help="Seeded tiny weights with the real constants: no hub, no GPU.")
]
Synthetic = Annotated[
    str | None,
    typer.Option(
        help="Seeded weights: mini (= --miniature), small (~150M), full, resaved (by transformers 5), real (as if trained).",
        **completion.fixed(*completion.SIZES),
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of synthetic weights.")]
Weights = Annotated[Path | None, typer.Option(help="Directory with config.json and *.safetensors.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16. Only float32 can prove a port right.",
        **completion.fixed(*completion.DTYPES),
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.", **completion.fixed(*completion.DEVICES))]
Probes = Annotated[
    list[str] | None,
    typer.Option("--probe", help="Run only these probes. Repeatable.", autocompletion=completion.probes),
]
Prompt = Annotated[list[str] | None, typer.Option("--prompt", help="A text of your own, run too. Repeatable.")]
Prompts = Annotated[
    Path | None, typer.Option(help="Texts of your own: .txt, or .jsonl with text, messages or token_ids.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts that are text through the chat template.")]
Target = Annotated[float, typer.Option(help="Max-abs logit difference that a repair should reach.")]
NoRepair = Annotated[bool, typer.Option("--no-repair", help="Diagnose only.")]
Quick = Annotated[bool, typer.Option("--quick", help="One short probe, no repair, no detection limits.")]
Disk = Annotated[
    str | None,
    typer.Option("--disk", help="Most that captures may take on disk, for example 10GiB. `plan` shows the choice."),
]
Hooks = Annotated[
    bool, typer.Option("--hooks", help="Also edit every hook, and compare with the same edit in the reference.")
]
NoInstall = Annotated[bool, typer.Option("--no-install", help="Never create an environment.")]
AcceptPatched = Annotated[bool, typer.Option("--accept-patched", help="Exit 0 when a verified patch reaches parity.")]
MatchReference = Annotated[
    bool,
    typer.Option(
        "--match-reference", help="Where the reference departs from the spec, patch candidates to do what it does."
    ),
]
Sites = Annotated[Path | None, typer.Option(help="Site map of `python:` ports that return a plain module.")]
Timeout = Annotated[float, typer.Option(help="Seconds that a backend may take for one request (loading, one probe).")]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Allow TF32 on the GPU, to see what it costs.")]
Out = Annotated[Path | None, typer.Option(help="Directory for the report and the logs.")]
Format = Annotated[
    str,
    typer.Option(
        "--format", help="What to print: terminal, markdown, html, json, junit or sarif.", **completion.fixed(*FORMATS)
    ),
]
Json = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout, nothing else.")]
Baseline = Annotated[
    Path | None, typer.Option(help="report.json of an earlier audit: exit 1 where a figure moved beyond rounding.")
]
Card = Annotated[bool, typer.Option("--card", help="Write a card of each candidate into reports/cards.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the verdicts.")]


@app.command(epilog=EXAMPLES)
@guarded
def audit(
    context: typer.Context,
    model: Model,
    candidate: Candidates = None,
    reference: ReferenceOption = "hf",
    miniature: Miniature = False,
    synthetic: Synthetic = None,
    seed: Seed = 0,
    weights: Weights = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    probe: Probes = None,
    prompt: Prompt = None,
    prompts: Prompts = None,
    chat: Chat = False,
    sites: Sites = None,
    target: Target = 1e-5,
    no_repair: NoRepair = False,
    quick: Quick = False,
    disk: Disk = None,
    hooks: Hooks = False,
    no_install: NoInstall = False,
    accept_patched: AcceptPatched = False,
    match_reference: MatchReference = False,
    tf32: Tf32 = False,
    timeout: Timeout = TIMEOUT,
    out: Out = None,
    baseline: Baseline = None,
    card: Card = False,
    format: Format = "terminal",
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run MODEL through every backend, say which agree, why the others do not, and what repairs them."""
    from parity_audit import api
    from parity_audit.cli.show import show

    require_format(format)
    with progress_for(quiet=quiet or json) as progress:
        report = api.audit(
            model, candidates=_with_sites(candidate, sites), reference=reference, miniature=_size(miniature, synthetic), seed=seed,
            weights=weights, dtype=dtype, device=device, probes=probe, prompt=prompt, prompts=prompts, chat=chat,
            target=target, repair=not no_repair, quick=quick, hooks=hooks, out=out, disk=None if disk is None else bytes_of(disk),
            install=not no_install, tf32=tf32, accept_patched=accept_patched, match_reference=match_reference,
            timeout=timeout, baseline=baseline, progress=progress,
        )  # fmt: skip
    if card:
        keep_cards(
            context, report, Question.AUDIT, given=candidate, reference=reference, synthetic=_size(miniature, synthetic), seed=seed,
            dtype=dtype, device=device, probes=tuple(probe or ()), repair=not no_repair,
        )  # fmt: skip
    show(report, "json" if json else format, quiet=quiet)
    return report.exit_code


@app.command()
@guarded
def capture(
    model: Model,
    backend: Annotated[str, typer.Option("--backend", "-b", help="BACKEND to capture.")] = "hf",
    out: Annotated[Path, typer.Option(help="Directory for the capture.")] = Path("capture"),
    judge: Annotated[bool, typer.Option("--judge", help="Also the true-float64 run, into OUT/judge.")] = False,
    miniature: Miniature = False,
    synthetic: Synthetic = None,
    seed: Seed = 0,
    weights: Weights = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    probe: Probes = None,
    prompt: Prompt = None,
    prompts: Prompts = None,
    chat: Chat = False,
    no_install: NoInstall = False,
    tf32: Tf32 = False,
    timeout: Timeout = TIMEOUT,
    quiet: Quiet = False,
) -> int:
    """Run MODEL through one backend and keep what it computed, as safetensors with a JSON manifest."""
    from parity_audit import api

    with progress_for(quiet=quiet) as progress:
        taken = api.capture(
            model, backend, out=out, miniature=_size(miniature, synthetic), seed=seed, weights=weights, dtype=dtype,
            device=device, probes=probe, prompt=prompt, prompts=prompts, chat=chat,
            install=not no_install, tf32=tf32, judge=judge, timeout=timeout, progress=progress,
        )  # fmt: skip
    Console(stderr=True).print(f"captured into {taken}", markup=False, highlight=False)
    return 0


@app.command()
@guarded
def diff(
    reference: Annotated[Path, typer.Argument(help="Capture that is believed.")],
    candidate: Annotated[Path, typer.Argument(help="Capture to judge.")],
    judge: Annotated[
        Path | None, typer.Option(help="Float64 capture; default REFERENCE/judge where it exists.")
    ] = None,
    format: Format = "terminal",
    json: Json = False,
) -> int:
    """Compare two captures on disk, whoever wrote them."""
    from parity_audit import api
    from parity_audit.cli.show import show

    require_format(format)
    report = api.diff(reference, candidate, judge=judge)
    show(report, "json" if json else format)
    return report.exit_code


app.command()(selftest)
app.command()(ci)
app.command()(bisect)
app.command()(lint)
app.command()(logprobs)
app.command()(invariance)
app.command()(matrix)
app.command()(plan)
app.command(name="show")(show_file)
app.command()(history)
app.command(name="check-divergence")(check_divergence)


def _with_sites(candidates: list[str] | None, sites: Path | None) -> list[str] | None:
    """`--sites` as the setting of every port that does not name its own."""
    if sites is None or candidates is None:
        return candidates
    return [
        f"{item},sites={sites}" if item.startswith("python:") and ",sites=" not in item else item for item in candidates
    ]


def _size(miniature: bool, synthetic: str | None) -> str | None:
    if miniature and synthetic not in (None, "mini"):
        raise UsageError(f"--miniature and --synthetic {synthetic} exclude each other", hint="drop one of them")
    return "mini" if miniature else synthetic


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"parity-audit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Is a model port computing the same function as its reference?"""


def main() -> None:
    """Console script. What the parser refuses looks like every other error."""
    sys.exit(run_app(app))
