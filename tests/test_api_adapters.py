"""LoRA adapters by name: listed, placed where they are, cached apart from their model."""

from pathlib import Path

import openai
import pytest
from api_site import BODY, HELLO
from test_fleet import eventually
from told_site import PLAIN, ToldSite, told_site

from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.fleet.link import State

LONG = [{"role": "user", "content": "a lock raises a boat. " * 8}]


async def ask(site: ToldSite, model: str, **fields: object) -> str:
    """The replica that answered."""
    body = {**BODY, "model": model, **fields}
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.headers["x-hotbranch-replica"]


async def test_an_adapter_goes_where_it_is(smollm2: Path) -> None:
    tuned = {**PLAIN, "adapters": ["tuned", "other"]}
    async with told_site(smollm2, PLAIN, tuned, PLAIN) as site:
        assert {await ask(site, "tuned", user=str(i)) for i in range(8)} == {"b"}
        assert await ask(site, "other", stream=False) == "b"
        answer = await site.client.completions.create(model="tuned", prompt="hi", max_tokens=1)
        assert answer.model == "tuned"
        chunks = [
            chunk
            async for chunk in await site.client.chat.completions.create(
                model="tuned", messages=HELLO, max_tokens=1, stream=True
            )
        ]
        assert {chunk.model for chunk in chunks} == {"tuned"}
        assert [submit.adapter for submit in site.submits] == [
            *["tuned"] * 8,
            "other",
            *["tuned"] * 2,
        ]
        assert {submit.model for submit in site.submits} == {"smol"}
        asked = {"model": "tuned", "prompt": "hi"}
        assert (await site.http.post("/tokenize", json=asked)).json()["count"] > 0


async def test_an_adapter_shares_no_cache_with_its_model(smollm2: Path) -> None:
    async with told_site(smollm2, {**PLAIN, "adapters": ["tuned", "other"]}) as site:
        for model in ("smol", "tuned", "other", "tuned"):
            await ask(site, model, messages=LONG)
        predicted = [submit.predicted_tokens for submit in site.submits]
        assert predicted[:3] == [0, 0, 0]
        assert predicted[3] > 0
        ids = site.submits[0].token_ids
        keys = {name: block_keys(ids, 4, root("smol", name)) for name in ("", "tuned", "other")}
        assert len({keys[name][-1] for name in keys}) == 3
        for name in keys:
            depths = site.router.index.match(keys[name]).depths()
            assert depths[Holder(site.told[0].address)] == len(keys[name])


async def test_models_and_their_adapters_are_listed(smollm2: Path) -> None:
    # a model hides an adapter of its name
    adapters = [{**PLAIN, "adapters": ["tuned", "smol"]}, {**PLAIN, "adapters": ["org/other"]}]
    async with told_site(smollm2, *adapters) as site:
        listed = (await site.http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
            ("smol", "smol", None),
            ("org/other", "org/other", "smol"),
            ("tuned", "tuned", "smol"),
        ]
        assert (await site.http.get("/v1/models/org/other")).json() == listed[1]
        for field in ("created", "max_model_len", "owned_by"):
            assert len({one[field] for one in listed}) == 1
        await ask(site, "smol")
        assert site.submits[0].adapter == ""


async def test_an_adapter_that_is_away_is_a_503_and_one_that_nobody_has_a_404(
    smollm2: Path,
) -> None:
    async with told_site(smollm2, PLAIN, {**PLAIN, "adapters": ["tuned"]}) as site:
        await site.told[1].server.stop(0)
        link = next(one for one in site.router.fleet.links if one.replica_id == "b")
        await eventually(lambda: link.state is State.CONNECTING)
        with pytest.raises(openai.InternalServerError) as away:
            await site.client.chat.completions.create(model="tuned", messages=HELLO)
        assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "1")
        assert "no replica is ready for 'tuned'" in away.value.message
        assert await ask(site, "smol") == "a"
        with pytest.raises(openai.NotFoundError):
            await site.client.chat.completions.create(model="unheard-of", messages=HELLO)
        await site.leaves(site.told[1])
        with pytest.raises(openai.NotFoundError):
            await site.client.chat.completions.create(model="tuned", messages=HELLO)
