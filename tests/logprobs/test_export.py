"""Files that are asked for: the numbers arrive unchanged, and no text becomes a formula."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from parity_audit.capture.prompts import read_prompts
from parity_audit.core.errors import UsageError
from parity_audit.core.logprob_report import Leg, LogprobReport, TokenRow
from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.core.types import Checkpoint
from parity_audit.logprobs.files import writing
from parity_audit.logprobs.files.export import MODULE_OF_KIND, check_exports, export
from parity_audit.logprobs.paired import paired
from parity_audit.logprobs.reporting import pair_report, token_table
from parity_audit.logprobs.texts import with_text
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

EVIL = '=HYPERLINK("http://x")\x00<script>'
ROW = TokenRow(sequence=1, position=2, token_id=9, text=EVIL, rollout=-1.0, train=-1.5, before="+1", after="@x")


@pytest.fixture(scope="module")
def made():
    """Six completions with known differences."""
    rng = np.random.default_rng(0)
    rollout = [(-rng.exponential(2.0, length)).tolist() for length in range(8, 32, 4)]
    pair = paired(rollout, [(np.array(row) - 0.1 * rng.random(len(row))).tolist() for row in rollout])
    completions = [Completion(prompt_ids=(1,), token_ids=tuple(range(len(row)))) for row in rollout]
    report = LogprobReport(
        model="m", weights={}, sampling=Sampling(), verdict=Verdict.PARITY, why="", odd_leg=None,
        legs=(Leg(name=EVIL, backend="", package=EVIL, version="1", settings={}, dtype="float32", meaning="m"),),
        pairs=(pair_report(pair, rollout="engine-decode", train="trainer", meaning="m"),), worst=(ROW,),
    )  # fmt: skip
    return report, token_table(pair, completions)


def test_a_workbook_holds_every_number_and_no_formula(made, tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    report, tokens = made
    export(report, tokens, tmp_path, ("xlsx",))
    book = openpyxl.load_workbook(tmp_path / "tokens.xlsx")
    rows = list(book["tokens"].values)

    assert book.sheetnames == ["legs", "metrics", "worst tokens", "tokens"]
    assert rows[0] == writing.COLUMNS
    assert [row[3] for row in rows[1:]] == pytest.approx(list(tokens.rollout), rel=1e-15)  # it writes 16 digits
    assert {row[2]: row[3] for row in list(book["metrics"].values)[1:]} == pytest.approx(report.pairs[0].metrics)
    assert all(cell.data_type != "f" for sheet in book for row in sheet for cell in row)
    assert book["worst tokens"]["D2"].value == EVIL.replace("\x00", "\ufffd")


def test_more_tokens_than_a_sheet_holds_go_on_in_the_next(made, tmp_path, monkeypatch):
    openpyxl = pytest.importorskip("openpyxl")
    monkeypatch.setattr(writing, "SHEET_ROWS", 41)
    report, tokens = made
    export(report, tokens, tmp_path, ("xlsx",))
    book = openpyxl.load_workbook(tmp_path / "tokens.xlsx")
    values = [row[3] for name in book.sheetnames[3:] for row in list(book[name].values)[1:]]

    assert book.sheetnames[3:] == ["tokens", "tokens 2", "tokens 3"]
    assert values == pytest.approx(list(tokens.rollout), rel=1e-15)


def test_parquet_holds_the_rows_of_the_csv(made, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    report, tokens = made
    export(report, tokens, tmp_path, ("parquet",))
    writing.write_tokens(tokens, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]

    assert parquet.read_table(tmp_path / "tokens.parquet").to_pylist() == rows
    assert len((tmp_path / "tokens.csv").read_text().splitlines()) == len(rows) + 1


def test_pictures_are_files_with_their_style(made, tmp_path):
    export(*made, tmp_path, ("svg",))
    drawn = {path.stem: path.read_text() for path in (tmp_path / "pictures").iterdir()}

    assert set(drawn) == {"scatter", "scatter-log", "position", "probability", "heat-map"}
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert root.get("width") == "360"
        assert any(child.tag.endswith("style") for child in root)


def test_a_png_has_ink_of_every_kind_of_mark(made, tmp_path):
    """The scatter's points are blue and its diagonal red; without the style everything would be black."""
    pytest.importorskip("resvg_py")
    export(*made, tmp_path, ("png",))
    size, pixels = _decoded((tmp_path / "pictures" / "scatter.png").read_bytes())
    red, green, blue = (pixels[..., channel].astype(int) for channel in range(3))

    assert size == (1080, 780)
    assert (pixels[..., :3] == 255).all(-1).mean() > 0.5
    assert ((blue > red + 60) & (blue > green + 20)).sum() > 200
    assert ((red > blue + 80) & (red > green + 80)).sum() > 200


