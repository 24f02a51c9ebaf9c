import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    """Where a package's files lie in the checkout, by the longest prefix that is mapped."""
    parts = package.split(".")
    for length in range(len(parts), 0, -1):
        mapped = SETUP["package-dir"].get(".".join(parts[:length]))
        if mapped is not None:
            return ROOT.joinpath(mapped, *parts[length:])
    raise AssertionError(package)


def test_every_folder_with_code_is_packaged():
    tops = [ROOT / folder for folder in ("wattgym", "hw", "live", "envs", "agents", "federated")]
    found = {path.parent for top in tops for path in top.rglob("__init__.py")}
    assert found == {folder_of(p) for p in SETUP["packages"] if p != "wattgym.datasets"}
    assert not list((ROOT / "datasets").rglob("*.py"))


def test_every_data_file_beside_code_is_packaged():
    patterns = SETUP["package-data"]
    for package in SETUP["packages"]:
        if package == "wattgym.datasets":
            continue
        for path in folder_of(package).iterdir():
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(path.match(pattern) for pattern in patterns.get(package, [])), path


def test_citation_and_version_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    import wattgym

    assert citation["version"] == project["version"] == wattgym.__version__


def test_pins_cover_every_requirement():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in text.splitlines() if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in wanted:
        name = requirement.split(">")[0].split("<")[0].split("=")[0].strip().lower().replace("_", "-")
        assert name in pinned, requirement
