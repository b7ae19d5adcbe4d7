"""What the scheduler puts into each batch, who waits and who gives way."""

import pytest

from shardwise.serve.engine.scheduler import Limits, QueueFull, SchedulerCounters
from toy_engine import alone, engine, ran, sequence


def test_those_that_generate_go_first_and_prompts_share_the_rest_in_chunks() -> None:
    one = engine(limits=Limits(8, 4, 8))
    one.add(sequence(0, [1] * 3, 9))
    one.add(sequence(1, [2] * 9, 9))
    one.add(sequence(2, [3] * 9, 9))
    assert [ran(one.step()) for _ in range(4)] == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 1), (1, 5, 4), (2, 0, 3)],
        [(0, 4, 1), (1, 9, 1), (2, 3, 6)],
        [(0, 5, 1), (1, 10, 1), (2, 9, 1)],
    ]


def test_a_prompt_that_was_computed_is_found() -> None:
    one = engine()
    one.add(sequence(0, [1] * 11, 2))
    one.drain()
    one.add(sequence(1, [1] * 11, 2))
    one.add(sequence(2, [1] * 11, 2, salt="other"))
    assert ran(one.step()) == [(1, 8, 3), (2, 0, 11)]
    assert one.scheduler.counters() == SchedulerCounters(
        0, 2, 0, 0, num_queried_tokens=33, num_hit_tokens=8
    )
    assert [one.scheduler.sequences[id].num_cached_tokens for id in (1, 2)] == [8, 0]


def test_scores_need_the_whole_prompt_in_chunks_that_overlap() -> None:
    one = engine(limits=Limits(5, 4, 8))
    one.add(sequence(0, [1] * 11, 3))
    one.drain()
    one.add(sequence(1, [1] * 11, 3, prompt_logprobs=0))
    batches = [one.step() for _ in range(4)]
    assert [ran(batch) for batch in batches] == [
        [(1, 0, 5)],
        [(1, 4, 5)],
        [(1, 8, 3)],
        [(1, 11, 1)],
    ]
    assert [batch.entries[0].num_prompt_logprobs for batch in batches if batch] == [0, 0, 0, None]
    assert one.scored[1] == list(range(1, 11))
    assert one.scheduler.counters().num_queried_tokens == 11  # of the first alone


def test_n_sequences_run_their_prompt_once_and_share_its_pages() -> None:
    one = engine()
    one.add(sequence(5, [1] * 9, 4, n=3))
    one.add(sequence(8, [2], 2))
    batch = one.step()
    assert batch is not None and [entry.num_samples for entry in batch.entries] == [1, 3]
    assert one.pages.counts().used == 4
    batch = one.step()
    assert (
        batch is not None
        and [entry.id for entry in batch.entries] == [5, 6, 7, 8]
        and len(batch.copies) == 2
    )
    assert one.pages.counts().used == 2 + 3 and one.scheduler.counters().num_running == 3
    one.drain()
    assert one.num_tokens == 9 + 3 * 3 + 2
    assert [len(one.outputs[id]) for id in (5, 6, 7, 8)] == [4, 4, 4, 2]


def test_sequences_of_a_request_take_as_many_places_as_they_are() -> None:
    one = engine(limits=Limits(32, 3, 8))
    for id in (0, 2, 4):
        one.add(sequence(id, [1, 2], 3, n=2))
    assert ran(one.step()) == [(0, 0, 2)]
    assert ran(one.step()) == [(0, 2, 1), (1, 2, 1)]
    one.scheduler.finish(1)
    assert ran(one.step()) == [(0, 3, 1), (2, 0, 2)]


def test_who_finds_no_memory_waits_and_is_not_overtaken() -> None:
    one = engine(num_pages=6, page_tokens=1)
    one.add(sequence(0, [1, 1, 1], 3))
    one.add(sequence(1, [2, 2, 2, 2], 3))
    one.add(sequence(2, [3], 1))
    first = [ran(one.step()) for _ in range(4)]
    assert first == [[(0, 0, 3)], [(0, 3, 1)], [(0, 4, 1)], [(2, 0, 1), (1, 0, 4)]]


@pytest.mark.parametrize(("num_prompt", "fits"), [(3, True), (4, False)])
def test_each_running_sequence_keeps_a_spare_page_when_another_is_taken_in(
    num_prompt: int, fits: bool
) -> None:
    one = engine(num_pages=10, page_tokens=1)
    one.add(sequence(0, [1] * 6, 5))
    one.add(sequence(1, [2] * num_prompt, 1))
    assert ran(one.step()) == [(0, 0, 6), (1, 0, 3)][: 1 + fits]


@pytest.mark.parametrize("num_pages", range(8, 16))
def test_scores_are_not_kept_from_going_on_by_the_last_page(num_pages: int) -> None:
    one = engine(num_pages, 1, Limits(3, 2, 2))
    one.add(sequence(0, [1], num_pages, priority=1))
    one.step()
    one.add(sequence(1, [2] * 6, 2, prompt_logprobs=0))
    one.drain()
    assert set(one.scored[1]) == {1, 2, 3, 4, 5}


