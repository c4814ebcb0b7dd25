"""An engine's set in our keys: by example, and against a model that knows blocks by their paths."""

from array import array
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotbranch.keys import block_keys, root
from hotbranch.kv_events.decode import Batch, Cleared, Event, Id, Removed, Stored, Unknown
from hotbranch.kv_events.translate import Changes, EvictedRun, StoredRun, Tier, Translator

SIZE = 2


def tokens(*ids: int) -> bytes:
    return array("I", ids).tobytes()


def keys(*ids: int, adapter: str = "", salt: str = "", size: int = SIZE) -> list[int]:
    return block_keys(tokens(*ids), size, root("m", adapter, salt))


def stored(hashes: list[Id], parent: Id | None, *ids: int, **told: Any) -> Stored:
    plain: dict[str, Any] = {
        "block_size": SIZE,
        "lora": None,
        "extra": None,
        "salt": None,
        "medium": "GPU",
        "group": 0,
        "kind": "full_attention",
    }
    return Stored(hashes, parent, tokens(*ids), **plain | told)


def offloaded(*hashes: Id, group: int | None = 0) -> Stored:
    """As an offloading connector tells it: no tokens, no parent, no kind."""
    return stored(list(hashes), None, block_size=0, medium="CPU", group=group, kind=None)


def removed(*hashes: Id, medium: str | None = "GPU", group: int | None = 0) -> Removed:
    return Removed(list(hashes), medium, group)


@pytest.fixture
def translator() -> Translator:
    return Translator("m", SIZE)


def apply(translator: Translator, *events: Event) -> Changes:
    return translator.apply(Batch(0, events))


def net(changes: Changes) -> Counter[tuple[Tier, int]]:
    """What a batch adds to the copies of each key."""
    copies: Counter[tuple[Tier, int]] = Counter()
    copies.update((run.tier, key) for run in changes.stored for key in run.keys)
    copies.subtract((run.tier, key) for run in changes.evicted for key in run.keys)
    return Counter({block: count for block, count in copies.items() if count})


def held(translator: Translator, tier: Tier = Tier.GPU) -> list[int]:
    """Keys in a tier, a key as often as there are copies."""
    return sorted(key for run in translator.snapshot() if run.tier is tier for key in run.keys)


def test_runs_go_on_from_their_parents(translator: Translator) -> None:
    a, b, c, d = keys(1, 2, 3, 4, 5, 6, 7, 8)
    changes = apply(translator, stored([10, 11], None, 1, 2, 3, 4), stored([12], 11, 5, 6))
    assert changes == Changes(False, [StoredRun(None, [a, b, c], Tier.GPU)], [])
    changes = apply(translator, stored([13], 12, 7, 8))
    assert changes == Changes(False, [StoredRun(c, [d], Tier.GPU)], [])
    assert translator.snapshot() == [StoredRun(None, [a, b, c, d], Tier.GPU)]
    changes = apply(translator, removed(13), removed(12))
    assert changes == Changes(False, [], [EvictedRun([d, c], Tier.GPU)])
    assert translator.snapshot() == [StoredRun(None, [a, b], Tier.GPU)]
    assert translator.blocks == 2


def test_whole_hashes_are_names_as_well(translator: Translator) -> None:
    apply(translator, stored([b"a" * 32], None, 1, 2), stored([b"b" * 32], b"a" * 32, 3, 4))
    assert held(translator) == sorted(keys(1, 2, 3, 4))


def test_copies_are_counted(translator: Translator) -> None:
    a, b = keys(1, 2, 3, 4)
    apply(translator, stored([10, 11], None, 1, 2, 3, 4))
    again = apply(translator, stored([10, 11], None, 1, 2, 3, 4))
    assert again == Changes(False, [StoredRun(None, [a, b], Tier.GPU)], [])
    runs = [StoredRun(None, [a, b], Tier.GPU)] * 2
    assert translator.snapshot() == runs
    assert translator.blocks == 4
    apply(translator, removed(11))
    assert translator.snapshot() == [runs[0], StoredRun(None, [a], Tier.GPU)]
    apply(translator, removed(11, 10))
    assert translator.snapshot() == [StoredRun(None, [a], Tier.GPU)]


