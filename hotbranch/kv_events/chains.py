"""Blocks in runs: what has one child goes on with it."""

from collections.abc import Collection, Iterator, Mapping


def chains(
    keys: Collection[int], parents: Mapping[int, int | None]
) -> Iterator[tuple[int | None, list[int]]]:
    """Each key once, as (parent, run of keys), parents before children.

    `parents` has the parent of each key, which may be none or not among `keys`.
    """
    children: dict[int | None, list[int]] = {}
    heads: list[int] = []
    for key in keys:
        parent = parents[key]
        children.setdefault(parent, []).append(key)
        if parent not in keys:
            heads.append(key)
    while heads:
        key = heads.pop()
        run = [key]
        while len(below := children.get(key, [])) == 1:
            (key,) = below
            run.append(key)
        heads += below
        yield parents[run[0]], run
