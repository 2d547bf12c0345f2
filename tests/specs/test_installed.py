"""What transformers' configuration classes say, asked once and kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity_audit.specs import installed
from parity_audit.specs.canonical import canonical, written_name
from parity_audit.specs.installed import FOLDER, config_class_values

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "use_sliding_window": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2}
ASK = """
import json, sys
from parity_audit.specs import installed
from parity_audit.specs.canonical import canonical, written_name
config = json.loads(sys.argv[1])
print(json.dumps([canonical(config), written_name(config, "hidden_size"), "transformers" in sys.modules]))
"""


def _asked(config: dict[str, object], cache: Path) -> list[object]:
    """(canonical config, where its width is written, whether transformers was imported) in a process of its own."""
    program = [sys.executable, "-c", ASK, json.dumps(config)]
    environ = {"PARITY_AUDIT_CACHE": str(cache), "PATH": "/usr/bin:/bin", "HOME": str(cache)}
    found = subprocess.run(program, env=environ, check=True, capture_output=True, text=True)
    answer: list[object] = json.loads(found.stdout)
    return answer


def test_a_second_command_knows_it_without_importing_transformers(tmp_path: Path) -> None:
    truth = [canonical(GPT2), written_name(GPT2, "hidden_size")]
    assert _asked(GPT2, tmp_path) == [*truth, True]
    assert _asked(GPT2, tmp_path) == [*truth, False]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The configs that classes are asked of, in a process that has not imported transformers, as far as the cache knows."""
    configs: list[object] = []
    ask = installed._asked
    monkeypatch.setattr(installed, "_asked", lambda config: (configs.append(config), ask(config))[1])
    monkeypatch.setattr(installed, "_is_imported", lambda: False)
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path))
    return configs


def test_a_class_is_asked_once_of_each_config(asked: list[object]) -> None:
    first = config_class_values(QWEN)
    assert first is not None
    assert first.values["num_hidden_layers"] == 3
    assert config_class_values(dict(reversed(QWEN.items()))) == first
    assert asked == [QWEN]
    other = config_class_values({**QWEN, "sliding_window": 8})
    assert other is not None
    assert other.values["sliding_window"] == 8


def test_where_transformers_is_imported_the_class_that_is_registered_is_asked_once(
    asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-five milliseconds for each key whose name is asked for, of sixty models, were a tenth of the time of some tests."""
    import transformers

    monkeypatch.setattr(installed, "_is_imported", lambda: True)
    config = {**QWEN, "hidden_size": 80}
    assert config_class_values(config) == config_class_values(config)
    assert asked == [config]

    monkeypatch.setattr(installed, "configuration_class", lambda _: transformers.GPT2Config)
    assert config_class_values(config) is not None
    assert asked == [config, config]


@pytest.mark.parametrize("text", ["", "[1]", '{"values": '], ids=["empty", "list", "cut short"])
def test_what_is_damaged_is_asked_again(text: str, asked: list[object], tmp_path: Path) -> None:
    first = config_class_values(GPT2)
    [kept] = (tmp_path / FOLDER).iterdir()
    whole = kept.read_text()
    kept.write_text(text)
    assert config_class_values(GPT2) == first
    assert asked == [GPT2, GPT2]
    assert kept.read_text() == whole


def test_another_release_is_asked_itself(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    config_class_values(GPT2)
    monkeypatch.setattr(installed, "release", lambda: "5.99")
    config_class_values(GPT2)
    assert asked == [GPT2, GPT2]


def test_a_cache_that_cannot_be_written_costs_time_alone(asked: list[object], tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder would be")
    assert config_class_values(GPT2) == config_class_values(GPT2)
    assert asked == [GPT2, GPT2]


def test_a_model_type_that_is_missing_is_not_remembered(asked: list[object], tmp_path: Path) -> None:
    assert config_class_values({"model_type": "of-tomorrow"}) is None
    assert not (tmp_path / FOLDER).exists()


def test_a_class_that_a_program_registers_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    class Own(transformers.PretrainedConfig):
        model_type = "of-this-test"

        def __init__(self, width: int = 7, **others: object) -> None:
            self.width = width
            super().__init__(**others)  # type: ignore[arg-type]

    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path))
    transformers.AutoConfig.register(Own.model_type, Own)
    says = config_class_values({"model_type": Own.model_type})
    assert says is not None
    assert says.values["width"] == 7
    assert not (tmp_path / FOLDER).exists()