def test_a_snapshot_has_forks_after_their_parents(translator: Translator) -> None:
    a, b = keys(1, 2, 3, 4)
    apply(
        translator,
        stored([10, 11], None, 1, 2, 3, 4),
        stored([12], 10, 5, 6),
        stored([13], 12, 7, 8),
    )
    first, *rest = translator.snapshot()
    assert first == StoredRun(None, [a], Tier.GPU)
    forks = [StoredRun(a, [b], Tier.GPU), StoredRun(a, keys(1, 2, 5, 6, 7, 8)[1:], Tier.GPU)]
    assert sorted(rest, key=lambda run: len(run.keys)) == forks


def test_a_block_removed_and_stored_in_one_batch_is_there(translator: Translator) -> None:
    (a,) = keys(1, 2)
    apply(translator, stored([10], None, 1, 2))
    changes = apply(translator, removed(10), stored([10], None, 1, 2))
    assert not net(changes)
    assert held(translator) == [a]
    changes = apply(translator, removed(10), stored([10], None, 1, 2), removed(10))
    assert net(changes) == {(Tier.GPU, a): -1}
    assert translator.snapshot() == []


def test_what_comes_before_a_clear_is_moot(translator: Translator) -> None:
    apply(translator, stored([10], None, 1, 2))
    changes = apply(
        translator,
        removed(10),
        stored([11], None, 3, 4),
        Cleared(),
        stored([12], None, 5, 6),
    )
    assert changes == Changes(True, [StoredRun(None, keys(5, 6), Tier.GPU)], [])
    assert held(translator) == keys(5, 6)
    assert apply(translator, stored([13], 10, 1, 2)).stored == []  # its parent was cleared


def test_adapters_and_salts_are_namespaces(translator: Translator) -> None:
    def of(**told: Any) -> list[int]:
        blocks = stored([10, 11], None, 1, 2, 3, 4, **told)
        apply(translator, blocks)
        found = held(translator)
        apply(translator, removed(10, 11))
        return found

    assert of() == sorted(keys(1, 2, 3, 4))
    assert of(extra=[None, None]) == sorted(keys(1, 2, 3, 4))
    assert of(extra=[["s"], None]) == sorted(keys(1, 2, 3, 4, salt="s"))
    assert of(salt="s") == sorted(keys(1, 2, 3, 4, salt="s"))
    assert of(lora="poet") == sorted(keys(1, 2, 3, 4, adapter="poet"))
    lora = of(lora="poet", extra=[["poet"], ["poet"]])
    assert lora == sorted(keys(1, 2, 3, 4, adapter="poet"))
    both = sorted(keys(1, 2, 3, 4, adapter="poet", salt="s"))
    assert of(lora="poet", extra=[["poet", "s"], ["poet"]]) == both
    same = sorted(keys(1, 2, 3, 4, adapter="poet", salt="poet"))
    assert of(lora="poet", extra=[["poet", "poet"], ["poet"]]) == same
    assert of(lora="7", extra=[[7], [7]]) == sorted(keys(1, 2, 3, 4, adapter="7"))
    assert not translator.ignored


@pytest.mark.parametrize(
    "more", [["image"], [["image", 0]], [b"digest"], ["image", "s"], [["image", 0], "s"]]
)
def test_a_block_of_more_than_tokens_has_no_key(translator: Translator, more: list[Any]) -> None:
    a = keys(1, 2)
    event = stored([10, 11, 12], None, 1, 2, 3, 4, 5, 6, extra=[None, more, None])
    assert apply(translator, event).stored == [StoredRun(None, a, Tier.GPU)]
    below = stored([13], 12, 7, 8)
    assert apply(translator, below) == Changes(False, [], [])
    assert held(translator) == a
    assert translator.blocks == 4
    assert translator.ignored == {"multimodal": 3}
    assert apply(translator, removed(13, 12, 11)) == Changes(False, [], [])
    assert translator.blocks == 1


def test_more_than_tokens_in_the_first_block(translator: Translator) -> None:
    for more in ([["image", 0]], [["image", 0], "s"], ["s", b"digest"], [b"digest"]):
        assert apply(translator, stored([10], None, 1, 2, extra=[more])).stored == []
    assert translator.ignored == {"multimodal": 4}


