"""The command line: its usage, its version, and messages about optional packages."""

import subprocess
import sys

import pytest

import optaxclip
import optaxclip.__main__ as command_line
import optaxclip._base.validation as validation
from optaxclip.__main__ import main


def test_main_without_command_prints_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("usage: ")
    assert "suggest a threshold from a log" in printed.err


def test_main_prints_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"optaxclip {optaxclip.__version__}\n"


def test_main_names_missing_packages(capsys, monkeypatch):
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main(["suggest", "log"])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert f"pandas is required; run {validation.install_command('logs')}" in line


def test_remedy_installs_checkout(tmp_path, monkeypatch):
    """The index may not have the package, and the package need not be installed."""
    monkeypatch.setattr(validation, "REPO_ROOT", tmp_path)
    assert validation.install_command("plot") == 'pip install "optaxclip[plot]"'
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert validation.install_command("plot") == 'pip install "optaxclip[plot]"'
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "optaxclip"\n')
    assert validation.install_command("plot") == f'pip install "{tmp_path}[plot]"'
    monkeypatch.chdir(tmp_path)
    assert validation.install_command("plot") == 'pip install ".[plot]"'


def test_main_is_quiet_after_interrupt(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_run_suggest", interrupt)
    assert main(["suggest", "log"]) == 130
    assert capsys.readouterr() == ("", "")


def test_suggest_help_needs_no_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('matplotlib', 'pandas')));"
        "from optaxclip.__main__ import main; main(['suggest', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "examples:\n  python -m optaxclip suggest" in done.stdout
