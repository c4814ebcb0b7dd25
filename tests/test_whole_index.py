"""The whole index, told by streams as replicas tell it, against dictionaries of blocks."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotbranch.v1.cache_pb2 import (
    TIER_CPU,
    TIER_DISK,
    TIER_GPU,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Load,
    Run,
    Snapshot,
    Tier,
)
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.fleet.watcher import ViewLost
from router.index.index import COMPUTED_S, Index
from router.index.predictions import _below
from router.index.view import RECOVERIES, View

LIFE_S = 10.0
DESCRIPTION = Description(block_size=16, ranks=2)
KEYS = range(2, 16)
"""The digits of a key behind its leading one, in base two, are its path: 0b1011 is below 0b101."""
LEAVES = range(8, 16)


def chain(key: int) -> list[int]:
    """The keys from the root down to one."""
    return [key >> up for up in reversed(range(key.bit_length() - 1))]


def run(key: int, rank: int, tier: Tier) -> Run:
    return Run(parent=key >> 1 if key > 3 else None, keys=[key], rank=rank, tier=tier)


names = st.sampled_from("ab")
ranks = st.sampled_from((0, 1))
tiers = st.sampled_from((TIER_GPU, TIER_GPU, TIER_GPU, TIER_CPU, TIER_DISK))
keys = st.sampled_from(KEYS)
some_keys = st.one_of(st.lists(keys, max_size=5), keys.map(chain))
Change = tuple[int, Tier, list[int], list[int]]
"""In a tier of a rank: stored, and evicted."""
changes = st.lists(
    st.tuples(ranks, tiers, some_keys, some_keys.map(lambda run: run[::-1])), max_size=3
)
Truth = dict[tuple[int, Tier], Counter[int]]


def nothing() -> Truth:
    return {(rank, tier): Counter() for rank in (0, 1) for tier in Tier.values()}


class Replica:
    """What it holds by rank and tier, twice what it stored twice; what the router should take it to
    hold, down to each tier that it has heard of; and the paths predicted for it, with the end of
    their lives and how many count on them."""

    def __init__(self, index: Index, name: str, totals: Counter[str]) -> None:
        self.holders = [Holder(name, rank) for rank in (0, 1)]
        self.truth = nothing()
        self.told: dict[Holder, Counter[int]] = {holder: Counter() for holder in self.holders}
        self.soon: list[dict[int, tuple[float, int]]] = [{}, {}]
        self.epoch, self.sequence = 1, 0
        self.heard: int | None = None  # the last epoch
        self.connected = False  # and heard something since
        self.follows = False
        self.counted: Counter[str] = Counter()
        self.view = View(index, name, totals)
        self.view.connected(DESCRIPTION, comparable=True)
        self.view.restart()

    def change(self, change: list[Change], cleared: bool = False) -> CacheUpdate:
        """Clear, store and evict, in this order; the delta that tells of it.

        Only "a" stores blocks below others that it does not have, or evicts such.
        """
        self.sequence += 1
        message = CacheDelta(sequence=self.sequence, cleared=cleared)
        if cleared:
            self.truth = nothing()
        for rank, tier, stored, _ in change:
            stored = [key for last in stored for key in chain(last)] if self.orderly else stored
            message.stored.extend(run(key, rank, tier) for key in stored)
            self.truth[rank, tier].update(stored)
        for rank, tier, _, evicted in change:
            evicted = self.branches(rank, tier, evicted) if self.orderly else evicted
            message.evicted.append(Evicted(keys=evicted, rank=rank, tier=tier))
            self.truth[rank, tier] -= Counter(evicted)
        return CacheUpdate(epoch=self.epoch, delta=message)

    @property
    def orderly(self) -> bool:
        return self.holders[0].replica == "b"

    def branches(self, rank: int, tier: Tier, heads: list[int]) -> list[int]:
        """These blocks and all below them, every copy, children first; of a leaf, one copy."""
        held = sorted(self.truth[rank, tier].elements(), reverse=True)
        if len(heads) == 1 and not any(heads[0] == key >> 1 for key in held):
            return heads if heads[0] in held else []
        return [key for key in held if set(heads) & set(chain(key))]

    def snapshot(self) -> list[CacheUpdate]:
        """A message for each rank."""
        parts = [
            Snapshot(
                runs=[
                    run(key, rank, tier)
                    for (other, tier), bag in self.truth.items()
                    for key in bag.elements()
                    if other == rank
                ],
                last=rank == 1,
                sequence=self.sequence,
            )
            for rank in (0, 1)
        ]
        return [CacheUpdate(epoch=self.epoch, snapshot=part) for part in parts]

    def hear(self, update: CacheUpdate) -> None:
        """Of a new epoch: the old one's blocks are gone, and what was predicted with them, but for
        what was predicted since it connected."""
        if self.heard not in (None, update.epoch):
            self.counted["epoch"] += 1
            if self.connected:
                self.forget()
        self.heard = update.epoch
        self.connected = True

    def tell(self, delta: CacheDelta) -> None:
        """A block lies in its tier, and is there for whoever asks down to a lower one."""
        if delta.cleared:
            self.forget()
        for run in delta.stored:
            self.know(run.rank, run.tier)
            for holder in self.down_to(run.rank, run.tier):
                self.told[holder].update(run.keys)
        for gone in delta.evicted:
            for holder in self.down_to(gone.rank, gone.tier):
                self.told[holder] -= Counter(gone.keys)

    def tell_all(self) -> None:
        for (rank, tier), bag in self.truth.items():
            if bag:
                self.know(rank, tier)
        for holder in self.told:
            bags = (self.truth[holder.rank, tier] for tier in Tier.values() if tier <= holder.tier)
            self.told[holder] = sum(bags, Counter())

    def know(self, rank: int, tier: Tier) -> None:
        """What was there before it counts there as well."""
        holder = Holder(self.holders[rank].replica, rank, tier)
        if holder not in self.told:
            above = max(other for other in self.told if other < holder and other.rank == rank)
            self.told[holder] = Counter(self.told[above])

    def down_to(self, rank: int, tier: Tier) -> list[Holder]:
        return [holder for holder in self.told if holder.rank == rank and holder.tier >= tier]

    def forget(self) -> None:
        self.told = {holder: Counter() for holder in self.told}
        self.soon = [{}, {}]

    def predicted(self, rank: int) -> set[int]:
        return {key for last in self.soon[rank] for key in chain(last)}


class WholeIndexMachine(RuleBasedStateMachine):
    """Two replicas of two ranks, of which one router hears."""

    @initialize()
    def begin(self) -> None:
        self.index = Index(prediction_s=LIFE_S)
        self.now = 0.0
        self.totals: Counter[str] = Counter()
        self.replicas = {name: Replica(self.index, name, self.totals) for name in "ab"}

    # What the stream says.

    @rule(name=names, change=changes, cleared=st.sampled_from((False, False, False, True)))
    def delta(self, name: str, change: list[Change], cleared: bool) -> None:
        replica = self.replicas[name]
        update = replica.change(change, cleared)
        if not replica.follows:
            self._loses(replica, update, "overtaken")
            return
        replica.view.apply(update, self.now)
        replica.tell(update.delta)

    @rule(name=names, change=changes, slip=st.sampled_from((-2, -1, 1, 2)))
    def slipped_delta(self, name: str, change: list[Change], slip: int) -> None:
        """It comes again, late, or after one that was lost: it is not taken, nor the next ones."""
        replica = self.replicas[name]
        update = replica.change(change)
        update.delta.sequence = max(0, replica.sequence + slip)
        reason = "gap" if slip > 0 else "regression"
        self._loses(replica, update, reason if replica.follows else "overtaken")

    @rule(name=names, between=st.sampled_from(("nothing", "load", "delta", "cut")), late=changes)
    def snapshot(self, name: str, between: str, late: list[Change]) -> None:
        """In two messages, between which the stream may say something else, or be cut."""
        replica = self.replicas[name]
        first, second = replica.snapshot()
        replica.hear(first)
        replica.view.apply(first, self.now)
        replica.follows = False
        if between == "load":
            self.load(name)
        elif between == "delta":
            self.delta(name, late, cleared=False)
            return
        elif between == "cut":
            replica.view.restart()
            replica.change(late)
            return
        replica.view.apply(second, self.now)
        replica.follows = True
        replica.tell_all()

    @rule(name=names)
    def load(self, name: str) -> None:
        replica = self.replicas[name]
        update = CacheUpdate(epoch=replica.epoch, load=Load(running=1))
        replica.hear(update)
        replica.view.apply(update, self.now)

    @rule(name=names, tier=tiers, kept=some_keys)
    def new_epoch(self, name: str, tier: Tier, kept: list[int]) -> None:
        """The replica starts anew; the router knows when it hears of it."""
        replica = self.replicas[name]
        replica.epoch += 1
        replica.sequence = 0
        replica.truth = nothing() | {(0, tier): Counter(kept)}
        replica.follows = False

    @rule(name=names)
    def reconnect(self, name: str) -> None:
        replica = self.replicas[name]
        replica.view.forget()
        replica.view.connected(DESCRIPTION, comparable=True)
        replica.view.restart()
        replica.counted["reconnect"] += 1
        replica.follows = replica.connected = False
        replica.told = {holder: Counter() for holder in replica.holders}
        replica.forget()

    @rule(name=names)
    def gone_for_good(self, name: str) -> None:
        """Another one comes in its place."""
        replica = self.replicas[name]
        replica.view.close()
        assert not any(holder.replica == name for holder in self.index._bits)
        assert replica.view.recoveries == replica.counted + Counter(gone=1)
        self.totals.subtract(replica.view.recoveries)
        self.replicas[name] = Replica(self.index, name, self.totals)

    # What the router itself does.

    @rule(data=st.data())
    def predict(self, data: st.DataObject) -> None:
        replica, rank, last = self._sent(data)
        self.index.predict(replica.holders[rank], chain(last), self.now)
        _, claims = replica.soon[rank].get(last, (0.0, 0))
        replica.soon[rank][last] = self.now + LIFE_S, claims + 1

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        replica, rank, last = self._sent(data)
        self.index.withdraw(replica.holders[rank], chain(last))
        end, claims = replica.soon[rank].pop(last, (0.0, 1))
        if claims != 1:  # what was computed has none, and stays
            replica.soon[rank][last] = end, max(0, claims - 1)

    @rule(data=st.data())
    def computed(self, data: st.DataObject) -> None:
        replica, rank, last = self._sent(data)
        self.index.computed(replica.holders[rank], chain(last), 0, self.now)
        if last in replica.soon[rank]:
            end, claims = replica.soon[rank][last]
            end = end if claims > 1 else min(end, self.now + COMPUTED_S)
            replica.soon[rank][last] = end, max(0, claims - 1)

    @rule(data=st.data(), have=st.integers(0, 3))
    def missed(self, data: st.DataObject, have: int) -> None:
        """Whatever goes on from the first block that was not there is not believed any more."""
        replica, rank, last = self._sent(data)
        path = chain(last)
        self.index.missed(replica.holders[rank], path, have, self.now)
        for other in list(replica.soon[rank]):
            if set(path[have : have + 1]) & set(chain(other)):
                del replica.soon[rank][other]

    def _sent(self, data: st.DataObject) -> tuple[Replica, int, int]:
        """A replica, a rank of it, and a path: one that is predicted there, as a rule."""
        predicted = [
            (name, rank, last)
            for name, replica in self.replicas.items()
            for rank in (0, 1)
            for last in replica.soon[rank]
        ]
        anything = st.tuples(names, ranks, keys)
        drawn = data.draw(st.sampled_from(predicted) | anything if predicted else anything)
        return self.replicas[drawn[0]], *drawn[1:]

    @rule(seconds=st.sampled_from((0.0, 1.0, 3.0, 9.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)
        for replica in self.replicas.values():
            replica.soon = [
                {last: end for last, end in soon.items() if end[0] > self.now}
                for soon in replica.soon
            ]

    def _loses(self, replica: Replica, update: CacheUpdate, reason: str) -> None:
        replica.hear(update)
        with pytest.raises(ViewLost, match=reason):
            replica.view.apply(update, self.now)
        replica.view.lost(reason)
        replica.view.restart()
        replica.counted[reason] += 1
        replica.follows = False

    # What must hold at any time.

    @invariant()
    def holds_what_was_told(self) -> None:
        for replica in self.replicas.values():
            for holder, bag in replica.told.items():
                assert self.index.held(holder) == set(bag)
                assert self.index.held_count(holder) == len(bag)
                if replica.follows and replica.orderly:  # else it evicts what it does not have
                    bags = (
                        replica.truth[holder.rank, tier]
                        for tier in Tier.values()
                        if tier <= holder.tier
                    )
                    assert bag == sum(bags, Counter())
            assert replica.view.current == replica.follows or replica.heard != replica.epoch
            assert replica.view.recoveries == replica.counted
        assert +self.totals == sum((r.counted for r in self.replicas.values()), Counter())
        assert set(+self.totals) <= set(RECOVERIES)

    @invariant()
    def matches_the_deeper_of_told_and_predicted(self) -> None:
        for leaf in LEAVES:
            path = chain(leaf)
            depths = self.index.match(path).depths()
            for holder, *layers in self._layers():
                assert depths.get(holder, 0) == max(reach(path, layer) for layer in layers)

    @invariant()
    def counts_blocks_once(self) -> None:
        told, predicted = set(), set()
        for _, layer, soon in self._layers():
            told |= {key for key in layer if reach(chain(key), layer) == len(chain(key))}
            predicted |= soon
        assert (self.index.blocks, self.index.predicted_blocks) == (len(told), len(predicted))

    @invariant()
    def keeps_no_fork_where_no_path_ends(self) -> None:
        paths = {
            last for replica in self.replicas.values() for soon in replica.soon for last in soon
        }
        nodes = list(_below(self.index._predicted._root, -1))[1:]
        assert len(nodes) <= max(0, 2 * len(paths) - 1)

    def _layers(self) -> Iterator[tuple[Holder, set[int], set[int]]]:
        for replica in self.replicas.values():
            for holder, bag in replica.told.items():
                yield holder, set(bag), set() if holder.tier else replica.predicted(holder.rank)

    def teardown(self) -> None:
        for replica in self.replicas.values():
            replica.view.close()
        assert (self.index.blocks, self.index.predicted_blocks) == (0, 0)


def reach(path: list[int], layer: set[int]) -> int:
    """Leading blocks of a path that are there."""
    return next((i for i, key in enumerate(path) if key not in layer), len(path))


WholeIndexMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None
)
TestWholeIndex = WholeIndexMachine.TestCase
