"""Tests of console output: a bar on a terminal, few lines elsewhere, no control sequences from texts."""

from __future__ import annotations

import io
import itertools
import random
import threading
import time

import pytest
from rich.console import Console

from minillm_core.train.events import (
    Ended,
    Evaluated,
    Rewound,
    Sampled,
    Saved,
    Skipped,
    Stepped,
    Throughput,
)
from minillm_core.train.progress import (
    PATIENCE,
    QUIET,
    SKIPS,
    BarDisplay,
    Course,
    LineDisplay,
    describe,
    display,
    duration,
)

MIB = 2**20


def stepped(step: int, loss: float = 4.25, mfu: float | None = None) -> Stepped:
    rate = Throughput(12345.6, 20000.0, 12000.0)
    return Stepped(step, loss, 0.1, 100 * step, rate, 0.5, mfu, None, 1.0)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def shown(lines: list[str], clock) -> LineDisplay:
    return LineDisplay(lines.append, clock)


def terminal(width: int = 80) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, force_terminal=True, width=width, color_system=None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (11_100, "3:05:00"), (-3, "0:00"), (59.7, "1:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_is_short_is_not_mentioned_and_what_lasts_is_again_and_again(
    shown: LineDisplay, lines: list[str], clock
) -> None:
    for done in range(0, 12, 2):  # a second and a half
        shown.progress("reading", done * MIB, 12 * MIB)
        clock.now += 0.25
    for done in range(0, 251, 5):  # fifty seconds
        shown.progress("tokenising", done * MIB, 250 * MIB)
        clock.now += 1
    assert QUIET == 9
    assert lines == [
        "tokenising: 10.0 of 250.0 MiB (4 %), 0:48 left",
        "tokenising: 55.0 of 250.0 MiB (22 %), 0:39 left",
        "tokenising: 100.0 of 250.0 MiB (40 %), 0:30 left",
        "tokenising: 145.0 of 250.0 MiB (58 %), 0:21 left",
        "tokenising: 190.0 of 250.0 MiB (76 %), 0:12 left",
        "tokenising: 235.0 of 250.0 MiB (94 %), 0:03 left",
    ]


def test_tasks_one_after_another_are_never_ten_seconds_without_a_line(
    shown: LineDisplay, clock
) -> None:
    """Each of them starts before the previous one's line is due, or is too short for one."""
    said = [clock.now]
    shown._print = lambda text: said.append(clock.now)
    rng = random.Random(3)
    for name in range(200):
        with shown.phase(str(name)):
            for _ in range(rng.choice([3, 7, 30, 50])):
                clock.now += 0.25
                shown.tick()
    assert max(b - a for a, b in itertools.pairwise(said)) <= QUIET + 0.25


@pytest.mark.parametrize(
    ("done", "total", "line"),
    [
        (3 * MIB, 0, "tokenising: 3.0 MiB, 0:03"),  # the total is unknown
        (9 * MIB, 9 * MIB, "tokenising: 9.0 MiB, 0:03"),  # all is read, and tokenising continues
        (0, 0, "tokenising, 0:03"),
        (0, 9 * MIB, "tokenising: 0.0 MiB, 0:03"),
    ],
)
def test_time_is_told_where_time_left_is_not_known(
    shown: LineDisplay, lines: list[str], clock, done: int, total: int, line: str
) -> None:
    shown.progress("tokenising", 0, total)
    clock.now += 3
    shown.progress("tokenising", done, total)
    assert lines == [line]


def test_a_phase_goes_back_to_what_was_before(shown: LineDisplay, lines: list[str], clock) -> None:
    with shown.phase("reading the data"):
        clock.now += PATIENCE
        shown.tick()
        shown.progress("tokenising", 0, 9 * MIB)
        clock.now += QUIET
        shown.tick()
    clock.now += 99
    shown.tick()
    assert lines == ["reading the data, 0:02", "tokenising: 0.0 MiB, 0:09"]


