"""`parity-audit logprobs`: parse, ask, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli.asked import keep_cards
from parity_audit.cli.errors import guarded
from parity_audit.cli.memory import bytes_of
from parity_audit.cli.progress import progress_for
from parity_audit.core.card import Question


@guarded
def logprobs(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, alias or local directory.")],
    engine: Annotated[
        str | None, typer.Option("--engine", "-e", help="BACKEND that samples: vllm or sglang [,key=value...].")
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="Ask this server instead: vLLM's or SGLang's, started by you; token ids only.")
    ] = None,
    trainer: Annotated[str, typer.Option("--trainer", "-t", help="BACKEND that scores: hf[,key=value...].")] = "hf",
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of tokens of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Completions per prompt.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest completion, in tokens.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and synthetic weights.")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts: .txt, or .jsonl with token_ids, text or messages.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts that are text through the chat template.")] = False,
    rollouts: Annotated[
        Path | None,
        typer.Option(help="Rollout file (.jsonl, .parquet), judged instead of an engine."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Bound of the logits held at a time when scoring, e.g. 2GiB.")] = "2GiB",
    profile: Annotated[
        list[str] | None,
        typer.Option("--profile", help="Metric names of a framework: verl, trl, prime-rl, nemo-rl ..."),
    ] = None,
    miniature: Annotated[
        bool, typer.Option("--miniature", help="Seeded tiny weights with the real constants.")
    ] = False,
    weights: Annotated[Path | None, typer.Option(help="Directory with config.json and *.safetensors.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    exports: Annotated[
        list[str] | None, typer.Option("--export", help="Further files: xlsx, parquet, svg, png (repeatable).")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where the engine departs, audit its layers on the worst sequences.")
    ] = False,
    engine_mode: Annotated[
        str | None, typer.Option(help="eager or compiled: run so, and compare with the other on the same tokens.")
    ] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="The same for the engine's prefix cache.")
    ] = None,
    attribute: Annotated[
        bool, typer.Option("--attribute", help="Flip every switch of both sides; say what each explains.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="With --attribute: share of the squared error to explain (0.8), or rmse=0.001.")
    ] = None,
    no_install: Annotated[bool, typer.Option("--no-install", help="Never create an environment.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for the report and the logs.")] = None,
    format: Annotated[
        str, typer.Option("--format", help="What to print: terminal, markdown, html, json, junit or sarif.")
    ] = "terminal",
    card: Annotated[bool, typer.Option("--card", help="Write a card into reports/cards.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the verdict.")] = False,
) -> int:
    """Do the engine's log-probabilities agree with the trainer's, token by token, and if not, which leg departs and why?"""
    from parity_audit import api
    from parity_audit.cli.show import require_format, show
    from parity_audit.core.rollouts import Sampling

    require_format(format)
    sampling = Sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, samples=samples, seed=seed, max_new_tokens=max_new_tokens
    )
    with progress_for(quiet=quiet or json) as progress:
        report = api.logprobs(
            model, engine=engine, engine_url=engine_url, trainer=trainer, sampling=sampling, prompts=prompts, chat=chat,
            exports=exports or (), rollouts=rollouts, memory_bytes=bytes_of(memory),
            presets=profile or (), miniature="mini" if miniature else None, seed=seed, weights=weights, dtype=dtype,
            device=device, out=out, install=not no_install, explain=explain, engine_mode=engine_mode,
            prefix_cache=prefix_cache, attribute=attribute, target=target,
            progress=progress,
        )  # fmt: skip
    if card:
        given = [engine or "vllm"] if rollouts is None and engine_url is None else None
        keep_cards(
            context, report, Question.LOGPROBS, given=given, reference=trainer, synthetic="mini" if miniature else None,
            seed=seed, dtype=dtype, device=device,
        )  # fmt: skip
    show(report, "json" if json else format, quiet=quiet)
    return report.exit_code
