"""A replica's cache stream: gaps, regressions, new epochs, snapshots."""

import pytest

from hotbranch.v1.cache_pb2 import (
    TIER_CPU,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Run,
    Snapshot,
)
from router.fleet.watcher import ViewLost
from router.index.index import Index
from router.index.view import View


def snapshot(epoch: int, sequence: int, *keys: int, last: bool = True) -> CacheUpdate:
    runs = [Run(parent=0, keys=[key]) for key in keys]
    return CacheUpdate(epoch=epoch, snapshot=Snapshot(runs=runs, last=last, sequence=sequence))


def delta(
    epoch: int,
    sequence: int,
    stored: tuple[int, ...] = (),
    evicted: tuple[int, ...] = (),
) -> CacheUpdate:
    change = CacheDelta(
        sequence=sequence, stored=[Run(keys=stored)], evicted=[Evicted(keys=evicted)]
    )
    return CacheUpdate(epoch=epoch, delta=change)


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def view(index: Index) -> View:
    return View(index, "r")


def test_snapshot_then_deltas(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10, 11, last=False))
    assert not view.current
    view.apply(snapshot(1, 7, 12))
    view.apply(delta(1, 8, stored=(13,), evicted=(11,)))
    assert view.current
    assert index.held("r") == {10, 12, 13}


@pytest.mark.parametrize("sequence", [7, 3, 9, 0])
def test_anything_but_the_next_sequence_loses_the_view(
    index: Index, view: View, sequence: int
) -> None:
    view.apply(snapshot(1, 7, 10))
    with pytest.raises(ViewLost, match="gap"):
        view.apply(delta(1, sequence, stored=(11,)))
    assert not view.current
    assert index.held("r") == {10}


def test_a_lost_view_takes_no_deltas_until_a_snapshot(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10))
    with pytest.raises(ViewLost):
        view.apply(delta(1, 9, stored=(11,)))
    with pytest.raises(ViewLost, match="no_snapshot"):
        view.apply(delta(1, 10, stored=(12,)))
    view.restart()
    view.apply(snapshot(1, 10, 12))
    assert index.held("r") == {12}


def test_a_new_epoch_purges_at_once(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10, 11))
    with pytest.raises(ViewLost, match="no_snapshot"):
        view.apply(delta(2, 8, stored=(12,)))
    assert index.held("r") == frozenset()
    view.apply(snapshot(2, 0, 20))
    assert index.held("r") == {20}


def test_a_second_snapshot_replaces_the_first(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10, 11))
    view.apply(snapshot(1, 9, 11, 12))
    assert index.held("r") == {11, 12}


def test_a_reconnect_in_the_middle_of_a_snapshot_forgets_its_half(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10, last=False))
    view.restart()
    view.apply(snapshot(1, 8, 11))
    assert index.held("r") == {11}


def test_other_tiers_do_not_count_as_resident(index: Index, view: View) -> None:
    run = Run(keys=[10], tier=TIER_CPU)
    view.apply(CacheUpdate(epoch=1, snapshot=Snapshot(runs=[run], last=True)))
    assert index.held("r") == frozenset()


def test_a_closed_view_leaves_nothing(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10))
    view.close()
    assert index.blocks == 0


def test_the_first_snapshot_leaves_what_was_predicted(index: Index, view: View) -> None:
    index.predict("r", 0, [7, 8], 10.0)
    view.apply(snapshot(1, 5, 1, 2))
    assert index.match([7, 8]).depth("r") == 2


def test_a_replica_out_of_reach_holds_nothing_and_may_come_back(index: Index, view: View) -> None:
    view.apply(snapshot(1, 5, 1, 2))
    index.predict("r", 0, [7], 10.0)
    view.forget()
    assert (index.blocks, index.predicted_blocks, view.current) == (0, 0, False)
    view.restart()
    view.apply(snapshot(1, 5, 1, 2))
    assert index.held("r") == {1, 2}