def test_a_parent_that_is_not_known(translator: Translator) -> None:
    assert apply(translator, stored([11], 10, 3, 4), stored([12], 11, 5, 6)).stored == []
    assert translator.ignored == {"unknown_parent": 2}
    # The path is stored again, each block as a second copy: now it has keys, and both are told.
    a, b, c = keys(1, 2, 3, 4, 5, 6)
    changes = apply(translator, stored([10, 11, 12], None, 1, 2, 3, 4, 5, 6))
    assert net(changes) == {(Tier.GPU, a): 1, (Tier.GPU, b): 2, (Tier.GPU, c): 2}
    assert held(translator) == sorted([a, b, b, c, c])
    changes = apply(translator, removed(12, 12, 11, 11))
    assert net(changes) == {(Tier.GPU, b): -2, (Tier.GPU, c): -2}


def test_the_first_block_gives_the_size() -> None:
    translator = Translator("m", None)
    changes = apply(translator, stored([10], None, *range(64), block_size=64))
    assert changes.stored == [StoredRun(None, keys(*range(64), size=64), Tier.GPU)]
    translator.clear()
    changes = apply(translator, stored([10], None, 1, 2))
    assert changes.stored == [StoredRun(None, keys(1, 2), Tier.GPU)]


def test_another_size_has_no_keys(translator: Translator) -> None:
    """Field report 21: 64 tokens of an engine are no four blocks of 16."""
    apply(translator, stored([10], None, *range(64), block_size=64))
    assert translator.snapshot() == []
    assert translator.ignored == {"block_size": 1}
    # A part of a block of a group that is of the right size otherwise.
    apply(translator, stored([11], None, 1, 2), stored([12], 11, 3, block_size=1))
    assert held(translator) == keys(1, 2)
    apply(translator, removed(12), stored([13], 11, 3, 4))
    assert held(translator) == sorted(keys(1, 2, 3, 4))


def test_tokens_that_do_not_fill_the_blocks(translator: Translator) -> None:
    apply(translator, stored([10, 11], None, 1, 2, 3))
    assert translator.snapshot() == []
    assert translator.ignored == {"block_size": 2}


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "new"])
def test_other_groups_do_not_count(translator: Translator, kind: str) -> None:
    """Field report 22: the groups of a hybrid model share hashes."""
    apply(
        translator, stored([10], None, 1, 2), stored([10, 11], None, 1, 2, 3, 4, group=1, kind=kind)
    )
    assert held(translator) == keys(1, 2)
    assert translator.ignored == {"other_group": 2}
    apply(translator, removed(10, group=1))
    assert held(translator) == keys(1, 2)
    assert translator.ignored == {"other_group": 3}


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_groups_that_count(translator: Translator, kind: str | None) -> None:
    apply(translator, stored([10], None, 1, 2, group=None if kind is None else 3, kind=kind))
    assert held(translator) == keys(1, 2)


def test_each_of_several_groups_must_hold_a_block(translator: Translator) -> None:
    a, b = keys(1, 2, 3, 4)
    both = [stored([10, 11], None, 1, 2, 3, 4, group=group) for group in (0, 1)]
    assert net(apply(translator, *both)) == {(Tier.GPU, a): 1, (Tier.GPU, b): 1}
    assert net(apply(translator, both[0])) == {}  # a second copy in one of them
    assert translator.blocks == 2
    assert net(apply(translator, removed(11, group=1))) == {(Tier.GPU, b): -1}
    assert net(apply(translator, removed(11, 11, group=0))) == {}
    assert net(apply(translator, both[1])) == {(Tier.GPU, a): 1}
    assert held(translator) == [a, a]
    assert translator.blocks == 2


def test_a_group_that_shows_up_late_holds_nothing_yet(translator: Translator) -> None:
    a, b = keys(1, 2, 3, 4)
    apply(translator, stored([10, 11], None, 1, 2, 3, 4))
    changes = apply(translator, stored([10], None, 1, 2, group=1))
    assert net(changes) == {(Tier.GPU, b): -1}
    assert held(translator) == [a]
    assert translator.blocks == 1


