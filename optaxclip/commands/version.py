"""The command `version`: prints what a bug report should say about the machine."""

import argparse
import importlib.metadata
import os
import platform
from collections import Counter

import jax

from optaxclip import __version__

HELP: str = "print the versions and devices that a bug report should name"
NEEDS: tuple[str, ...] = ()
EXTRA: str = ""

PACKAGES = ("jax", "jaxlib", "optax", "chex", "flax", "numpy", "scipy", "ml_dtypes")
SETTINGS = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing, because the command has no arguments."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Prints the report line by line; returns the exit code."""
    del args
    for name, what in report().items():
        print(f"{name:<16}{what}")
    return 0


def report() -> dict[str, str]:
    """The versions of packages and Python, the system, the devices, and settings of JAX."""
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    lines = {"optaxclip": __version__, "python": python, "platform": platform.platform()}
    lines |= {package: _installed(package) for package in PACKAGES}
    lines["devices"] = _devices()
    return lines | {name: os.environ[name] for name in SETTINGS if name in os.environ}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    try:
        kinds = Counter(f"{device.platform}: {device.device_kind}" for device in jax.devices())
    except RuntimeError as error:  # if no backend starts, the report says so
        return f"none: {error}"
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
