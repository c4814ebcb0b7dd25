"""The name of a session comes from its client to the policy: HTTP, router and two real replicas."""

from pathlib import Path

from test_admin_live import SYSTEM, site

SESSIONS = 16  # all on one of two replicas by chance: once in 32,768 runs


async def test_a_session_stays_on_its_replica_whatever_it_asks(smollm2: Path) -> None:
    async with site(smollm2, routing_policy="session_sticky") as here:
        homes = []
        for number in range(SESSIONS):
            session = f"session {number}"
            home = await here.ask(SYSTEM, "The same?", x_session_id=session)
            assert home == await here.ask("You are terse.", "And this?", x_session_id=session)
            homes.append(home)
        assert set(homes) == {"a", "b"}


async def test_a_name_that_is_too_long_is_none(smollm2: Path) -> None:
    async with site(smollm2, routing_policy="session_sticky") as here:
        longest = [f"{number:0256}" for number in range(SESSIONS)]
        homes = {await here.ask(SYSTEM, "Why?", x_session_id=name) for name in longest}
        assert homes == {"a", "b"}
        homes = {await here.ask(SYSTEM, "Why?", x_session_id=name + "0") for name in longest}
        assert homes == {await here.ask(SYSTEM, "Why?")}
