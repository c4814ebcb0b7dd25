"""A runner whose KV pool holds ledgers: what was written, not what it means.

Every slot remembers (namespace root, position, token). Reading a slot that holds anything else than
the sequence's own token at that position is an error, so no aliased, lost or early freed block goes
unseen. The next token is a hash of all that was read back, so that it depends on every slot.
"""

from xxhash import xxh3_64_intdigest

from hotbranch.keys import root
from replicas.radix.sequence import Chunk, Sampled, Sequence


class LedgerRunner:
    def __init__(self, blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[tuple[int, int, int] | None] = [None] * (blocks * block_size)
        self.computed: list[Chunk] = []  # every chunk ever run
        self.known: set[Sequence] = set()  # sampled for and not forgotten

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        self.computed += chunks
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                self.slots[self._slot(chunk, position)] = self._entry(chunk, position)
        return [self._sample(chunk) for chunk in chunks]

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)

    def _sample(self, chunk: Chunk) -> Sampled | None:
        read = bytearray()
        for position in range(chunk.end):
            found = self.slots[self._slot(chunk, position)]
            wanted = self._entry(chunk, position)
            assert found == wanted, f"position {position} holds {found}, not {wanted}"
            read += found[2].to_bytes(4, "little")
        if not chunk.samples:
            return None
        self.known.add(chunk.sequence)
        return Sampled(xxh3_64_intdigest(read) % self.vocab_size)

    def _slot(self, chunk: Chunk, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return chunk.sequence.blocks[block] * self.block_size + offset

    def _entry(self, chunk: Chunk, position: int) -> tuple[int, int, int]:
        space = chunk.sequence.request.namespace
        seed = root(space.model, space.adapter, space.salt)
        return seed, position, chunk.sequence.tokens[position]
