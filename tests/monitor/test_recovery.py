"""The page on recovery: a bad stretch of data ruins a run, and the loop that goes back saves it."""

import numpy as np
import pytest
import shown_code

pytestmark = pytest.mark.usefixtures("as_users")

pytest.importorskip("orbax.checkpoint")
PAGE = "docs/recovery.md"
BLOCK, IN_VAIN, EVENTS, GRAIN = shown_code.blocks(PAGE)
BEFORE, AFTER = 30, 41
"""Evaluations: the last before the stretch, and the first with a good batch behind it."""


@pytest.fixture(scope="module")
def page():
    return shown_code.run(BLOCK, PAGE)


@pytest.mark.slow
def test_recovery_page_run_fails_without_recovery(page):
    before = page["nothing"][BEFORE]
    assert page["nothing"][AFTER - 1] > 3 * before
    assert min(page["nothing"][AFTER : AFTER + 10]) > before + 0.1  # a hundred good steps later
    assert min(page["skipping"][AFTER - 1 :]) > 3 * before  # all good batches are skipped


@pytest.mark.slow
def test_recovery_page_run_succeeds_with_recovery(page):
    before = page["nothing"][BEFORE]
    np.testing.assert_array_equal(page["recovering"][:AFTER], page["skipping"][:AFTER])
    assert max(page["recovering"][AFTER + 1 :]) < before + 0.05
    assert page["before"] == before


@pytest.mark.slow
def test_recovery_page_run_resumes_after_interruption(page, tmp_path):
    begun = page["train"](page["skip"], recovers=True, folder=tmp_path, steps=200)
    then = page["train"](page["skip"], recovers=True, folder=tmp_path, steps=240)
    np.testing.assert_array_equal(begun + then, page["recovering"][:24])


@pytest.mark.slow
def test_recovery_page_run_raises_without_checkpoint(page, monkeypatch):
    monkeypatch.setitem(page, "SAVE_EVERY", 10**6)
    with pytest.raises(RuntimeError, match="no checkpoint is left"):
        page["train"](page["skip"], recovers=True)


def test_recovery_page_prints_repeated_rollbacks(capsys):
    shown_code.run(IN_VAIN, PAGE)
    assert capsys.readouterr().out.splitlines() == ["roll back", "roll back", "ok"]


def test_recovery_page_finds_bad_batch_by_step():
    pytest.importorskip("matplotlib")
    found = shown_code.run(EVENTS, PAGE)
    assert found["steps"].tolist() == [37, 52]
    assert np.isnan(found["bad"][37]).sum() == 1
    assert found["bad"][52].max() == 1e4
    assert set(found["events"]["verdict"]) == {"taken", "clipped", "skipped"}


def test_recovery_page_finds_bad_batch_in_grain():
    grain = pytest.importorskip("grain")
    found = shown_code.run(GRAIN, PAGE)
    examples, batch = found["examples"], found["batch"]
    np.testing.assert_array_equal(examples[found["indices"]], batch)
    every = iter(found["data"].to_iter_dataset())
    np.testing.assert_array_equal([next(every) for _ in range(38)][37], batch)
    shards = grain.sharding.ShardOptions(0, 1)
    sampler = grain.samplers.IndexSampler(
        num_records=1000, shard_options=shards, shuffle=True, num_epochs=1, seed=0
    )
    batches = [grain.transforms.Batch(8)]
    loader = grain.DataLoader(data_source=examples, sampler=sampler, operations=batches)
    every = iter(loader)
    keys = [sampler[37 * 8 + i].record_key for i in range(8)]
    np.testing.assert_array_equal([next(every) for _ in range(38)][37], examples[keys])
