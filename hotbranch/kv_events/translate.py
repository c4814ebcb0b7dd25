"""What an engine holds, in block keys of ours, from the events that it publishes.

Engine hashes are only names here: keys come from the token ids, chained from the parent's key.
A block has no key of ours, and neither has any below it, when more than token ids is in it
(`multimodal`), when its parent is not known (`unknown_parent`), when it is of another size
(`block_size`), or when an offloading tier does not tell the tokens of a hash that no other tier
holds (`unknown_tokens`). Such a block is remembered under its reason and never reported; should
the same hash come again in a way that gives it a key, all its copies are reported then.

Engines do not deduplicate: a hash is stored once for each copy and removed as often, tier by tier.
Of hybrid models only the groups that attend to the whole context count. Where there are several,
a prefix can be reused as far as each of them holds it; a group is known by its first block of the
right size.

Two things an engine does not tell. Releases without `extra_keys` keep silent about cache salts,
and their salted blocks look like unsalted ones. And where a request asks vLLM for
`kv_cache_report_mode: full`, hits are published as if they were new copies.
"""

from collections import Counter
from dataclasses import dataclass

from hotbranch.keys import TOKEN_BYTES, block_keys, root
from hotbranch.kv_events.chains import chains
from hotbranch.kv_events.copies import Copies
from hotbranch.kv_events.decode import Batch, Cleared, Id, Removed, Stored
from hotbranch.tier import Tier

ATTENTION = {"full_attention", "mla_attention", "sink_full_attention"}


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One copy more of each block; each is the child of the one before it."""

    parent: int | None  # key of the block before the run; none at a root
    keys: list[int]
    tier: Tier


@dataclass(frozen=True, slots=True)
class EvictedRun:
    """One copy less of each block."""

    keys: list[int]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Changes:
    """Applied in order: cleared, stored, evicted. Copies are counted, so this nets out."""

    cleared: bool
    stored: list[StoredRun]
    evicted: list[EvictedRun]


Name = int | str
"""A block's key, or why it has none."""


