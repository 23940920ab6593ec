"""The report for bugs: what it names, also where something is missing."""

import importlib.metadata

import jax

import optaxclip
from optaxclip.__main__ import main
from optaxclip.commands import version


def printed(capsys):
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def test_names_versions_and_devices(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    found = printed(capsys)
    assert found["optaxclip"] == optaxclip.__version__
    for package in ("jax", "jaxlib", "optax", "chex"):
        assert found[package] == importlib.metadata.version(package)
    assert {"python", "platform", "flax"} <= set(found)
    assert found["devices"] == f"{len(jax.devices())} x cpu: cpu"
    assert found["JAX_PLATFORMS"] == "cpu"
    assert "JAX_ENABLE_X64" not in found


def test_says_what_is_missing(capsys, monkeypatch):
    def no_backend():
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", no_backend)
    monkeypatch.setattr(version, "PACKAGES", ("no_such_package",))
    found = printed(capsys)
    assert found["devices"] == "none: no backend"
    assert found["no_such_package"] == "not installed"
