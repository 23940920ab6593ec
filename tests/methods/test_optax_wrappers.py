"""Optax's own tests of its wrappers, as they are, with a clip of ours in each optimizer."""

import functools

import pytest
from cases import slow_unless
from optax_suites import (
    IS_OLD,
    Behind,
    Instead,
    cases_of,
    in_front,
    loaded,
    plain,
    problems_of,
    suites_of,
)

import optaxclip


def remembering():
    """A clip with a memory for each leaf and a record, both finite, that lets everything pass."""
    return optaxclip.adagc(warmup_steps=10**6, lambda_abs=1e9)


def of_the_norm():
    """A clip without a memory that lets everything pass."""
    return optaxclip.clip_by_global_norm(1e9)


SAME = ("clip", "clip_by_block_rms", "clip_by_global_norm", "adaptive_grad_clip")
OURS = Instead(**{name: getattr(optaxclip, name) for name in SAME})

# What each file makes its optimizers of; before each comes a clip of ours.
BEFORE = {
    "_src/combine_test.py": "alias",
    "_src/lookahead_test.py": "_test_optimizer",
    "_src/transform_test.py": "alias",
    "contrib/_complex_valued_test.py": "transform",
    "contrib/_galore_test.py": "transform",
    "contrib/_mechanic_test.py": "_test_optimizer",
    "contrib/_schedule_free_test.py": "alias",
    "experimental/_aggregating_test.py": "alias",
    "transforms/_accumulation_test.py": "alias transform",
    "transforms/_combining_test.py": "alias",
    "transforms/_conditionality_test.py": "alias",
    "transforms/_constraining_test.py": "transform",
    "transforms/_freezing_test.py": "alias",
    "transforms/_layouts_test.py": "alias",
    "transforms/_masking_test.py": "alias",
    "tree_utils/_state_utils_test.py": "alias",
}
# Seconds each, as they step outside of `jit`.
LENGTHY = {"contrib/_galore_test.py", "experimental/_aggregating_test.py"}
LENGTHY |= {"transforms/_accumulation_test.py", "transforms/_conditionality_test.py"}
LENGTHY |= {"_src/combine_test.py", "_src/lookahead_test.py"}
# Minutes each: 240 searches along a line, and 400,000 steps.
LONG = {"_src/linesearch_test.py": "alias", "contrib/_sam_test.py": "alias"}
# Where the others take Optax's clips from.
INSTEAD = {
    "schedules/_inject_test.py": "clipping" if IS_OLD else "transforms",
    "transforms/_monitoring_test.py": "_clipping",
}

# A stage in front moves the place of a state, at which these look.
NOT_OURS = {"test_masked_state_structure", "test_adam", "test_inject_hparams"}
NOT_OURS |= {"test_map_params_to_none", "test_map_non_params_to_none"}
NOT_OURS |= {"test_mu_dtype_controls_moment_dtype"}
# A clip would have to be told that all devices of `pmap` have the same.
NOT_OURS |= {"test_apply_if_finite_pmap"}
# Without ours they fail too: JAX words the errors otherwise by now.
NOT_OURS |= {"test_bad_structure_raises", "test_selective_bad_structure"}
# Optax skips it itself.
NOT_OURS |= {"test_linesearch"}

# A hundred compilations, of steps outside of `jit`.
AT_NIGHT = ("test_multi_steps_mixed_precision",)


def problems_of_file(file, cases, **values):
    """What goes wrong in some of the tests of a file, with other values for names in it."""
    suites = suites_of(loaded(file, **values))
    assert suites
    chosen = [(suite, [case for case in cases_of(suite) if cases(plain(case))]) for suite in suites]
    return [problem for suite, names in chosen if names for problem in problems_of(suite, names)]


def with_before(stage, names):
    """For `loaded`: a stage before what namespaces or functions make."""
    return {
        name: functools.partial(in_front if name.startswith("_") else Behind, stage=stage)
        for name in names.split()
    }


def is_quick(case):
    return case not in NOT_OURS and not case.startswith(AT_NIGHT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:updates has no floating-point leaves")
@pytest.mark.parametrize("file", slow_unless(lambda file: file not in LENGTHY, BEFORE))
def test_clip_before_optimizers_passes_optax_wrapper_tests(file):
    assert not problems_of_file(file, is_quick, **with_before(remembering, BEFORE[file]))


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore:updates has no floating-point leaves")
@pytest.mark.parametrize("stage", [remembering, of_the_norm])
@pytest.mark.parametrize("file", BEFORE | LONG)
def test_clip_before_optimizers_passes_long_optax_tests(file, stage):
    values = with_before(stage, (BEFORE | LONG)[file])
    assert not problems_of_file(file, lambda case: case not in NOT_OURS, **values)


@pytest.mark.slow
@pytest.mark.parametrize("file", slow_unless(lambda file: "monitoring" in file, INSTEAD))
def test_clips_replace_optax_clips_in_wrapper_tests(file):
    assert not problems_of_file(file, is_quick, **{INSTEAD[file]: OURS})