def test_what_a_signal_came_in_is_known_afterwards(shown: LineDisplay) -> None:
    def interrupted() -> None:
        with shown.phase("reading the data"), shown.phase("opening the files"):
            shown.progress("tokenising", 1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert shown.broken_off == "tokenising"


def test_a_thread_mentions_what_calls_nothing(lines: list[str], clock) -> None:
    with LineDisplay(lines.append, clock) as shown, shown.phase("importing torch"):
        clock.now += 3
        for _ in range(200):
            if lines:
                break
            time.sleep(0.02)
        running = [one for one in threading.enumerate() if one.name == "progress"]
        assert [one.daemon for one in running] == [True]
    assert lines == ["importing torch, 0:03"]
    assert not [one for one in threading.enumerate() if one.name == "progress"]


def test_the_loss_of_a_line_is_the_mean_since_the_last_one(
    shown: LineDisplay, lines: list[str], clock
) -> None:
    done = 0
    shown.train(
        Course(
            lambda: done / 100,
            100,
            epochs=lambda tokens: tokens / 5000,
            bytes_per_token=2.5,
            clock=clock,
        )
    )
    losses = itertools.cycle([4.0, 5.0, 6.0, 5.0, float("nan"), 5.0])
    for done in range(1, 101):
        clock.now += 0.5
        shown(stepped(done, next(losses)))
    assert lines == [
        "step 1/100: loss 4.000, 2.308 bits/byte, 0.02 epochs, 12,346 tokens/s",
        "step 19/100: loss 5.000, 2.885 bits/byte, 0.38 epochs, 12,346 tokens/s, 0:40 left",
        "step 37/100: loss 5.000, 2.885 bits/byte, 0.74 epochs, 12,346 tokens/s, 0:32 left",
        "step 55/100: loss 5.000, 2.885 bits/byte, 1.10 epochs, 12,346 tokens/s, 0:22 left",
        "step 73/100: loss 5.000, 2.885 bits/byte, 1.46 epochs, 12,346 tokens/s, 0:14 left",
        "step 91/100: loss 5.000, 2.885 bits/byte, 1.82 epochs, 12,346 tokens/s, 0:04 left",
        "step 100/100: loss 5.125, 2.958 bits/byte, 2.00 epochs, 12,346 tokens/s, 0:00 left",
    ]


def test_a_run_by_the_clock_on_ids_has_neither_steps_nor_bits(
    shown: LineDisplay, lines: list[str], clock
) -> None:
    shown.train(Course(lambda: 0.5, None, clock=clock))
    shown(stepped(1, mfu=0.4213))
    assert lines == ["step 1: loss 4.250, 12,346 tokens/s, MFU 42 %"]


def test_the_first_step_is_waited_for_aloud(shown: LineDisplay, lines: list[str], clock) -> None:
    shown.train(Course(lambda: 0.0, 9, vocab=4096, first="compiling the first step", clock=clock))
    shown.evaluating(0, 100)
    clock.now += 1
    shown(Evaluated(0, 8.32, 2.9))
    for _ in range(13):
        clock.now += 1
        shown.tick()
    shown(stepped(1))
    clock.now += 99
    shown.tick()
    assert lines == [
        "step 0: held-out loss 8.320, 2.900 bits/byte: knows nothing yet (ln 4,096 = 8.32)",
        "compiling the first step, 0:02",
        "compiling the first step, 0:11",
        "step 1/9: loss 4.250, 12,346 tokens/s",
    ]


def test_a_model_that_knows_something_at_the_start(shown: LineDisplay, lines: list[str]) -> None:
    shown.train(Course(lambda: 0.0, 9, vocab=4096))
    shown(Evaluated(0, 4.62, None))
    assert lines == ["step 0: held-out loss 4.620: a uniform guess has ln 4,096 = 8.32"]


def test_the_number_of_predictions_is_shown_where_it_changes(
    shown: LineDisplay, lines: list[str]
) -> None:
    for step, tokens in enumerate((512, 512, 4096)):
        shown(Evaluated(step, 3.5, 1.25, tokens))
    assert lines == [
        "step 0: held-out loss 3.500, 1.250 bits/byte on 512 predictions",
        "step 1: held-out loss 3.500, 1.250 bits/byte",
        "step 2: held-out loss 3.500, 1.250 bits/byte on 4,096 predictions",
    ]


def test_events_in_words() -> None:
    assert describe(Evaluated(9, 3.5, 1.25)) == "step 9: held-out loss 3.500, 1.250 bits/byte"
    assert describe(Evaluated(9, 3.5, None)) == "step 9: held-out loss 3.500"
    saved = describe(Saved(9, "checkpoints/step-00000009", 0.25))
    assert saved == "step 9: saved checkpoints/step-00000009 (0.2 s)"
    assert "the batches of 6 steps are skipped" in (describe(Rewound(9, 9.5, 4, 6)) or "")
    assert describe(Ended(9, 0, 1.0)) is None


def test_a_sample_stands_apart_from_its_prompt() -> None:
    assert describe(Sampled(9, "def\n main", "(a):\n\n \n\n    pass\n\n")) == (
        "step 9: the model continues 'def main':\n  | (a):\n  | \n  |     pass"
    )
    assert describe(Sampled(9, "", "")) == "step 9: the model begins:\n  | (nothing)"


def test_batches_that_are_skipped_are_mentioned_once_a_minute(
    shown: LineDisplay, lines: list[str], clock
) -> None:
    for n in range(1, 87):
        shown(Skipped(12, n))
        clock.now += SKIPS / 43
    assert lines == [
        "step 12: batches without a supervised token are skipped (1 so far)",
        "step 12: batches without a supervised token are skipped (45 so far)",
    ]


def test_a_bar_with_lines_above_it(clock) -> None:
    stream, console = terminal()
    done = 0
    with BarDisplay(console, clock) as shown:
        shown.train(Course(lambda: done / 4, 4, clock=clock))
        for done in range(1, 5):
            clock.now += 2
            shown(stepped(done, mfu=0.31))
            if done == 2:
                shown(Evaluated(2, 3.5, None))
        shown.say("[bold]not markup[/bold] \x1b[2J")
        shown._live.refresh()
    text = stream.getvalue()
    assert "step 4/4" in text
    assert "loss 4.250, 12,346 tokens/s, MFU 31 %, 0:00 left" in text
    assert "step 2: held-out loss 3.500" in text
    assert "[bold]not markup[/bold] \n" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140])
