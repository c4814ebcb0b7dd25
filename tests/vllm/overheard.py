"""What vLLM holds by its own events, replayed without any code of ours but the contract's keys."""

import threading
from collections import Counter

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from xxhash import xxh3_64_intdigest

from hotbranch.keys import root


class Overheard:
    """A subscriber of its own. `keys` counts copies."""

    def __init__(self, endpoint: str, model: str) -> None:
        self.keys: Counter[int] = Counter()
        self.evictions = 0
        self.clears = 0
        self._model = model
        self._names: dict[object, int] = {}
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._expected = 0
        self.missed = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            _, sequence, payload = self._socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            self.missed = self.missed or number != self._expected
            self._expected = number + 1
            for event in self._decoder.decode(payload).events:
                self._apply(event)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case AllBlocksCleared():
                self.keys.clear()
                self.clears += 1
            case BlockRemoved():
                for name in event.block_hashes:
                    self.keys[self._names[name]] -= 1
                    self.evictions += 1
            case BlockStored():
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        if event.parent_block_hash is None:
            extra = list((event.extra_keys or [None])[0] or ())
            adapter = event.lora_name or ""
            salts = [part for part in extra if part != adapter]
            key = root(self._model, adapter, salts[0] if salts else "")
        else:
            key = self._names[event.parent_block_hash]
        for number, name in enumerate(event.block_hashes):
            ids = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            key = xxh3_64_intdigest(b"".join(id.to_bytes(4, "little") for id in ids), key)
            self._names[name] = key
            self.keys[key] += 1

    def held(self) -> set[int]:
        return {key for key, copies in self.keys.items() if copies > 0}
