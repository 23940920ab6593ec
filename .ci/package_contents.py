"""Whether the wheel and the sdist in a folder hold all that they should, and nothing else.

python .ci/package_contents.py dist
"""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
ALWAYS = {"pyproject.toml", "README.md", "LICENSE", ".gitignore"}


def differences(found: set[str], expected: set[str], what: str) -> list[str]:
    """One line for each file that is missing, or too many."""
    missing = [f"{what} lacks {name}" for name in sorted(expected - found)]
    return missing + [f"{what} should not hold {name}" for name in sorted(found - expected)]


def of_wheel(path: Path, tracked: set[str], name: str) -> list[str]:
    """The differences of a wheel from the package's files that git knows."""
    package = {file for file in tracked if file.startswith("optaxclip/")}
    expected = package | {f"{name}.dist-info/{file}" for file in METADATA}
    return differences(set(zipfile.ZipFile(path).namelist()), expected, path.name)


def of_sdist(path: Path, tracked: set[str], name: str, included: list[str]) -> list[str]:
    """The differences of an sdist from the files that git knows and `pyproject.toml` includes."""
    places = tuple(place.removeprefix("/") for place in included)
    expected = {file for file in tracked if file in ALWAYS or file.startswith(places)}
    with tarfile.open(path) as archive:
        found = {member.name for member in archive.getmembers() if member.isfile()}
    return differences(found, {f"{name}/{file}" for file in {*expected, "PKG-INFO"}}, path.name)


def main(folder: Path) -> int:
    """Prints the differences; returns the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    name = f"optaxclip-{project['project']['version']}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    tracked = set(listed.stdout.decode().rstrip("\0").split("\0"))
    wheel, sdist = folder / f"{name}-py3-none-any.whl", folder / f"{name}.tar.gz"
    others = {path.name for path in folder.iterdir()} - {wheel.name, sdist.name}
    wrong = [f"{folder} should not hold {other}" for other in sorted(others)]
    wrong += of_wheel(wheel, tracked, name) + of_sdist(sdist, tracked, name, included)
    print("\n".join(wrong) or f"{wheel.name} and {sdist.name} hold what they should.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