def test_the_bar_never_wraps(clock, width: int) -> None:
    stream, console = terminal(width)
    shown = BarDisplay(console, clock)
    shown.progress("training a tokenizer", 123 * MIB, 1234 * MIB)
    clock.now += 5
    console.print(shown.render())
    shown.train(
        Course(
            lambda: 0.5,
            13_500,
            epochs=lambda tokens: tokens / 5000,
            bytes_per_token=2.5,
            clock=clock,
        )
    )
    console.print(shown.render())
    shown(stepped(12_345, mfu=0.31))
    console.print(shown.render())
    assert [len(line) <= width for line in stream.getvalue().splitlines()] == [True] * 3
    last = stream.getvalue().splitlines()[-1]
    assert ("bits/byte" in last) == (width >= 80)
    assert ("━" in last) == (width >= 40)
    assert "step 12,345/" in last or width < 40


def test_the_bar_shows_the_mean_of_the_last_steps(clock) -> None:
    stream, console = terminal()
    shown = BarDisplay(console, clock)
    shown.train(Course(lambda: 0.5, 99, clock=clock))
    for step in range(1, 65):
        shown(stepped(step, 4.0 if step % 2 else 6.0) if step > 32 else stepped(step, 99.0))
    console.print(shown.render())
    assert "loss 5.000" in stream.getvalue()


def test_an_evaluation_that_lasts_is_mentioned(shown: LineDisplay, lines: list[str], clock) -> None:
    for _ in range(2):  # in the second evaluation as in the first
        for done in range(0, 20_000, 1000):
            shown.evaluating(done, 20_000)
            clock.now += 1
        shown(Evaluated(1, 3.0, None))
    evaluating = [
        "evaluating: 2,000 of 20,000 predictions (10 %), 0:18 left",
        "evaluating: 11,000 of 20,000 predictions (55 %), 0:09 left",
    ]
    assert lines == 2 * [*evaluating, "step 1: held-out loss 3.000"]


def test_the_bar_shows_an_evaluation(clock) -> None:
    stream, console = terminal()
    shown = BarDisplay(console, clock)
    shown.train(Course(lambda: 1.0, 4, clock=clock))
    shown(stepped(4))
    shown.evaluating(1000, 20_000)
    console.print(shown.render())
    shown(Evaluated(4, 3.5, None))
    console.print(shown.render())
    before, after = stream.getvalue().split("step 4: held-out loss")
    assert "1,000 of 20,000 predictions" in before
    assert "step 4/4" in after


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture) -> None:
    lines: list[str] = []
    shown = display(lines.append)
    assert isinstance(shown, LineDisplay)
    shown.train(Course(lambda: 0.0, 3))
    shown(stepped(1))
    assert len(lines) == 1
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
