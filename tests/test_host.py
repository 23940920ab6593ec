"""The files for the host and for releases agree with `pyproject.toml` and with each other."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

import optaxclip

ROOT = Path(__file__).parents[1]
if not (ROOT / ".github").is_dir():
    pytest.skip("not in the sdist", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = {path.stem: path.read_text("utf-8") for path in ROOT.glob(".github/workflows/*.yml")}
# A commit and the version that it is: a tag can be moved to other code.
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def test_workflow_actions_pin_digests():
    lines = re.findall(r"uses: (.*)", "\n".join(WORKFLOWS.values()))
    actions = {line for line in lines if not line.startswith("./")}
    assert len(actions) >= 5
    assert not [action for action in actions if not PINNED.fullmatch(action)]
    names = [action.split("@")[0] for action in actions]
    assert len(set(names)) == len(names), "one action in two versions"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_have_read_permissions_and_timeouts(name):
    assert "\npermissions:\n  contents: read\n\n" in WORKFLOWS[name]
    jobs = WORKFLOWS[name].count("runs-on:")
    assert WORKFLOWS[name].count("timeout-minutes:") == jobs > 0


def test_shell_scripts_run_through_shellcheck():
    files = (path for path in (ROOT / ".ci").iterdir() if path.is_file())
    scripts = sorted(f".ci/{path.name}" for path in files if not path.suffix)
    for text in (WORKFLOWS["tests"], (ROOT / ".ci" / "run").read_text("utf-8")):
        assert f" shellcheck {' '.join(scripts)}\n" in text
    assert "\n      - run: actionlint\n" in WORKFLOWS["tests"]


@pytest.mark.skipif(not shutil.which("actionlint"), reason="the program is not installed")
def test_workflows_pass_actionlint():
    done = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stdout


def test_workflow_pythons_match_classifiers():
    classifiers = "\n".join(PROJECT["classifiers"])
    promised = re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    matrix = re.search(r"python: \[(.*)\]", WORKFLOWS["tests"])
    assert matrix
    assert re.findall(r"3\.\d+", matrix[1]) == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_oldest_versions_match_dependencies():
    script = (ROOT / ".ci" / "sharding_versions").read_text("utf-8")
    pins = re.search(r"oldest=\((.*)\)", script)
    assert pins
    oldest = dict(pin.split("==") for pin in pins[1].split())
    for requirement in PROJECT["dependencies"]:
        name, version = requirement.split(">=")
        assert oldest.get(name, version).startswith(version)


def test_version_agrees_across_files():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert PROJECT["version"] == optaxclip.__version__
    assert f"\nversion: {PROJECT['version']}\n" in citation


@pytest.mark.parametrize(
    ("tag", "heading", "reason"),
    [
        ("v0.1.0", "## [0.1.0] - 2026-12-01", None),
        ("v0.1.0", "## [0.1.0] - 2026-12-02", "CITATION.cff is not of 2026-12-02"),
        ("v0.2.0", "## [0.2.0] - 2026-12-01", "The tag is v0.2.0"),
        ("0.1.0", "## [0.1.0] - 2026-12-01", "The tag is 0.1.0"),
        ("v0.1.0", "## [Unreleased]", "no heading"),
    ],
)
def test_release_script_requires_matching_tag_and_date(tmp_path, tag, heading, reason):
    for name in ("pyproject.toml", "CITATION.cff", "optaxclip/__init__.py", ".ci/release_version"):
        text = (ROOT / name).read_text("utf-8").replace(PROJECT["version"], "0.1.0")
        if name == "CITATION.cff":
            text = re.sub(r"^date-released: .*\n", "", text, flags=re.MULTILINE)
            text += "date-released: 2026-12-01\n"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n", "utf-8")
    command = ["bash", tmp_path / ".ci" / "release_version", tag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (reason is None)
    assert (reason or "may be published") in done.stdout + done.stderr


def test_bug_form_names_report_command():
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text("utf-8")
    assert "import jax; jax.print_environment_info()" in form
    assert "`optaxclip.__version__`" in form


def test_package_contents_reports_missing_and_extra_files(tmp_path):
    place = ROOT / ".ci" / "package_contents.py"
    spec = importlib.util.spec_from_file_location("package_contents", place)
    contents = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contents)
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("optaxclip/ops.py", "tests/test_ops.py", "a.dist-info/METADATA"):
            archive.writestr(name, "")
    wrong = contents.of_wheel(wheel, {"optaxclip/ops.py", "optaxclip/py.typed"}, "a")
    assert "a.whl lacks optaxclip/py.typed" in wrong
    assert "a.whl should not hold tests/test_ops.py" in wrong
    assert not [line for line in wrong if line.endswith(("ops.py", "METADATA")) and "lacks" in line]