def test_groups_are_remembered_over_a_clear(translator: Translator) -> None:
    apply(translator, *(stored([10], None, 1, 2, group=group) for group in (0, 1)))
    apply(translator, Cleared())
    assert net(apply(translator, stored([10], None, 1, 2, group=1))) == {}


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("CPU_TIER_1", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.DISK),
    ],
)
def test_media(translator: Translator, medium: str | None, tier: Tier) -> None:
    apply(translator, stored([10], None, 1, 2, medium=medium))
    assert translator.snapshot() == [StoredRun(None, keys(1, 2), tier)]
    assert translator.blocks == (1 if tier is Tier.GPU else 0)
    changes = apply(translator, removed(10, medium=medium))
    assert changes == Changes(False, [], [EvictedRun(keys(1, 2), tier)])


def test_a_medium_that_is_not_known(translator: Translator) -> None:
    apply(translator, stored([10], None, 1, 2, medium="TAPE"), removed(10, medium="TAPE"))
    assert translator.snapshot() == []
    assert translator.ignored == {"medium": 2}


def test_an_offloaded_block_keeps_its_key(translator: Translator) -> None:
    a, b = keys(1, 2, 3, 4, salt="s")
    apply(translator, stored([10, 11], None, 1, 2, 3, 4, extra=[["s"], None]))
    assert apply(translator, offloaded(11)).stored == [StoredRun(a, [b], Tier.CPU)]
    # What is removed from the GPU first, in the same batch, is known still.
    apply(translator, removed(11, 10), offloaded(10))
    assert held(translator) == []
    assert held(translator, Tier.CPU) == sorted([a, b])
    # Below it goes on, and a store that does not tell the salt changes nothing.
    apply(translator, stored([10, 11, 12], None, 1, 2, 3, 4, 5, 6))
    assert held(translator) == sorted(keys(1, 2, 3, 4, 5, 6, salt="s"))
    changes = apply(translator, removed(10, 11, medium="CPU"))
    assert changes.evicted == [EvictedRun([a, b], Tier.CPU)]


def test_a_tier_that_tells_no_tokens_of_what_nobody_knows(translator: Translator) -> None:
    a = keys(1, 2)
    apply(translator, stored([9], None, 8, 8))
    assert apply(translator, offloaded(10)).stored == []
    assert translator.ignored == {"unknown_tokens": 1}
    changes = apply(translator, stored([10], None, 1, 2))  # loaded back: now it is known
    assert net(changes) == {(Tier.GPU, a[0]): 1, (Tier.CPU, a[0]): 1}
    # Groups of which the GPU shows no attention do not count in lower tiers.
    apply(translator, stored([10], None, 1, 2, group=2, kind="mamba"), offloaded(10, group=2))
    apply(translator, offloaded(10, group=5))
    assert held(translator, Tier.CPU) == a


def test_events_and_removals_that_mean_nothing_here(translator: Translator) -> None:
    apply(translator, stored([10], None, 1, 2))
    changes = apply(translator, Unknown("BlockPinned"), removed(99), removed(10, 10))
    assert changes.evicted == [EvictedRun(keys(1, 2), Tier.GPU)]
    assert translator.ignored == {"unknown_event": 1, "unknown_block": 2}


def test_a_reset_of_ours_hides_what_is_stale(translator: Translator) -> None:
    """Field report 13, on an idle engine: its own Cleared comes with its next step."""
    apply(translator, stored([10], None, 1, 2))
    translator.reset()
    assert translator.snapshot() == []
    assert translator.blocks == 0
    stale = apply(translator, stored([11], 10, 3, 4), removed(10))
    assert stale == Changes(False, [], [])
    changes = apply(translator, stored([12], 11, 5, 6), Cleared(), stored([13], None, 7, 8))
    assert changes == Changes(False, [StoredRun(None, keys(7, 8), Tier.GPU)], [])
    assert held(translator) == keys(7, 8)
    assert apply(translator, Cleared()) == Changes(True, [], [])  # not of ours


