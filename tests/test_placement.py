"""Where a prompt goes, by the rules of `router.schedule.placement`."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.holder import Holder
from router.fleet.outstanding import Outstanding
from router.schedule.placement import Candidate, cost, place


def candidate(
    replica: str, matched: int = 0, outstanding: int = 0, running: int = 0, rank: int = 0
) -> Candidate:
    return Candidate(Holder(replica, rank), matched, outstanding, 1e-3, 0.02, running)


def test_the_match_wins_when_loads_are_equal() -> None:
    assert place(1000, 1, [candidate("a"), candidate("b", 800)]).candidate.holder.replica == "b"


def test_a_match_is_worth_waiting_for_up_to_half_of_what_it_saves() -> None:
    near = place(1000, 1, [candidate("a"), candidate("b", 800, outstanding=1100)])
    assert (near.candidate.holder.replica, near.reason) == ("b", "match")
    far = place(1000, 1, [candidate("a"), candidate("b", 800, outstanding=1300)])
    assert (far.candidate.holder.replica, far.reason) == ("a", "cost")


def test_a_prefix_that_all_hold_carries_no_affinity() -> None:
    everywhere = [candidate("a", 500, outstanding=4000), candidate("b", 500)]
    assert place(1000, 1, everywhere).candidate.holder.replica == "b"


def test_noise_in_what_replicas_measure_does_not_empty_one_of_them() -> None:
    fleet = [Candidate(Holder("a"), 0, 0, 1.0e-3, 0, 0), Candidate(Holder("b"), 0, 0, 1.2e-3, 0, 0)]
    homes = Counter(place(1000, family, fleet).candidate.holder.replica for family in range(400))
    assert min(homes["a"], homes["b"]) > 120


def test_a_slow_home_gives_way_to_the_second_candidate() -> None:
    fleet = [candidate("a", outstanding=1000), candidate("b")]
    assert all(place(1000, family, fleet).candidate.holder.replica == "b" for family in range(50))


def test_one_hot_replica_does_not_switch_affinity_off_for_others() -> None:
    fleet = [
        candidate("hot", 0, outstanding=100_000),
        candidate("b", 800),
        candidate("c"),
    ]
    assert place(1000, 1, fleet).candidate.holder.replica == "b"


def test_families_spread_and_each_stays() -> None:
    fleet = [candidate(name) for name in "abcdefgh"]
    homes = [place(1000, family, fleet).candidate.holder.replica for family in range(800)]
    assert homes == [place(1000, family, fleet).candidate.holder.replica for family in range(800)]
    assert min(Counter(homes).values()) > 60 and len(Counter(homes)) == 8


def test_ranks_of_one_replica_are_candidates_of_their_own() -> None:
    ranks = [candidate("a", rank=0), candidate("a", 800, rank=1)]
    assert place(1000, 1, ranks).candidate.holder == Holder("a", 1)
    ranks = [candidate("a", rank=rank) for rank in range(4)]
    homes = Counter(place(1000, family, ranks).candidate.holder.rank for family in range(400))
    assert min(homes[rank] for rank in range(4)) > 60


candidates = st.lists(
    st.builds(
        Candidate,
        st.builds(Holder, st.uuids().map(str), st.integers(0, 3)),
        st.integers(0, 1000),
        st.integers(0, 50_000),
        st.floats(1e-6, 1e-2),
        st.floats(0, 0.1),
        st.integers(0, 8),
    ),
    min_size=1,
    max_size=6,
)


@given(fleet=candidates, discriminator=st.integers(0, 2**64 - 1))
def test_the_choice_costs_at_most_half_its_saving_more_than_the_cheapest(
    fleet: list[Candidate], discriminator: int
) -> None:
    placement = place(1000, discriminator, fleet)
    assert placement.candidate in fleet
    if placement.reason in ("match", "cost"):
        cheapest = min(fleet, key=lambda c: cost(c, 1000))
        chosen = placement.candidate
        saved = max(0, chosen.matched - cheapest.matched) * chosen.prefill_s_per_token
        assert placement.cost_s <= cost(cheapest, 1000) + saved / 2 + 1e-9


def test_outstanding_adds_what_was_sent_since_the_report() -> None:
    outstanding = Outstanding()
    outstanding.sent(1, 500)
    outstanding.reported(700)
    assert outstanding.tokens == 700
    outstanding.sent(2, 300)
    assert outstanding.tokens == 1000
    outstanding.settled(2)
    outstanding.settled(2)
    assert outstanding.tokens == 700
    outstanding.settled(1)
    outstanding.reported(0)
    assert outstanding.tokens == 0


def test_outstanding_is_never_below_our_own_work() -> None:
    outstanding = Outstanding()
    outstanding.sent(1, 500)
    outstanding.reported(0)  # left the replica before it saw the request
    assert outstanding.tokens == 500
