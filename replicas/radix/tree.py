"""The radix tree that owns the cached KV blocks (RadixAttention: Zheng et al. 2024, section 3).

A node is a run of whole blocks; a path from a namespace's root is a cached prefix. Nodes split only
between blocks, and the lower part keeps its identity, so a node always stands for the path down to
its own last block. Whoever holds a node has it locked: nothing on its path is evicted meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from hotbranch.keys import TOKEN_BYTES, block_keys, root
from replicas.engine import Namespace, StoredRun


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks: `tokens` as uint32 LE bytes, and an id and a key for each block.

    A root has a namespace, no blocks and one key, the namespace's root seed: `keys[-1]` of any node
    is the parent key of what is stored below it.
    """

    parent: "Node | None"
    tokens: bytes
    blocks: list[int]
    keys: list[int]
    serial: int
    last_use: float
    locks: int = 0  # holders at or below
    pins: int = 0  # pins at or below
    queued: bool = False  # has its one entry in an eviction heap
    proven: bool = False  # was found again after it was computed
    namespace: Namespace | None = None
    children: dict[bytes, "Node"] = field(default_factory=dict)  # by the tokens of the first block


Leaf = tuple[float, int, bool, Node]
"""(last use, serial, proven, node), as of when it was entered into a heap."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A locked path and its blocks, root first."""

    node: Node
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Extension:
    """`node` holds the lock now. `resident` are the tree's blocks for the leading given blocks that
    were there already: the caller frees its own copies and uses these."""

    node: Node
    resident: list[int]


@dataclass(slots=True, eq=False)
class _Pin:
    node: Node
    until: float


class Changes:
    """What the tree stored and evicted since the last drain, to be applied in that order.

    A block that was evicted and came back in between has not changed for the receiver.
    """

    def __init__(self) -> None:
        self._stored: list[StoredRun] = []
        self._evicted: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted)

    def store(self, parent: int | None, keys: Sequence[int]) -> None:
        # Children are evicted before parents, so what came back is a leading part of the run.
        back = 0
        while back < len(keys) and keys[back] in self._evicted:
            parent = keys[back]
            del self._evicted[parent]
            back += 1
        if back < len(keys):
            self._stored.append(StoredRun(parent, tuple(keys[back:])))

    def evict(self, keys: Sequence[int]) -> None:
        self._evicted.update(dict.fromkeys(keys))

    def drain(self) -> tuple[list[StoredRun], list[int]]:
        """Runs stored, parents before children, and keys evicted, children before parents."""
        changes = self._stored, list(self._evicted)
        self._stored, self._evicted = [], {}
        return changes


