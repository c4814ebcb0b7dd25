"""What the index looks at: no more than what is new."""

from collections.abc import Iterator

import pytest

from router.fleet.holder import Holder
from router.index.index import COMPUTED_S, Index

LIFE_S = 10.0


class ReadKeys(list[int]):
    """Counts how many of its keys are looked at."""

    read = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        ReadKeys.read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        ReadKeys.read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("reports", [True, False])
def test_no_work_grows_with_the_part_of_a_prompt_that_is_known(reports: bool) -> None:
    """Neither where it is predicted already, nor where only the replica's report is left of it."""
    index = Index(prediction_s=LIFE_S)
    holder = Holder("a")
    index.add(holder, capacity=20_000)
    known = list(range(1, 8193))
    if reports:
        index.replace(holder, [(None, known)], 0.0)
    else:
        index.predict(holder, known, 0.0)
        index.computed(holder, known, 0, 0.0)
        index.expire(LIFE_S)
    assert index.predicted_blocks == 0
    ReadKeys.read = 0
    for serial in range(100):
        path = ReadKeys([*known, 10_000 + serial])
        for now in (LIFE_S + serial, LIFE_S + serial + COMPUTED_S / 2):
            index.expire(now)
            assert index.match(path).depths() == {holder: 8192 + (now > LIFE_S + serial)}
            index.predict(holder, path, now)
            index.computed(holder, path, 8192, now)
            if reports and now > LIFE_S + serial:
                index.store(holder, 8192, path[-1:], now)
        index.withdraw(holder, path)
        index.missed(holder, path, 8192, now)
        index.evict(holder, path[-1:])
    assert ReadKeys.read < 10_000, "some ten of 8,193 keys each time a path is followed"