def test_lower_priorities_come_later_and_give_way_first() -> None:
    one = engine(num_pages=8, page_tokens=1)
    one.add(sequence(0, [1, 1, 1], 5, priority=1))
    one.add(sequence(1, [2, 2], 6, priority=0))
    order = []
    while batch := one.step():
        order.append([entry.id for entry in batch.entries])
    assert order[0] == [1, 0] and [0, 1] not in order and [1] in order
    assert one.scheduler.counters().num_preemptions == 1
    assert one.outputs[0] == alone([1, 1, 1], 5, 0, False)[3:]


def test_what_preemption_throws_away_is_counted() -> None:
    """Two sequences of 3 + 5 tokens need 4 of the 5 pages each; one gives way and later finds a
    entry of itself."""
    one = engine(num_pages=5, page_tokens=2)
    one.add(sequence(0, [1, 1, 1], 5))
    one.add(sequence(1, [2, 2, 2], 5, priority=1))
    batches = [ran(batch) for batch in iter(one.step, None)]
    counters = one.scheduler.counters()
    starts = [start for batch in batches for id, start, _ in batch if id == 1]
    again = next(
        number for number, start in enumerate(starts) if number and start <= starts[number - 1]
    )
    assert counters.num_preemptions == 1
    assert counters.num_recomputed_tokens == starts[again - 1] + 1 - starts[again] > 0


def test_tokens_are_recomputed_as_often_as_they_are_run_again() -> None:
    """Two preemptions, the second while only 4 of 12 tokens were computed again; no full page can
    be found."""
    one = engine(num_pages=1, page_tokens=64, limits=Limits(4, 1, 1))
    one.add(sequence(0, [1] * 12, 9))
    for num_steps in (3, 1):
        for _ in range(num_steps):
            one.step()
        one.scheduler.preempt(one.scheduler.running.pop())
    one.drain()
    assert one.scheduler.counters().num_recomputed_tokens == 4 + 12
    assert one.outputs[0] == alone([1] * 12, 9, 0, False)[12:]


def test_what_scored_chunks_overlap_by_is_not_recomputed() -> None:
    """A prompt of 9 that is scored gives way when all but one of its tokens have been run, and is
    then run again in other chunks. Of these 8 were thrown away; the token that two chunks have in
    common is not counted."""
    one = engine(num_pages=7, page_tokens=2, limits=Limits(4, 2, 2))
    one.add(sequence(0, [1, 2], 6))
    one.add(sequence(10, [2] * 6 + [1] * 3, 1, prompt_logprobs=0))
    chunks = [
        (start, count)
        for batch in iter(one.step, None)
        for id, start, count in ran(batch)
        if id == 10
    ]
    assert chunks == [(0, 2), (1, 3), (3, 3), (5, 3), (0, 4), (3, 4), (6, 3)]
    assert one.scheduler.counters().num_recomputed_tokens == 8


def test_a_full_queue_tells_when_to_come_back() -> None:
    """10 + 4 tokens run at most of the first (2 sequences share 6 + 2 * 4), 3 + 7 of the second: 12
    each on average."""
    one = engine(limits=Limits(64, 8, max_queued=2))
    one.add(sequence(0, [1] * 6, 5, n=2))
    one.add(sequence(2, [1] * 3, 8))
    for tokens_per_s, retry_after_s in [(12.0, 1), (11.9, 2), (0.5, 24), (1e9, 1), (0.0, 1)]:
        with pytest.raises(
            QueueFull, match=f"2 requests are waiting already; try again in {retry_after_s} s"
        ) as told:
            one.scheduler.add(sequence(3, [1], 1), tokens_per_s)
        assert told.value.retry_after_s == retry_after_s
    one.drain()
    assert one.num_tokens == 24
    one.add(sequence(3, [1], 1))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "told"),
    [
        (
            10,
            8,
            "10 prompt tokens and max_tokens=8 exceed the 17 tokens that a request may have; "
            "max_tokens=7 works",
        ),
        (
            17,
            1,
            "17 prompt tokens and max_tokens=1 exceed the 17 tokens that a request may have; "
            "a prompt of 16 tokens works",
        ),
        (0, 1, "the prompt is empty; give it at least one token"),
        (1, 0, "max_tokens is 0, but it must be at least 1."),
    ],
)
def test_a_request_that_could_never_end_is_refused(
    num_prompt: int, max_tokens: int, told: str
) -> None:
    one = engine(num_pages=4)
    with pytest.raises(ValueError) as refused:
        one.add(sequence(0, [1] * num_prompt, max_tokens))
    assert str(refused.value) == told
    one.add(sequence(0, [1] * 10, 7))
    one.drain()


def test_more_sequences_than_run_are_refused() -> None:
    with pytest.raises(ValueError, match="n is 9, but only 8 sequences run at the same time"):
        engine().add(sequence(0, [1], 1, n=9))


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ((8, 8, 1), "max_batch_tokens is 8, which leaves nothing .* 9 works"),
        ((8, 0, 1), "at least 1"),
        ((8, 1, 0), "at least 1"),
    ],
)
def test_limits_that_let_nothing_run_are_refused(limits: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Limits(*limits)
