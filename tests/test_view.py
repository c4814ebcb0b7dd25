"""A replica's cache stream: gaps, regressions, new epochs, snapshots, ranks, groups."""

from collections import Counter

import pytest

from hotbranch.v1.cache_pb2 import (
    GROUP_ATTENTION,
    GROUP_STATE,
    GROUP_WINDOW,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Load,
    Run,
    Snapshot,
)
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.fleet.watcher import ViewLost
from router.index.index import Index
from router.index.view import View

R = Holder("r")
DESCRIPTION = Description(block_size=16, capacity_blocks=100, ranks=1)


def snapshot(epoch: int, sequence: int, *keys: int, last: bool = True) -> CacheUpdate:
    runs = [Run(keys=[key]) for key in keys]
    return CacheUpdate(epoch=epoch, snapshot=Snapshot(runs=runs, last=last, sequence=sequence))


def delta(
    epoch: int,
    sequence: int,
    stored: tuple[int, ...] = (),
    evicted: tuple[int, ...] = (),
    cleared: bool = False,
) -> CacheUpdate:
    runs = [Run(keys=[key]) for key in stored]
    gone = [Evicted(keys=evicted)]
    change = CacheDelta(sequence=sequence, stored=runs, evicted=gone, cleared=cleared)
    return CacheUpdate(epoch=epoch, delta=change)


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def view(index: Index) -> View:
    view = View(index, "r", Counter())
    view.connected(DESCRIPTION, comparable=True)
    view.restart()
    return view


def apply(view: View, *updates: CacheUpdate) -> None:
    for update in updates:
        view.apply(update, 0.0)


def test_snapshot_then_deltas(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10, 11, last=False))
    assert not view.current
    apply(view, snapshot(1, 7, 12), delta(1, 8, stored=(13,), evicted=(11,)))
    assert view.current
    assert index.held(R) == {10, 12, 13}
    apply(view, delta(1, 9, stored=(14,), cleared=True))
    assert index.held(R) == {14}


@pytest.mark.parametrize(
    ("sequence", "reason"), [(7, "regression"), (3, "regression"), (0, "regression"), (9, "gap")]
)
def test_anything_but_the_next_sequence_loses_the_view(
    index: Index, view: View, sequence: int, reason: str
) -> None:
    apply(view, snapshot(1, 7, 10))
    with pytest.raises(ViewLost, match=reason):
        apply(view, delta(1, sequence, stored=(11,)))
    assert not view.current
    assert index.held(R) == {10}


def test_a_lost_view_takes_no_deltas_until_a_snapshot(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10))
    with pytest.raises(ViewLost):
        apply(view, delta(1, 9, stored=(11,)))
    with pytest.raises(ViewLost, match="overtaken"):
        apply(view, delta(1, 10, stored=(12,)))
    view.restart()
    apply(view, snapshot(1, 10, 12))
    assert index.held(R) == {12}


def test_a_new_epoch_purges_at_once(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10, 11))
    index.predict(R, [30], 0.0)
    with pytest.raises(ViewLost, match="overtaken"):
        apply(view, delta(2, 8, stored=(12,)))
    assert index.held(R) == frozenset()
    assert index.match([30]).depth(R) == 0
    apply(view, snapshot(2, 0, 20))
    assert index.held(R) == {20}


def test_a_load_report_under_a_new_epoch_purges_too(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10), CacheUpdate(epoch=2, load=Load(running=1)))
    assert index.held(R) == frozenset()
    assert view.recoveries == {"epoch": 1}


def test_a_second_snapshot_replaces_the_first(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10, 11), snapshot(1, 9, 11, 12))
    assert index.held(R) == {11, 12}


def test_a_delta_before_the_end_of_a_second_snapshot_loses_the_view(
    index: Index, view: View
) -> None:
    apply(view, snapshot(1, 7, 10, 11), snapshot(1, 9, 12, last=False))
    with pytest.raises(ViewLost, match="overtaken"):
        apply(view, delta(1, 8, stored=(13,)))
    assert index.held(R) == {10, 11}


def test_a_reconnect_in_the_middle_of_a_snapshot_forgets_its_half(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10, last=False))
    view.restart()
    apply(view, snapshot(1, 8, 11))
    assert index.held(R) == {11}


