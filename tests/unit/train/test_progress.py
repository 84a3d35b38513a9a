"""The console: a bar on a terminal, few lines elsewhere, nothing that commands a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from minillm_core.train.events import Ended, Evaluated, Saved, Skipped, Stepped, Throughput
from minillm_core.train.progress import BarView, LineView, describe, duration, view


def stepped(step: int, mfu: float | None = None) -> Stepped:
    rate = Throughput(12345.6, 20000.0, 12000.0)
    return Stepped(step, 4.25, 0.1, 100 * step, rate, 0.5, mfu, None, 1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (11_100, "3:05:00"), (-3, "0:00"), (59.7, "1:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_come_now_and_then(clock) -> None:
    lines: list[str] = []
    done = 0
    shown = LineView(lambda: done / 100, 100, lines.append, clock)
    with shown:
        for done in range(1, 101):
            clock.now += 0.5
            shown(stepped(done))
    assert [line.split()[1] for line in lines] == [
        "1/100",
        "21/100",
        "41/100",
        "61/100",
        "81/100",
        "100/100",
    ]
    assert lines[0] == "step 1/100  loss 4.2500  12,346 tokens/s  -:-- left"
    assert lines[1].endswith("0:40 left")
    assert lines[-1].endswith("0:00 left")


def test_a_run_by_the_clock_has_no_number_of_steps(clock) -> None:
    lines: list[str] = []
    shown = LineView(lambda: 0.5, None, lines.append, clock)
    shown(stepped(7, mfu=0.4213))
    assert lines == ["step 7  loss 4.2500  12,346 tokens/s  MFU 42.1%  -:-- left"]


def test_events_in_words() -> None:
    assert describe(Evaluated(9, 3.5, 1.25)) == "step 9: validation loss 3.5000, 1.2500 bits/byte"
    assert describe(Evaluated(9, 3.5, None)) == "step 9: validation loss 3.5000"
    saved = describe(Saved(9, "checkpoints/step-00000009", 0.25))
    assert saved == "step 9: checkpoint checkpoints/step-00000009 (0.2 s)"
    assert "passed over (2 so far)" in (describe(Skipped(9, 2)) or "")
    assert describe(Ended(9, 0, 1.0)) is None


def test_a_bar_with_lines_above_it(clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    done = 0
    with BarView(lambda: done / 4, 4, console, clock) as shown:
        for done in range(1, 5):
            clock.now += 2
            shown(stepped(done, mfu=0.31))
            if done == 2:
                shown(Evaluated(2, 3.5, None))
        shown.say("[bold]not markup[/bold]")
    text = stream.getvalue()
    assert "step 4/4" in text
    assert "loss 4.2500  12,346 tokens/s  MFU 31.0%  0:00 left" in text
    assert "step 2: validation loss 3.5000" in text
    assert "[bold]not markup[/bold]" in text


def test_an_evaluation_that_lasts_is_mentioned(clock) -> None:
    lines: list[str] = []
    shown = LineView(lambda: 1.0, 3, lines.append, clock)
    for _ in range(2):  # in the second evaluation as in the first
        for done in range(0, 20_000, 1000):
            shown.evaluating(done, 20_000)
            clock.now += 1
    assert lines == 2 * [
        "evaluating 20,000 predictions: 15% done",
        "evaluating 20,000 predictions: 65% done",
    ]


def test_the_bar_shows_an_evaluation(clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with BarView(lambda: 1.0, 4, console, clock) as shown:
        shown(stepped(4))
        shown.evaluating(1000, 20_000)
        shown._bar.refresh()
        shown(Evaluated(4, 3.5, None))
        shown._bar.refresh()
    before, after = stream.getvalue().split("step 4: validation loss")
    assert "1,000 of 20,000 predictions" in before
    assert "evaluating" in before
    assert after.rindex("step 4/4") > after.rfind("evaluating")


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture) -> None:
    lines: list[str] = []
    shown = view(lambda: 0.0, 3, lines.append)
    assert isinstance(shown, LineView)
    shown(stepped(1))
    assert len(lines) == 1
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
