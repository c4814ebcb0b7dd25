"""The command line, as a user meets it, and the log lines."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

import pytest

from hotbranch import __version__, cli, log
from hotbranch.load_settings import flag, variable
from hotbranch.settings import RouterSettings
from router.main import load_models


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["router", "--port", "70000"], "hotbranch router: --port 70000: should be less than"),
        (["router", "--port"], "hotbranch router: --port: expected one argument"),
        (["router", "--prot=1"], "hotbranch router: unknown flag --prot; did you mean --port?"),
        (["router", "--kv-tokens", "1"], "hotbranch router: --kv-tokens belongs to another"),
        (["replica", "--kv-token", "1"], "hotbranch replica: unknown flag --kv-token; did you"),
        (["replica", "--engine", "none"], "hotbranch replica: --engine none: should be 'radix'"),
        (
            ["router", "--routing-policy", "random"],
            "hotbranch router: --routing-policy random: should be 'hotbranch', 'round_robin', ",
        ),
        (["replica", "--config", "/none"], "hotbranch replica: /none: No such file or directory"),
        (["up", "now"], "hotbranch up: unexpected argument 'now'"),
        (["model", "--model", "/none"], "hotbranch model: model '/none' is neither smollm2 nor a"),
        (["start"], "hotbranch: COMMAND: invalid choice: 'start' (choose from 'up', 'router'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], argv: Sequence[str], expected: str
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(expected)
    assert err.count("\n") == 1


def test_a_wrong_variable_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotbranch", "router"],
        env={"HOTBRANCH_PORT": "http"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "hotbranch router: HOTBRANCH_PORT http: should be a valid integer"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_every_setting_with_default_and_variable(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in cli.COMMANDS[command].settings.model_fields.items():
        assert variable(name) in text
        assert (flag(name) in text) != (name == "tenants")
        assert str(field.default) in text or not field.default


def test_help_of_the_whole_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys)
    assert status == 0
    assert [name for name in (*cli.COMMANDS, "version") if f"\n    {name} " not in out] == []


def test_repeated_flags_are_lists_and_mappings() -> None:
    arguments = cli.parse(["router", "--replica", "a:1", "--replica=b:2", "--models", "x=/x"])
    expected = {"replica": ["a:1", "b:2"], "models": ["x=/x"], "command": "router"}
    assert arguments == expected


def test_flags_left_out_are_not_given() -> None:
    assert cli.parse(["up"]) == {"command": "up"}


def test_a_command_gets_its_settings_and_returns_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).touch()
    (tmp_path / "entry.py").write_text(
        "def run(settings):\n    assert settings.port == 81\n    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    command = cli.Command("run one router", RouterSettings, "entry")
    monkeypatch.setattr(cli, "COMMANDS", {"router": command})
    assert cli.main(["router", "--model", str(tmp_path), "--port", "81"]) == 7


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "version") == (0, __version__ + "\n", "")


def test_model_prints_the_directory(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    assert run(capsys, "model", "--cache-dir", str(smollm2.parent)) == (0, f"{smollm2}\n", "")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield logging.getLogger("test")
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_fields_and_the_request(logger: logging.Logger) -> None:
    stream = StringIO()
    log.setup("info", "json", "router", stream)
    token = log.request_id.set("req-1")
    log.event(logger, "placed", replica="r 1", name="x", matched=16)
    log.request_id.reset(token)
    log.event(logger, "hidden", logging.DEBUG)
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.event(logger, "failed", logging.ERROR, error, reason="x" * 1000)
    placed, failed = map(json.loads, stream.getvalue().splitlines())
    assert placed.pop("time").endswith("Z")
    assert placed == {
        "level": "info",
        "process": "router",
        "logger": "test",
        "event": "placed",
        "replica": "r 1",
        "name": "x",
        "matched": 16,
        "request_id": "req-1",
    }
    assert "ValueError: broken" in failed["exception"]
    assert len(failed["reason"]) == log.LONGEST_FIELD + 1
    assert "request_id" not in failed


def test_text_lines_stay_lines(logger: logging.Logger) -> None:
    stream = StringIO()
    log.setup("warning", "text", "replica", stream)
    log.event(logger, "lost", logging.WARNING, peer="a:1", reason='two\nlines, "quoted"', empty="")
    logger.warning("third\nparty %s", "text")
    first, second = stream.getvalue().splitlines()
    assert first.split(" ", 1)[1] == (
        'warning replica lost peer=a:1 reason="two\\nlines, \\"quoted\\"" empty=""'
    )
    assert second.endswith("warning replica third\\nparty text")


def test_auto_is_json_away_from_a_terminal(logger: logging.Logger) -> None:
    stream = StringIO()
    log.setup("info", "auto", "router", stream)
    log.event(logger, "ready")
    assert json.loads(stream.getvalue())["event"] == "ready"


def test_two_models_under_one_name_are_refused(smollm2: Path) -> None:
    settings = RouterSettings(model=str(smollm2), served_name="x", models={"x": str(smollm2)})
    with pytest.raises(ValueError, match="two models are called 'x'"):
        load_models(settings)