def test_field_report_22_groups_that_are_not_attention_do_not_poison_the_chain(
    index: Index, view: View
) -> None:
    """A hybrid model's engine keeps state under the same keys, at other depths, and drops it."""
    chain = [10, 11, 12, 13]
    attention = Run(keys=chain, group=GROUP_ATTENTION)
    windows = Run(parent=11, keys=chain[2:], group=GROUP_WINDOW)
    state = Run(parent=12, keys=chain[3:], group=GROUP_STATE)
    for runs in ([windows, state, attention], [attention, state, windows]):
        apply(view, CacheUpdate(epoch=1, snapshot=Snapshot(runs=runs, last=True, sequence=4)))
        assert index.match(chain).depth(R) == 4
        gone = [Evicted(keys=chain[:3], group=group) for group in (GROUP_WINDOW, GROUP_STATE)]
        change = CacheDelta(sequence=5, stored=[windows, state], evicted=gone)
        apply(view, CacheUpdate(epoch=1, delta=change))
        assert index.match(chain).depth(R) == 4
        change = CacheDelta(sequence=6, evicted=[Evicted(keys=[13], group=GROUP_ATTENTION)])
        apply(view, CacheUpdate(epoch=1, delta=change))
        assert index.match(chain).depth(R) == 3  # and state was not counted as a copy


def test_a_closed_view_leaves_nothing(index: Index, view: View) -> None:
    apply(view, snapshot(1, 7, 10))
    view.close()
    assert index.blocks == 0
    assert view.recoveries == {"gone": 1}


def test_the_first_snapshot_leaves_what_was_predicted(index: Index, view: View) -> None:
    index.predict(R, [7, 8], 10.0)
    apply(view, snapshot(1, 5, 1, 2))
    assert index.match([7, 8]).depth(R) == 2
    assert index.held(R) == {1, 2}


def test_a_replica_out_of_reach_holds_nothing_and_may_come_back(index: Index, view: View) -> None:
    apply(view, snapshot(1, 5, 1, 2))
    index.predict(R, [7], 10.0)
    view.forget()
    assert (index.blocks, index.predicted_blocks, view.current) == (0, 0, False)
    view.connected(DESCRIPTION, comparable=True)
    view.restart()
    apply(view, snapshot(1, 5, 1, 2))
    assert index.held(R) == {1, 2}
    assert view.recoveries == {"reconnect": 1}


def test_until_it_reports_its_history_stands_for_it(index: Index, view: View) -> None:
    small = Description(block_size=16, capacity_blocks=2, ranks=1)
    view.connected(small, comparable=True)
    for key in (1, 2, 3):
        index.predict(R, [key], 0.0)
    assert index.held(R) == {2, 3}


def test_keys_that_cannot_be_compared_say_nothing(index: Index, view: View) -> None:
    view.connected(DESCRIPTION, comparable=False)
    view.restart()
    index.predict(R, [1], 0.0)
    apply(view, snapshot(1, 5, 2), delta(1, 9, stored=(3,)))
    assert index.held(R) == {1}
    apply(view, snapshot(2, 5, 2))
    assert index.held(R) == frozenset()


def test_ranks_come_and_go_with_the_description(index: Index, view: View) -> None:
    second = Holder("r", 1)
    view.connected(Description(block_size=16, ranks=2), comparable=True)
    view.restart()
    runs = [Run(keys=[10], rank=1), Run(keys=[11], rank=0)]
    apply(view, CacheUpdate(epoch=1, snapshot=Snapshot(runs=runs, last=True)))
    assert index.held(R) == {11}
    assert index.held(second) == {10}
    gone = [Evicted(keys=[10, 11], rank=1)]
    apply(view, CacheUpdate(epoch=1, delta=CacheDelta(sequence=1, evicted=gone)))
    assert index.held(R) == {11}
    assert index.held(second) == frozenset()
    change = CacheDelta(sequence=2, stored=[Run(keys=[12], rank=2)])
    with pytest.raises(ViewLost, match="rank"):
        apply(view, CacheUpdate(epoch=1, delta=change))
    view.connected(DESCRIPTION, comparable=True)
    with pytest.raises(KeyError):
        index.predict(second, [1], 0.0)


def test_a_key_in_two_places_loses_the_view_and_not_the_link(index: Index, view: View) -> None:
    view.apply(snapshot(1, 7, 10), 0.0)
    twice = CacheUpdate(epoch=1, delta=CacheDelta(sequence=8, stored=[Run(keys=[11, 11])]))
    with pytest.raises(ViewLost, match="inconsistent"):
        view.apply(twice, 0.0)
    assert not view.current
    assert index.blocks == 0
    view.forget()
    view.close()