class Translator:
    """The full set of one publisher, that is of one data-parallel rank.

    `block_size` is in tokens; None takes that of the first block seen. Hybrid models may publish
    a part of a block first: give it there.
    """

    def __init__(self, model: str, block_size: int | None) -> None:
        self.ignored: Counter[str] = Counter()  # blocks, and events of unknown kinds, by reason
        self._model = model
        self._given_size = block_size
        self._hidden = 0  # resets of ours whose Cleared is still to come
        self.clear()

    def clear(self) -> None:
        """Forget everything: the history was lost, or the engine is another one now."""
        self._size = self._given_size
        self._attends: dict[int | None, bool] = {}  # by group, where its kind was told
        self._tiers = {tier: Copies() for tier in Tier}
        self._names: dict[Id, Name] = {}
        self._parents: dict[Id, int | None] = {}

    def reset(self) -> None:
        """Hold nothing from now on, ahead of a reset that we are about to ask the engine for.

        vLLM publishes its Cleared only with its next step. Until then all that it holds and
        publishes is hidden, and the Cleared itself is not reported again. To be called before the
        engine is asked: else the Cleared may have come already, and the wait is for another.
        """
        self._hidden += 1

    def reset_refused(self) -> None:
        """The engine did not reset: what it holds shows again. Take a new snapshot."""
        self._hidden -= 1

    @property
    def blocks(self) -> int:
        """Attention blocks on the GPU, each copy, those without keys too."""
        return 0 if self._hidden else self._tiers[Tier.GPU].total

    def apply(self, batch: Batch) -> Changes:
        """What a batch changes."""
        changes = Changes(False, [], [])
        for event in batch.events:
            match event:
                case Stored():
                    self._store(event, changes)
                case Removed():
                    self._remove(event, changes)
                case Cleared():
                    self._clear_blocks()
                    changes = Changes(changes.cleared or not self._hidden, [], [])
                    self._hidden = max(self._hidden - 1, 0)
                case _:
                    self.ignored["unknown_event"] += 1
        self._forget_gone(batch)
        return Changes(False, [], []) if self._hidden else changes

    def snapshot(self) -> list[StoredRun]:
        """Everything held: parents before children, a block as often as there are copies."""
        runs: list[StoredRun] = []
        for tier, held in self._tiers.items() if not self._hidden else ():
            copies: Counter[int] = Counter()
            parents: dict[int, int | None] = {}
            for block, count in held.items():
                name = self._names[block]
                if isinstance(name, int):
                    copies[name] += count
                    parents[name] = self._parents[block]
            while copies:  # one copy of each first, so that all parents are there
                runs += [StoredRun(parent, keys, tier) for parent, keys in chains(copies, parents)]
                copies = Counter({key: count - 1 for key, count in copies.items() if count > 1})
        return runs

    def _store(self, event: Stored, changes: Changes) -> None:
        tier = self._tier_of(event)
        if tier is None:
            return
        held = self._tiers[tier]
        if not held.has_group(event.group):
            self._add_group(event.group, tier, changes)
        before = None if event.parent is None else self._names.get(event.parent)
        for block, name in zip(event.hashes, self._names_of(event), strict=True):
            known = self._names.get(block)
            if known is None or (isinstance(known, str) and isinstance(name, int)):
                self._names[block] = name
                self._parents[block] = before if isinstance(before, int) else None
            rise = held.put(event.group, block)
            before = self._names[block]
            if isinstance(before, str):
                self.ignored[before] += 1
            elif isinstance(known, str):  # it has a key only now
                for each, blocks in self._tiers.items():
                    self._report(block, before, blocks.count(block), each, changes)
            else:
                self._report(block, before, rise, tier, changes)

    def _remove(self, event: Removed, changes: Changes) -> None:
        tier = _tier(event.medium)
        if tier is None:
            self.ignored["medium"] += len(event.hashes)
            return
        held = self._tiers[tier]
        if not held.has_group(event.group):
            self.ignored["other_group"] += len(event.hashes)
            return
        for block in event.hashes:
            fall = held.take(event.group, block)
            if fall is None:
                self.ignored["unknown_block"] += 1
                continue
            _evict(changes.evicted, self._names[block], fall, tier)

    def _tier_of(self, event: Stored) -> Tier | None:
        """Where the blocks are; None, and counted, where they do not count."""
        tier, group = _tier(event.medium), event.group
        if event.kind is not None:
            self._attends[group] = event.kind in ATTENTION
        reason = None
        if tier is None:
            reason = "medium"
        elif not self._attends.get(group, group is None or tier is Tier.GPU):
            reason = "other_group"
        elif self._tiers[tier].has_group(group):
            return tier
        elif event.token_ids:
            self._size = self._size or event.block_size
            reason = "block_size" if event.block_size != self._size else None
        elif group is not None and not self._tiers[Tier.GPU].has_group(group):
            reason = "other_group"
        if reason is None:
            return tier
        self.ignored[reason] += len(event.hashes)
        return None

    def _add_group(self, group: int | None, tier: Tier, changes: Changes) -> None:
        """It holds none of what the others hold, which cannot be reused then."""
        for block, count in self._tiers[tier].items():
            _evict(changes.evicted, self._names[block], count, tier)
        self._tiers[tier].add_group(group)

    def _names_of(self, event: Stored) -> list[Name]:
        """What is known of a hash goes first: offloading tiers leave out what vLLM hashed, too."""
        salt, plain = _extras(event)
        before: Name
        if event.parent is None:
            before = root(self._model, event.lora or "", salt)
        else:
            before = self._names.get(event.parent, "unknown_parent")
        known = [self._names.get(block) for block in event.hashes]
        names: list[Name] = []
        while (start := len(names)) < len(known):
            if isinstance(name := known[start], int):
                names.append(name)
            else:
                ends = (end for end in range(start, len(known)) if isinstance(known[end], int))
                names += self._new_names(event, start, next(ends, len(known)), before, plain)
            before = names[-1]
        return names

    def _new_names(
        self, event: Stored, start: int, end: int, before: Name, plain: int
    ) -> list[Name]:
        """Of blocks `start` to `end`, of which those from `plain` on are of more than token ids."""
        width = event.block_size * TOKEN_BYTES
        if not event.token_ids:
            before = "unknown_tokens"
        elif event.block_size != self._size or len(event.token_ids) != len(event.hashes) * width:
            before = "block_size"
        if isinstance(before, str):
            return [before] * (end - start)
        tokens = event.token_ids[start * width : min(end, plain) * width]
        keys = block_keys(tokens, event.block_size, before)
        return [*keys, *["multimodal"] * (end - start - len(keys))]

    def _report(self, block: Id, key: int, copies: int, tier: Tier, changes: Changes) -> None:
        runs, parent = changes.stored, self._parents[block]
        for _ in range(copies):
            if runs and runs[-1].keys[-1] == parent and runs[-1].tier is tier:
                runs[-1].keys.append(key)
            else:
                runs.append(StoredRun(parent, [key], tier))

    def _clear_blocks(self) -> None:
        for held in self._tiers.values():
            held.clear()
        self._names.clear()
        self._parents.clear()

    def _forget_gone(self, batch: Batch) -> None:
        """Only after a batch: an offloading tier may store what the GPU has just dropped."""
        for event in batch.events:
            for block in event.hashes if isinstance(event, Removed) else ():
                if not any(block in held for held in self._tiers.values()):
                    self._names.pop(block, None)
                    self._parents.pop(block, None)


def _evict(runs: list[EvictedRun], name: Name, copies: int, tier: Tier) -> None:
    if isinstance(name, str) or not copies:
        return
    if not runs or runs[-1].tier is not tier:
        runs.append(EvictedRun([], tier))
    runs[-1].keys.extend([name] * copies)


def _tier(medium: str | None) -> Tier | None:
    """Engines, and what offloads for them, name the same places differently."""
    match (medium or "GPU").upper():
        case "GPU":
            return Tier.GPU
        case name if "CPU" in name:
            return Tier.CPU
        case "STORAGE" | "DISK" | "EXTERNAL":
            return Tier.DISK
        case _:
            return None


def _extras(event: Stored) -> tuple[str, int]:
    """The cache salt, and how many blocks come before the first of more than token ids.

    vLLM lists for each block: the adapter, (item, offset) pairs, the salt (first block of a
    prompt only), digests of embeddings. Before it told offsets, an item was a string alone.
    """
    salt = event.salt or ""
    for index, extra in enumerate(event.extra or ()):
        rest = list(extra or ())
        if rest and event.lora is not None and str(rest[0]) == event.lora:
            del rest[0]
        if rest and (index or event.parent is not None or len(rest) > 1):
            return salt, index
        if rest and not isinstance(rest[0], str):
            return salt, index
        if rest:
            salt = rest[0]
    return salt, len(event.hashes)
