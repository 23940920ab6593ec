"""Optax's test files, which its wheel ships, with ours in their tables: their tests as they are."""

import ast
import functools
import inspect
import pathlib
import re
import types
import unittest
import warnings

import jax
import optax
from methods_table import METHODS

import optaxclip

ROOT = pathlib.Path(optax.__file__).parent
IS_OLD = tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 7)
"""Whether each of Optax's tests has a case for each of the ways to call it that `chex` knows."""
WAYS = re.compile("__with(out)?_(jit|device|pmap)$")
# They take what an update of Optax's suites is not given, or thresholds for leaves of certain
# names.
WITHOUT = {"clip_attention_logits", "skip_above_loss", "clip_by_group_norm_dict", "muon"}
NAMES = [name for name in METHODS if name not in WITHOUT]


def chained(name):
    """A factory like those of `optax`'s optimizers: the method, and Adam behind it."""
    is_optimizer = name == "scale_by_stable_adam"

    def factory(learning_rate: optax.ScalarOrSchedule = 1e-2):
        own = METHODS[name].make()
        if name == "skip_nonfinite":
            return optaxclip.skip_nonfinite(optax.adam(learning_rate))
        if name.startswith("skip"):
            return optaxclip.skip_above(optax.adam(learning_rate), 6.0)
        behind = optax.scale_by_learning_rate if is_optimizer else optax.adam
        return optax.chain(own, behind(learning_rate))

    return factory


def loaded(path, **values):
    """A module of one of Optax's files, with other values for some names that it has at its top.

    Args:
      path: of the file, from Optax's folder.
      **values: for each name a function of what the file gives it: a table, a module, a function.
    """
    tree = ast.parse((ROOT / path).read_text())
    body, missing = [], set(values)
    for node in tree.body:
        body.append(node)
        for name in sorted(_names_of(node) & missing):
            missing.remove(name)
            body += ast.parse(f"{name} = _value_of_{name}({name})").body
    if missing:
        raise LookupError(f"{path} has no {missing}")
    tree.body = body
    ast.fix_missing_locations(tree)
    module = types.ModuleType(f"optax_suites_{pathlib.Path(path).stem}")
    vars(module).update({f"_value_of_{name}": value for name, value in values.items()})
    with warnings.catch_warnings():
        # Their tables have what Optax is about to take away.
        warnings.simplefilter("ignore")
        exec(compile(tree, str(ROOT / path), "exec"), vars(module))
    return module


def _names_of(node):
    """What a statement assigns, imports or defines."""
    assigned = {x.id for x in getattr(node, "targets", []) if isinstance(x, ast.Name)}
    imported = {x.asname or x.name for x in getattr(node, "names", []) if isinstance(x, ast.alias)}
    return assigned | imported | {getattr(node, "name", None)}


def always(value):
    """For `loaded`: a value, whatever the file has."""
    return lambda theirs: value


def suites_of(module):
    """The classes of tests in a module."""
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    return [kind for kind in kinds if issubclass(kind, unittest.TestCase) and cases_of(kind)]


class NewJax:
    """JAX to files that take the text "0.10" for less than "0.7", and would skip their tests."""

    __version__ = "999"

    def __getattr__(self, name):
        return getattr(jax, name)


def cases_of(kind, names=()):
    """The tests of a class, those whose names begin with one of `names` if there are some."""
    found = unittest.defaultTestLoader.getTestCaseNames(kind)
    # Of several ways to call what is tested, one.
    found = [name for name in found if name.endswith("__with_jit") or not WAYS.search(name)]
    return [name for name in found if not names or name.startswith(tuple(names))]


def plain(case):
    """The name of a case without the way in which it calls what it tests."""
    return WAYS.sub("", case)


def problems_of(kind, cases):
    """What went wrong in some tests of a class; they rely on implicit promotion."""
    result = unittest.TestResult()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for case in cases:
            kind(case).run(result)
    assert result.testsRun == len(cases) > 0
    # Of their own wrappers some are left out by name.
    skipped = [(case, why) for case, why in result.skipped if "not supported" not in why]
    wrong = result.failures + result.errors + skipped
    return [f"{case.id()}\n{text}" for case, text in wrong]


def chains(names=NAMES):
    """A namespace of factories, as the suites take them from `optax.contrib` and `alias`."""
    return types.SimpleNamespace(**{name: chained(name) for name in names})


class Behind:
    """A namespace of Optax's in which all transformations have a stage of ours in front."""

    def __init__(self, theirs, stage):
        self._theirs, self._stage = theirs, stage

    def __getattr__(self, name):
        made = getattr(self._theirs, name)
        return in_front(made, self._stage) if inspect.isfunction(made) else made


def in_front(factory, stage):
    """A factory of transformations, of the same signature, that puts a stage in front of each."""

    @functools.wraps(factory)
    def with_stage(*args, **options):
        made = factory(*args, **options)
        is_made = isinstance(made, optax.GradientTransformation)
        return optax.chain(stage(), made) if is_made else made

    return with_stage


class Instead:
    """For `loaded`: a namespace of Optax's with ours for some of its functions."""

    def __init__(self, **ours):
        self._ours = ours

    def __call__(self, theirs):
        return types.SimpleNamespace(**vars(theirs) | self._ours)