def test_each_reset_has_a_clear_of_its_own(translator: Translator) -> None:
    apply(translator, stored([10], None, 1, 2))
    translator.reset()
    translator.reset()
    assert apply(translator, Cleared(), stored([11], None, 1, 2)) == Changes(False, [], [])
    assert translator.snapshot() == []
    changes = apply(translator, Cleared(), stored([12], None, 3, 4))
    assert changes == Changes(False, [StoredRun(None, keys(3, 4), Tier.GPU)], [])


def test_a_reset_that_the_engine_refused(translator: Translator) -> None:
    apply(translator, stored([10], None, 1, 2))
    translator.reset()
    apply(translator, stored([11], 10, 3, 4))
    translator.reset_refused()
    assert held(translator) == sorted(keys(1, 2, 3, 4))
    assert translator.blocks == 2
    assert apply(translator, removed(11)).evicted == [EvictedRun(keys(1, 2, 3, 4)[1:], Tier.GPU)]


def test_what_follows_a_known_block_has_keys_though_what_is_before_has_none(
    translator: Translator,
) -> None:
    a, b, c = keys(1, 2, 3, 4, 5, 6)
    apply(translator, stored([10, 11], None, 1, 2, 3, 4), removed(10))
    changes = apply(translator, stored([10, 11, 12], 99, 1, 2, 3, 4, 5, 6))
    assert net(changes) == {(Tier.GPU, b): 1, (Tier.GPU, c): 1}
    assert a not in held(translator)


class Path(NamedTuple):
    """A block: the namespace, and a number for each block down to it. IMAGE is more than tokens."""

    space: tuple[str, str]  # adapter, salt
    blocks: tuple[int, ...]

    def upto(self, depth: int) -> "Path":
        return Path(self.space, self.blocks[:depth])


IMAGE = 2
SPACES = (("", ""), ("poet", ""), ("", "salt"), ("poet", "salt"))
ATTENTION, WINDOW = (0, 1), 2  # groups
paths = st.builds(
    Path,
    st.sampled_from(SPACES),
    st.lists(st.sampled_from((0, 0, 1, 1, IMAGE)), min_size=1, max_size=4).map(tuple),
)
groups = st.sampled_from((0, 0, 0, 1, WINDOW))
tiers = st.sampled_from((Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK))
MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.DISK: "STORAGE"}


@cache
def key(path: Path) -> int:
    spelled = [number for block in path.blocks for number in (9, block)]
    return keys(*spelled, adapter=path.space[0], salt=path.space[1])[-1]


@cache
def name(path: Path) -> Id:
    """The engine's hash: of half of the blocks a number, of the others bytes."""
    number = key(path) ^ 0x5EED
    return number if number % 2 else number.to_bytes(32, "big")


def extra(path: Path) -> list[Any] | None:
    adapter, salt = path.space
    told: list[Any] = [adapter] if adapter else []
    if path.blocks[-1] == IMAGE:
        told.append(["image", 0])
    if salt and len(path.blocks) == 1:
        told.append(salt)
    return told or None