def _decoded(content: bytes) -> tuple[tuple[int, int], np.ndarray]:
    """Width, height and RGBA pixels `[y x 4]` of a PNG without interlacing, after the specification."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, data = 8, b""
    while place < len(content):
        length, kind = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        body = content[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = *(int.from_bytes(body[i : i + 4], "big") for i in (0, 4)), body[8], body[9]
            assert (depth, colour) == (8, 6)
        data += body if kind == b"IDAT" else b""
        place += 12 + length
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 4 * width)
    before, out = np.zeros(4 * width, np.uint8), []
    for line in lines:
        out.append(before := _unfiltered(int(line[0]), line[1:], before))
    return (width, height), np.array(out).reshape(height, width, 4)


def _unfiltered(kind: int, raw: np.ndarray, above: np.ndarray) -> np.ndarray:
    if kind == 0:
        return raw.copy()
    if kind == 2:
        return raw + above
    row = raw.astype(int)
    for i in range(len(row)):
        left, up, corner = (row[i - 4], int(above[i]), int(above[i - 4])) if i >= 4 else (0, int(above[i]), 0)
        guess = left + up - corner
        nearest = min((abs(guess - value), rank, value) for rank, value in enumerate((left, up, corner)))[2]
        row[i] = (row[i] + {1: left, 3: (left + up) // 2, 4: nearest}[kind]) % 256
    return row.astype(np.uint8)


def test_another_kind_is_refused_with_the_known_ones():
    with pytest.raises(UsageError) as caught:
        check_exports(["xls"])

    assert all(kind in caught.value.expected for kind in MODULE_OF_KIND)
    assert check_exports(["svg", "svg"]) == ("svg",)


def test_worst_tokens_are_shown_with_their_neighbours(made, llama):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama.path)
    ids = tuple(tokenizer("The quick brown fox jumps over the lazy dog", add_special_tokens=False)["input_ids"])
    completions = [Completion(prompt_ids=(3,), token_ids=(4,)), Completion(prompt_ids=ids[:4], token_ids=ids[4:])]
    row = with_text(made[0], completions, llama).worst[0]

    assert row.text == tokenizer.decode(ids[6:7])
    assert row.before == tokenizer.decode(ids[:6])
    assert row.after == tokenizer.decode(ids[7:11])


def test_without_a_tokenizer_there_is_no_text(made, tmp_path):
    bare = Checkpoint(path=str(tmp_path), repo_id="m", fingerprint="", synthetic=True, hf_home=None)

    assert with_text(made[0], [], bare) is made[0]


@pytest.fixture
def chatty(llama, tmp_path):
    """The Llama miniature's tokenizer with a template that marks roles with brackets."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama.path)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(tmp_path / "chatty")
    return replace(llama, path=str(tmp_path / "chatty")), tokenizer


def test_texts_go_through_the_chat_template_once(chatty, tmp_path):
    checkpoint, tokenizer = chatty
    (tmp_path / "prompts.txt").write_text("hello\n")
    ids = read_prompts(tmp_path / "prompts.txt", checkpoint, chat=True)

    assert ids == (tuple(tokenizer("[user]hello[assistant]", add_special_tokens=False)["input_ids"]),)


def test_a_tokenizer_without_a_template_refuses_chat(cache, tmp_path):
    plain = miniature.make(resolve_model("gpt2"), root=cache / "synthetic")
    (tmp_path / "prompts.txt").write_text("hello\n")

    with pytest.raises(UsageError, match="no chat template"):
        read_prompts(tmp_path / "prompts.txt", plain, chat=True)
