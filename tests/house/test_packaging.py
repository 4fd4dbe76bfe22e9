"""Recipes of other package managers: they can be read, and say what pyproject.toml says."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

import nnlo_common
from tests.helpers.paths import ROOT

PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RELEASE = nnlo_common.__version__.partition(".dev")[0]
#: Another name of the same package.
CONDA = {"torch": "pytorch"}


def bounds(requirements):
    """The oldest version of each package that is required, by its name in small letters."""
    found = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement) for requirement in requirements)
    return {one[1].lower(): one[2] for one in found if one}


EXTRAS = {name: bounds(lines) for name, lines in PROJECT["optional-dependencies"].items()}
RUN = bounds(PROJECT["dependencies"]) | EXTRAS["mpi"]
OPTIONAL = {
    name: version
    for extra in ("torch", "keras", "hdf5", "yaml", "tune", "lightning", "huggingface")
    for name, version in EXTRAS[extra].items()
}


def conda():
    jinja2 = pytest.importorskip("jinja2", reason="comes with PyTorch")
    yaml = pytest.importorskip("yaml", reason="the environment for MPICH has no PyYAML")
    text = (PACKAGING / "conda" / "meta.yaml").read_text()
    return yaml.safe_load(jinja2.Template(text).render(environ={}, PYTHON="python"))


def test_the_conda_recipe_says_what_pyproject_says():
    recipe = conda()
    run = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    assert run.pop("python") == PROJECT["requires-python"]
    assert run == {name: f">={version}" for name, version in RUN.items()}
    constrained = dict(line.split(" ", 1) for line in recipe["requirements"]["run_constrained"])
    assert constrained == {CONDA.get(name, name): f">={version}" for name, version in OPTIONAL.items()}
    assert recipe["package"]["version"] == RELEASE
    assert recipe["build"]["entry_points"] == [f"nnlo = {PROJECT['scripts']['nnlo']}"]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (
        PROJECT["description"],
        PROJECT["license"],
    )


def test_the_spack_package_says_what_pyproject_says():
    tree = ast.parse((PACKAGING / "spack" / "package.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked, optional = {}, {}
    for call in calls:
        if ast.unparse(call.func) == "depends_on":
            name, _, version = call.args[0].value.partition("@")
            when = [word for word in call.keywords if word.arg == "when"]
            (optional if when else asked)[name] = version.removesuffix(":")
    assert asked.pop("python") == "3.11"
    assert PROJECT["requires-python"] == ">=3.11"
    del asked["py-hatchling"]
    assert asked == {f"py-{name}": version for name, version in RUN.items()}
    of_extras = [EXTRAS[name] for name in ("torch", "keras", "hdf5", "yaml")]
    assert optional == {f"py-{name}": version for extra in of_extras for name, version in extra.items()}
    (pypi,) = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.targets[0].id == "pypi"
    ]
    assert pypi == f"nnlo/nnlo-{RELEASE}.tar.gz"


def at_least(version, bound):
    return [int(part) for part in version.split(".")] >= [int(part) for part in bound.split(".")]


def test_the_easybuild_recipe_has_what_pyproject_asks_for():
    (path,) = (PACKAGING / "easybuild").glob("*.eb")
    tree, found = ast.parse(path.read_text()), {"version": RELEASE}
    for node in tree.body:
        name = node.targets[0].id
        if name != "version":
            found[name] = eval(compile(ast.Expression(node.value), str(path), "eval"), {}, found)
    toolchain = found["toolchain"]
    assert path.name == f"nnlo-{RELEASE}-{toolchain['name']}-{toolchain['version']}.eb"
    had = dict(found["dependencies"]) | {name: version for name, version, *_ in found["exts_list"]}
    assert had.pop("nnlo") == RELEASE
    assert re.fullmatch(r"3\.1[123]\.\d+", had.pop("Python"))
    had["tomli-w"] = had.pop("tomli_w")
    assert had.pop("SciPy-bundle") >= "2024.05"  # the first with NumPy 2
    for name, bound in RUN.items():
        assert name == "numpy" or at_least(had[name], bound), name


def test_the_citation_names_the_version():
    assert f"\nversion: {RELEASE}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_release_notes_are_of_the_version_in_the_making():
    assert f"## {RELEASE}" in (ROOT / "docs" / "releases.md").read_text()