class EngineMachine(RuleBasedStateMachine):
    """Copies of paths, counted from all that was published, beside what the translator says.

    `view` is what a router makes of the changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.translator = Translator("m", SIZE)
        self.view: Counter[tuple[Tier, int]] = Counter()
        self.hidden = 0
        self.begin()

    def begin(self) -> None:
        self.copies: Counter[tuple[Tier, int, Path]] = Counter()
        self.named: set[Path] = set()  # of which the key is known
        self.groups: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.kinds: set[int] = set()  # groups of which the kind was told

    @rule(data=st.data())
    def batch(self, data: st.DataObject) -> None:
        events = []
        cleared, silent = False, self.hidden > 0
        for _ in range(data.draw(st.integers(1, 5))):
            match data.draw(st.sampled_from(("store", "store", "store", "remove", "remove", ""))):
                case "store":
                    events.append(self.store(data))
                case "remove":
                    events.append(self.remove(data))
                case _ if data.draw(st.integers(0, 3)) == 0:
                    events.append(Cleared())
                    self.copies.clear()
                    self.named.clear()
                    cleared = cleared or not self.hidden
                    self.hidden = max(self.hidden - 1, 0)
        there = {path for _, _, path in self.copies}
        self.named &= there
        changes = self.translator.apply(Batch(0, events))
        assert changes.cleared == (cleared and not self.hidden)
        if silent and self.hidden:
            assert changes == Changes(False, [], [])
        if changes.cleared:
            self.view.clear()
        self.view.update(net(changes))
        assert all(count >= 0 for count in self.view.values())
        self.view = +self.view

    def store(self, data: st.DataObject) -> Stored:
        path, tier, group = data.draw(paths), data.draw(tiers), data.draw(groups)
        start = data.draw(st.integers(0, len(path.blocks) - 1))
        blocks = [path.upto(depth) for depth in range(start + 1, len(path.blocks) + 1)]
        names = [name(block) for block in blocks]
        parent = name(path.upto(start)) if start else None
        told = tier is Tier.GPU or data.draw(st.booleans())  # its tokens and its kind
        if told:
            self.kinds.add(group)
        if self.counts(tier, group, told):
            self.groups[tier].add(group)
            for block in blocks:
                above = block.upto(len(block.blocks) - 1)
                plain = IMAGE not in block.blocks
                if told and plain and (not above.blocks or above in self.named):
                    self.named.add(block)
                self.copies[tier, group, block] += 1
        kind = "sliding_window" if group == WINDOW else "full_attention"
        if not told:
            return stored(names, parent, block_size=0, medium=MEDIA[tier], group=group, kind=None)
        spelled = [number for block in path.blocks[start:] for number in (9, block)]
        return stored(
            names,
            parent,
            *spelled,
            lora=path.space[0] or None,
            extra=[extra(block) for block in blocks],
            medium=MEDIA[tier],
            group=group,
            kind=kind,
        )

    def counts(self, tier: Tier, group: int, told: bool) -> bool:
        if group not in ATTENTION or group not in self.kinds:
            return False
        return told or group in self.groups[tier] or group in self.groups[Tier.GPU]

    def remove(self, data: st.DataObject) -> Removed:
        held = sorted(self.copies)
        if held and data.draw(st.integers(0, 4)):
            tier, group, path = data.draw(st.sampled_from(held))
        else:
            tier, group, path = data.draw(tiers), data.draw(groups), data.draw(paths)
        self.copies[tier, group, path] -= 1
        self.copies = +self.copies
        return removed(name(path), medium=MEDIA[tier], group=group)

    @rule()
    def lose(self) -> None:
        self.translator.clear()
        self.begin()
        self.view.clear()

    @precondition(lambda self: self.hidden < 2)
    @rule()
    def reset(self) -> None:
        self.translator.reset()
        self.hidden += 1
        self.view.clear()

    @precondition(lambda self: self.hidden)
    @rule()
    def refuse(self) -> None:
        self.translator.reset_refused()
        self.hidden -= 1
        self.view = self.shown()

    def shown(self) -> Counter[tuple[Tier, int]]:
        return Counter((run.tier, key) for run in self.translator.snapshot() for key in run.keys)

    def fewest(self, tier: Tier, path: Path) -> int:
        return min((self.copies[tier, group, path] for group in self.groups[tier]), default=0)

    @invariant()
    def holds_what_was_published(self) -> None:
        held = {(tier, key(path)): self.fewest(tier, path) for tier in Tier for path in self.named}
        expected = Counter() if self.hidden else +Counter(held)
        assert self.shown() == expected
        assert self.view == expected
        there = {path for _, _, path in self.copies}
        blocks = sum(self.fewest(Tier.GPU, path) for path in there)
        assert self.translator.blocks == (0 if self.hidden else blocks)

    @invariant()
    def runs_are_chains_after_their_parents(self) -> None:
        above = {key(path): path.upto(len(path.blocks) - 1) for path in self.named}
        everything = {(run.tier, key) for run in self.translator.snapshot() for key in run.keys}
        seen: set[tuple[Tier, int]] = set()
        for run in self.translator.snapshot():
            parent = run.parent
            assert (run.tier, parent) in seen or (run.tier, parent) not in everything
            for each in run.keys:
                assert parent == (key(above[each]) if above[each].blocks else None)
                seen.add((run.tier, each))
                parent = each


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