class RadixTree:
    """Cached prefixes by namespace. Times are seconds of the caller's clock, never going back.

    Blocks that nobody found again since they were computed are on probation: beyond `probation` of
    them they are evicted first, so that a stream of prompts that come once does not sweep out what
    is used. Below that, last use alone decides (compare 2Q, Johnson and Shasha 1994).

    `size`, `evictable` and `pinned` count blocks; `evicted` counts them since the start; `version`
    changes with every store and eviction. Expired pins count until `expire` runs.
    """

    def __init__(self, block_size: int, pin_limit: int, probation: int) -> None:
        self.block_size = block_size
        self.pin_limit = pin_limit  # blocks all pins may hold together, and pins at one time
        self.probation = probation
        self.size = self.unproven = self.evictable = self.pinned = self.evicted = self.version = 0
        self.changes = Changes()
        self._width = block_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        # free leaves by last use: those on probation, and the proven ones
        self._heaps: tuple[list[Leaf], list[Leaf]] = [], []
        self._serial = count()
        self._pins: dict[int, _Pin] = {}
        self._next_expiry = inf

    def resident(self, namespace: Namespace, tokens: bytes, limit: int) -> int:
        """Cached leading tokens of `tokens`, whole blocks within `limit`. Changes nothing."""
        return sum(shared for _, shared in self._walk(namespace, tokens, limit)) * self.block_size

    def path(self, namespace: Namespace, tokens: bytes, limit: int) -> list[Node]:
        """The nodes that `resident` counts, from the root on; of the last perhaps only a part."""
        return [node for node, _ in self._walk(namespace, tokens, limit)]

    def _walk(self, namespace: Namespace, tokens: bytes, limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes on the path of `tokens`, each with the blocks it shares with it."""
        node = self._roots.get(namespace)
        end = self._whole(tokens, limit)
        at = 0
        while node is not None and at < end:
            node = node.children.get(tokens[at : at + self._width])
            if node is not None:
                shared = self._shared(node, tokens, at, end)
                yield node, shared
                at += shared * self._width
                if shared < len(node.blocks):
                    break

    def acquire(self, namespace: Namespace, tokens: bytes, limit: int, now: float) -> Prefix:
        """Lock the longest cached prefix of `tokens`, whole blocks within `limit` tokens."""
        if (start := self._roots.get(namespace)) is None:
            seed = root(namespace.model, namespace.adapter, namespace.salt)
            start = Node(None, b"", [], [seed], next(self._serial), now, namespace=namespace)
            self._roots[namespace] = start
        path = self._descend(start, tokens, self._whole(tokens, limit))
        for node in (start, *path):
            self._lock(node)
            node.last_use = now
            self._prove(node)
        return Prefix(path[-1] if path else start, [b for node in path for b in node.blocks])

    def extend(self, node: Node, tokens: bytes, blocks: Sequence[int], now: float) -> Extension:
        """Store the blocks that follow a held node; its lock moves down to where they end.

        `tokens` are those of `blocks` alone, so a long prompt that comes chunk by chunk is hashed
        and compared once.
        """
        path = self._descend(node, tokens, len(tokens))
        for below in path:
            self._lock(below)
            below.last_use = now
        resident = [block for below in path for block in below.blocks]
        node = path[-1] if path else node
        if len(resident) == len(blocks):
            return Extension(node, resident)
        tokens = tokens[len(resident) * self._width :]
        fresh = list(blocks[len(resident) :])
        keys = block_keys(tokens, self.block_size, node.keys[-1])
        self.changes.store(_key(node), keys)
        self.size += len(fresh)
        self.unproven += len(fresh)
        self.version += 1
        if node.locks == 1 and not (node.children or node.pins or node.proven):
            # Nobody else stands here: one growing run instead of a chain of nodes.
            node.tokens += tokens
            node.blocks += fresh
            node.keys += keys
            node.last_use = now
        else:
            child = Node(node, tokens, fresh, keys, next(self._serial), now, locks=1)
            node.children[tokens[: self._width]] = child
            node = child
        return Extension(node, resident)

    def release(self, node: Node, now: float) -> None:
        """Give a held node back. ValueError when nobody holds it."""
        if not node.locks:
            raise ValueError("node released twice")
        for above in _upwards(node):
            above.locks -= 1
            above.last_use = now
            self._loosened(above)

    def evict(self, want: int, now: float) -> list[int]:
        """Take up to `want` blocks out of the tree; the caller owns them then.

        Least recently used branch first, from its tail up to the nearest fork. Nothing that is held
        or pinned goes.
        """
        self.expire(now)
        freed: list[int] = []
        while len(freed) < want and (node := self._coldest()):
            going = min(len(node.blocks), want - len(freed))
            if not node.proven and self.unproven > self.probation:
                going = min(going, self.unproven - self.probation)
            keep = len(node.blocks) - going
            freed += reversed(node.blocks[keep:])
            self.changes.evict(node.keys[keep:][::-1])
            self.unproven -= 0 if node.proven else going
            self._truncate(node, keep)
        self.size -= len(freed)
        self.evictable -= len(freed)
        self.evicted += len(freed)
        self.version += bool(freed)
        return freed

    def pin(self, namespace: Namespace, tokens: bytes, ttl_s: float, now: float) -> int | None:
        """Keep the cached whole blocks of `tokens` for `ttl_s`; blocks pinned, None over the limit.

        Pinning the same tokens again renews the pin, with what is cached by then.
        """
        self.expire(now)
        name = self._pin_name(namespace, tokens)
        if name is None:
            return 0
        path = self._descend(self._roots[namespace], tokens, self._whole(tokens, len(tokens)))
        if not path:
            return 0
        more = sum(len(node.blocks) for node in path if not node.pins)
        pins = len(self._pins) + (name not in self._pins)
        if self.pinned + more > self.pin_limit or pins > self.pin_limit:
            return None
        for node in _upwards(path[-1]):
            self._tighten(node)
            if not node.pins:
                self.pinned += len(node.blocks)
            node.pins += 1
            node.last_use = now
        self._unpin(name)
        self._pins[name] = _Pin(path[-1], now + ttl_s)
        self._next_expiry = min(self._next_expiry, now + ttl_s)
        return sum(len(node.blocks) for node in path)

    def unpin(self, namespace: Namespace, tokens: bytes) -> int:
        """Take the pin of exactly these tokens back; the blocks it covered, 0 without one."""
        name = self._pin_name(namespace, tokens)
        return self._unpin(name) if name is not None else 0

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over."""
        if now < self._next_expiry:
            return
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            self._unpin(name)
        self._next_expiry = min((pin.until for pin in self._pins.values()), default=inf)

    def flush(self, now: float) -> list[int]:
        """Drop all pins and evict every block that nobody holds."""
        for name in list(self._pins):
            self._unpin(name)
        return self.evict(self.evictable, now)

    def nodes(self) -> Iterator[Node]:
        """All nodes with blocks, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.blocks:
                yield node
            stack.extend(node.children.values())

    def snapshot(self) -> list[StoredRun]:
        """All that is cached, parents before children."""
        return [
            StoredRun(_key(node.parent), tuple(node.keys))
            for node in self.nodes()
            if node.parent is not None
        ]

    def _whole(self, tokens: bytes, limit: int) -> int:
        """Bytes of the whole blocks in the first `limit` tokens."""
        return min(len(tokens), limit * TOKEN_BYTES) // self._width * self._width

    def _shared(self, node: Node, tokens: bytes, at: int, end: int) -> int:
        return common_blocks(node.tokens[: end - at], tokens, at, self._width)

    def _descend(self, node: Node, tokens: bytes, end: int) -> list[Node]:
        """The nodes below `node` that spell tokens[:end] as far as cached; splits the last."""
        path = []
        at = 0
        while at < end and (child := node.children.get(tokens[at : at + self._width])):
            shared = self._shared(child, tokens, at, end)
            node = child if shared == len(child.blocks) else self._split(child, shared)
            path.append(node)
            at += shared * self._width
            if node is not child:
                break
        return path

    def _split(self, node: Node, keep: int) -> Node:
        """Cut the first `keep` blocks off into a new node above `node`, and return that one."""
        parent = node.parent
        assert parent is not None
        cut = keep * self._width
        upper = Node(
            parent=parent,
            tokens=node.tokens[:cut],
            blocks=node.blocks[:keep],
            keys=node.keys[:keep],
            serial=next(self._serial),
            last_use=node.last_use,
            locks=node.locks,
            pins=node.pins,
            proven=node.proven,
            children={node.tokens[cut : cut + self._width]: node},
        )
        parent.children[node.tokens[: self._width]] = upper
        node.parent = upper
        node.tokens, node.blocks, node.keys = (
            node.tokens[cut:],
            node.blocks[keep:],
            node.keys[keep:],
        )
        return upper

    def _coldest(self) -> Node | None:
        """The free leaf to evict from, taken out of its heap."""
        for heap in self._heaps:
            while heap and not self._current(heap[0]):
                node = heappop(heap)[-1]
                node.queued = False
                if not (node.locks or node.pins or node.children):
                    self._offer(node)
        fresh, proven = self._heaps
        if not fresh and not proven:
            return None
        late = not fresh or (proven and self.unproven <= self.probation and proven[0] < fresh[0])
        node = heappop(proven if late else fresh)[-1]
        node.queued = False
        return node

    def _current(self, leaf: Leaf) -> bool:
        """Whether an entry is still what it was when it was entered."""
        last_use, _, proven, node = leaf
        free = not (node.locks or node.pins or node.children)
        return free and last_use == node.last_use and proven == node.proven

    def _prove(self, node: Node) -> None:
        if not node.proven:
            node.proven = True
            self.unproven -= len(node.blocks)

    def _truncate(self, node: Node, keep: int) -> None:
        parent = node.parent
        assert parent is not None
        if keep:
            node.tokens = node.tokens[: keep * self._width]
            del node.blocks[keep:], node.keys[keep:]
            self._offer(node)
            return
        del parent.children[node.tokens[: self._width]]
        if not parent.children and not parent.locks and not parent.pins:
            self._offer(parent)

    def _offer(self, leaf: Node) -> None:
        """Put a free leaf up for eviction, once; a root without children is dropped instead."""
        if leaf.namespace is not None:
            del self._roots[leaf.namespace]
        elif not leaf.queued:
            leaf.queued = True
            heappush(self._heaps[leaf.proven], (leaf.last_use, leaf.serial, leaf.proven, leaf))

    def _lock(self, node: Node) -> None:
        self._tighten(node)
        node.locks += 1

    def _tighten(self, node: Node) -> None:
        """Before a lock or pin is added."""
        if not node.locks and not node.pins:
            self.evictable -= len(node.blocks)

    def _loosened(self, node: Node) -> None:
        """After a lock or pin was taken off."""
        if not node.locks and not node.pins:
            self.evictable += len(node.blocks)
            if not node.children:
                self._offer(node)

    def _pin_name(self, namespace: Namespace, tokens: bytes) -> int | None:
        """The key of the last whole block names the whole path."""
        start = self._roots.get(namespace)
        if start is None or len(tokens) < self._width:
            return None
        return block_keys(tokens, self.block_size, start.keys[-1])[-1]

    def _unpin(self, name: int) -> int:
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        blocks = 0
        for node in _upwards(pin.node):
            blocks += len(node.blocks)
            node.pins -= 1
            if not node.pins:
                self.pinned -= len(node.blocks)
            self._loosened(node)
        return blocks


def _key(node: Node) -> int | None:
    """What is stored below a node names it by this: its last block, or None for a root."""
    return node.keys[-1] if node.namespace is None else None


def common_blocks(run: bytes, tokens: bytes, at: int, width: int) -> int:
    """Leading whole blocks of `run`, `width` bytes each, that equal those of tokens[at:]."""
    high = min(len(run), len(tokens) - at) // width
    if tokens.startswith(run[: high * width], at):
        return high
    low = 0  # run[: low * width] is equal, run[: high * width] is not
    while high - low > 1:
        middle = (low + high) // 2
        if tokens.startswith(run[low * width : middle * width], at + low * width):
            low = middle
        else:
            high = middle
    return low


def _upwards(node: Node) -> Iterator[Node]:
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent
