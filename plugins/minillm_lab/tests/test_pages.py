"""Tests of pages: they show the results of ablations and runs, and load nothing external."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.errors import Refusal
from minillm_lab.ablation_page import ablation_page
from minillm_lab.card import read_cards
from minillm_lab.cards import cards_of, commit, write_card
from minillm_lab.history import read_history, smoothed, thinned
from minillm_lab.report import compare, report
from minillm_lab.run_page import run_page
from minillm_lab.worth import effect_of

HOSTILE = "</script><script>alert('1')</script><img src=//evil.example onerror=x> \x1b]0;t\x07&amp;"


class Elements(HTMLParser):
    """A parser of a page: its elements, their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.shown = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data if self.open and self.open[-1] != "style" else ""


def harmless(page: str) -> str:
    """Return a page's text, after checking that it loads and runs nothing."""
    found = Elements(page)
    names = {name for name, _ in found.tags}
    assert not names & {"script", "img", "link", "iframe", "a", "object", "image", "use", "form"}
    for _, attributes in found.tags:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "href")]
    policy = [a["content"] for n, a in found.tags if a.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "url(" not in page
    assert "@import" not in page
    return found.shown


def run(variant: str, seed: int, steps: int, loss: float, seconds: float = 1.0) -> dict[str, Any]:
    curve = [
        {"step": n, "tokens": 10 * n, "seconds": seconds * n / steps, "val_loss": loss + 1 / n}
        for n in range(1, steps + 1)
    ]
    curve[-1]["val_loss"] = loss
    told = {"tokens": 10 * steps, "seconds": seconds, "tokens_per_second": 10 * steps / seconds}
    return {
        **{"variant": variant, "seed": seed, "steps": steps, "peak_bytes": 2**31, "curve": curve},
        **told,
    }


def ablation(
    differences: list[float], name: str = "muon", failed: int = 0, **more: Any
) -> dict[str, Any]:
    seeds = range(len(differences))
    runs = [run("baseline", seed, 6, 4.0) for seed in seeds]
    runs += [run(f"+{name}", seed, 6, 4.0 + differences[seed]) for seed in seeds]
    runs += [
        {"variant": f"+{name}", "seed": 90 + n, "steps": 6, "error": "not finite"}
        for n in range(failed)
    ]
    effect: dict[str, Any] = {"effect": None, "low": None, "high": None}
    if differences:
        effect = {**effect_of(differences).data(), "unit": "nats"}
        effect["equal_seconds"] = effect_of(differences).data()
        effect["speed"] = {"effect": 0.9, "low": 0.8, "high": 0.95}
        effect["peak_bytes"] = {"with": 2**31, "without": 2**30}
    set_ = {"options": {}, "versions": {}, "parameters": 1000, "steps_at_equal_seconds": 6}
    return {
        "plugins": {name: {"with": f"+{name}", "without": "baseline", "failed": failed, **effect}},
        "not_judged": {},
        "design": "one at a time",
        "variants": {"baseline": {"plugins": [], **set_}, f"+{name}": {"plugins": [name], **set_}},
        "steps": 6,
        "seeds": list(seeds),
        "runs": runs,
        "finished": True,
        **more,
    }


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        (
            [-0.05, -0.06, -0.055],
            ["lower with muon", "−0.0550", "2.000 ×", "0.900 × [0.800, 0.950]"],
        ),
        ([0.05, 0.06, 0.055], ["higher with muon", "+0.0550"]),
        (
            [0.05, -0.02],
            ["is within noise for muon", "within noise; about ", "pairs would settle it"],
        ),
        (
            [0.05],
            ["One pair of runs does not tell the effect", "+0.0500", "one pair has no interval"],
        ),
        ([], ["All pairs of runs failed for muon", "nothing to draw"]),
    ],
)
def test_a_page_says_what_the_pairs_say(differences: list[float], said: list[str]) -> None:
    shown = harmless(ablation_page(ablation(differences)))
    for part in said:
        assert part in shown


def test_a_page_says_of_speed_and_memory_what_would_tell() -> None:
    result = ablation([-0.1, -0.2])
    unsure = {"low": 0.9, "high": 1.3, "distinguishable": False, "pairs": 2, "pairs_needed": 17}
    result["plugins"]["muon"]["speed"] = {"effect": 1.1, **unsure}
    heavy = {"effect": 1.2, "low": 1.1, "high": 1.25, "distinguishable": True}
    result["plugins"]["muon"]["peak_bytes"] |= heavy
    shown = harmless(ablation_page(result))
    for part in (
        "1.100 × [0.900, 1.300]",
        "about 17 pairs would settle it",
        "1.200 × [1.100, 1.250]",
    ):
        assert part in shown
    assert '<span class="worse">1.200 ×' in ablation_page(result)


def test_a_page_says_what_failed_and_what_is_not_finished() -> None:
    result = ablation([-0.1, -0.2], failed=2, finished=False, not_judged={"xsa": "it is needed"})
    shown = harmless(ablation_page(result))
    for part in ("Not finished: based on 6 runs", "not finite", "seed 91", "not measured: it is"):
        assert part in shown


def test_what_is_missing_has_failed_once_all_is_over() -> None:
    over = ablation([], failed=3, seeds=[0, 1, 2], steps=1)
    shown = harmless(ablation_page(over))
    for part in ("All pairs of runs failed for muon", "3 pairs failed", "1 step each", "none"):
        assert part in shown
    assert "yet" not in shown
    going = harmless(ablation_page(over | {"finished": False, "runs": over["runs"][:1]}))
    assert "No pair of runs has finished for muon" in going
    assert "1 pair failed, 2 pairs not run yet" in going
    half = ablation([-0.1, -0.2])
    half["plugins"]["muon"]["equal_seconds"] = None
    assert "the runs for that time failed" in harmless(ablation_page(half))
    assert "not run yet" in harmless(ablation_page(half | {"finished": False}))
    (first, *_), sets = half["variants"], half["variants"]
    aside = half | {"variants": {"the first": sets[first], **sets}}
    assert "runs of other lengths are the first's alone" in harmless(ablation_page(aside))


def test_an_effect_too_small_for_four_decimals_is_not_none() -> None:
    shown = harmless(ablation_page(ablation([-3e-5, -4e-5, -2.5e-5])))
    assert "−3.2e−05 [−5.1e−05, −1.3e−05]" in shown
    same = ablation([0.0, 0.0])
    assert "the same in every pair" in harmless(ablation_page(same))


def test_there_is_a_line_a_run_in_the_colour_of_its_set() -> None:
    page = ablation_page(ablation([-0.1, -0.2, -0.15]))
    wide = page.split('<h3>Loss against tokens</h3><div class="wide">')[1].split("</svg>")[0]
    assert wide.count('<g class="c0">') == wide.count('<g class="c1">') == 3
    assert wide.count("<polyline") == 6
    assert "<title>+muon, seed 2: 3.85 at 60</title>" in wide


def test_losses_are_compared_after_as_many_tokens() -> None:
    result = ablation([-0.1, -0.2])
    for one in result["runs"]:
        if one["variant"] == "+muon":  # twice the steps of half the tokens
            for point in one["curve"]:
                point["tokens"] //= 2
    page = ablation_page(result).split("<h3>Loss with minus loss without, same seed</h3>")[1]
    wide = page.split('<div class="wide">')[1].split("</svg>")[0]
    shown = re.findall(r"<title>muon, mean of 2: (\S+) at (\d+)</title>", wide)
    assert [int(tokens) for _, tokens in shown] == [30, 20, 10]
    assert float(shown[0][0]) == pytest.approx(-0.15 - 1 / 3, abs=0.01)
    for one in result["runs"]:
        if one["variant"] == "+muon":
            for point in one["curve"]:
                point["tokens"] += 1
    assert "mean of" not in ablation_page(result)  # nothing was evaluated after as many tokens


@pytest.mark.slow
@given(st.text())
def test_whatever_a_plugin_is_called_it_stays_text(name: str) -> None:
    harmless(ablation_page(ablation([0.1, 0.2], name=name + HOSTILE)))


def test_hostile_words_are_shown_as_they_are() -> None:
    about = {"device": HOSTILE, "data": {"description": HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    result = ablation([0.1, 0.2], HOSTILE, 1, not_judged={HOSTILE: HOSTILE}, **about)
    shown = harmless(ablation_page(result))
    assert "<img src=//evil.example onerror=x> &amp;" in shown
    assert "\x1b" not in shown


ABOUT: dict[str, Any] = {
    "preset": "tiny",
    "device": "x86_64",
    "hardware": {"device": "x86_64", "machine": "x86_64", "cores": 4},
    **{"backend": "torch", "dtype": "float32", "date": "2026-11-01", "commit": None},
}


def test_a_card_says_what_five_pairs_say(tmp_path: Path) -> None:
    differences = [-0.05, -0.06, -0.055, -0.05, -0.06]
    (card,), why = cards_of(ablation(differences, **ABOUT))
    assert why is None
    assert (card.effect, card.low, card.seeds) == (
        *(getattr(effect_of(differences), key) for key in ("effect", "low")),
        (0, 1, 2, 3, 4),
    )
    assert (card.scale.tokens, card.cost.peak_bytes, card.company) == (60, 2.0, ())
    assert card.cost.speed is not None
    assert card.cost.speed.high == 0.95
    write_card(tmp_path, card)
    assert read_cards("muon", [tmp_path]) == [card]


@pytest.mark.parametrize("pairs", [0, 1, 4])
def test_fewer_pairs_make_none_and_a_line_that_says_so(pairs: int) -> None:
    cards, why = cards_of(ablation([0.1] * pairs, **ABOUT))
    assert cards == []
    assert why == "no technique card for muon: one takes 5 pairs"


def test_runs_that_begin_with_trained_weights_make_none() -> None:
    cards, why = cards_of(ablation([0.1] * 5, **ABOUT, begins_with="runs/a@60"))
    assert (cards, why and why.partition(", and ")[2]) == ([], "runs that begin with new weights")


def test_a_commit_is_named_where_there_is_one() -> None:
    found = commit()
    assert found is None or re.fullmatch("[0-9a-f]{40,64}", found)


RECORD: dict[str, Any] = {
    "config": {part: {"a": {"value": 1}} for part in ("model", "train", "eval")},
    "plan": {
        "model": {"parameters": {"w": {"role": "head", "owner": "core", "shape": [3, 5]}}},
        "optimizer": {
            "rules": {
                "adamw": {"owner": "core", "stages": [{"anchor": "decay", "owner": "cautious"}]}
            }
        },
        "schedules": {"values": {"train.lr": {"owner": "core", "peak": 0.003}}},
    },
    "plan_hash": "0123456789abcdef",
    "plugins": [
        {
            "name": HOSTILE,
            "options": {HOSTILE: HOSTILE},
            "evidence": {"shown": True, "what": ["x"]},
        },
        {"name": "idle", "options": {}, "evidence": {"shown": False, "missing": ["node:a"]}},
        {"name": "later", "options": {}, "evidence": None},
    ],
    "exit": 0,
}


def step(n: int, **more: Any) -> dict[str, Any]:
    told = {"loss": 5.0 - 0.1 * n, "lr": 0.1, "tokens": 8 * n, "step_seconds": 0.5}
    speed = {"tokens_per_second": {"real": 16.0}, "peak_bytes": 2**30, "grad_norm": 1.0}
    return {"event": "step", "step": n, **told, **speed, "terms": {"balance": 1.0}, **more}


def folder(out: Path, *events: dict[str, Any], torn: str = "", **record: Any) -> Path:
    (out / "run.json").write_text(json.dumps({**RECORD, **record}))
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (out / "metrics.jsonl").write_text(lines + torn)
    return out


def test_a_run_that_was_killed_is_told_up_to_its_last_whole_line(tmp_path: Path) -> None:
    evaluated = {"event": "eval", "step": 2, "val_loss": 4.5, "bits_per_byte": 1.5}
    wrong = [step(4, step="4"), {**evaluated, "step": None}, {"event": "sample", "text": 5}]
    events = [step(1), step(2), evaluated, step(3), *wrong, {"event": ["step"]}, {"event": "new"}]
    out = folder(tmp_path, *events, torn='{"event": "st', exit=None)
    history = read_history(out)
    assert [one.step for one in history.steps] == [1, 2, 3]
    assert history.series("val_loss", "seconds", evaluations=True) == [(1.0, 4.5)]
    assert history.series("tokens_per_second.real", "step") == [(1, 16.0), (2, 16.0), (3, 16.0)]
    shown = harmless(run_page(history, None, "it was not asked for"))
    for part in (
        "4.5000 after step 2",
        "1.5000 bits",
        "still going on, or it was killed",
        "1 line cut short; 4 events that are not as minillm writes them",
    ):
        assert part in shown
    for part in ("nothing shows that it took part", "none yet", "3 × 5", "decay (cautious)"):
        assert part in shown
    assert "it was not asked for" in shown


def test_seconds_of_steps_that_are_not_written_are_counted(tmp_path: Path) -> None:
    history = read_history(folder(tmp_path, step(1), step(10), step(20)))
    assert [one.seconds for one in history.steps] == [0.5, 5.0, 10.0]


def test_a_branch_begins_in_the_middle(tmp_path: Path) -> None:
    history = read_history(folder(tmp_path, step(21), step(22)))
    assert [one.seconds for one in history.steps] == [0.5, 1.0]


def test_what_went_otherwise_is_told(tmp_path: Path) -> None:
    out = folder(
        tmp_path,
        step(1, loss=None),
        {"event": "guard", "step": 1, "loss": None, "grad_norm": None, "recent": 1},
        {"event": "rewind", "step": 3, "loss": 9.0, "to": 2, "skipped": 4},
        {"event": "unsaved", "step": 4, "reason": HOSTILE},
        {"event": "resume", "step": 4, "path": "checkpoints/step-00000004"},
        {"event": "end", "step": 4, "exit": 5, "seconds": 2.0},
        exit=5,
    )
    shown = harmless(run_page(read_history(out), HOSTILE, None))
    for part in ("the update was not made", "back to a checkpoint", "could not be written"):
        assert part in shown
    for part in (
        "Training became non-finite. Exit code 5",
        "checkpoints/step-00000004",
        "skipped 4",
    ):
        assert part in shown


def test_numbers_are_read_at_six_digits_and_versions_at_all_of_theirs(tmp_path: Path) -> None:
    planned = {
        **RECORD["plan"],
        "schedules": {"values": {"lr": {"owner": "core", "peak": 0.1 + 0.2, "at": [1 / 3]}}},
    }
    versions = {"minillm-core": "0.1.12345678", "torch": "2.13"}
    out = folder(tmp_path, step(1), plan=planned, versions=versions)
    shown = harmless(run_page(read_history(out), None, "why"))
    assert "peak 0.3, at [0.333333]" in shown
    assert "minillm-core 0.1.12345678" in shown


@pytest.mark.parametrize(
    ("backend", "device", "peaks", "said"),
    [
        ("torch", "cpu", [None, None], "not measured: torch does not count it on cpu"),
        ("mlx", "cpu", [2**30, 3 * 2**30, 2**31], "3.00 GiB, by mlx's own count"),
        ("torch", "cuda:0", [None, 2**31], "2.00 GiB, by torch's own count"),
    ],
)
def test_it_says_how_much_memory_was_held_or_that_nobody_knows(
    tmp_path: Path, backend: str, device: str, peaks: list[int | None], said: str
) -> None:
    steps = [step(n, peak_bytes=peak) for n, peak in enumerate(peaks, 1)]
    out = folder(tmp_path, *steps, binding={"backend": backend, "device": device})
    shown = harmless(run_page(read_history(out), None, "why"))
    assert f"peak memory{said}" in shown


def test_of_memory_nothing_is_said_before_the_first_step(tmp_path: Path) -> None:
    out = folder(tmp_path, binding={"backend": "torch", "device": "cpu"})
    assert "peak memory" not in harmless(run_page(read_history(out), None, "why")).lower()


def test_a_run_without_metrics_is_one_that_just_began(tmp_path: Path) -> None:
    folder(tmp_path, exit=None)
    (tmp_path / "metrics.jsonl").unlink()
    assert "No step is over yet" in harmless(run_page(read_history(tmp_path), None, "why"))


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 10)), min_size=1, max_size=200))
def test_thinned_points_reach_as_far_as_all(given_: list[tuple[float, float]]) -> None:
    found = thinned(given_, 20)
    assert len(found) <= 40
    assert set(found) <= set(given_)
    for pick in (min, max):
        assert pick(y for _, y in found) == pick(y for _, y in given_)
    smooth = smoothed(given_, 20)
    assert len(smooth) <= 20
    assert min(y for _, y in given_) - 1e-9 <= smooth[0][1] <= max(y for _, y in given_) + 1e-9


def test_a_folder_that_holds_neither_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refusal, match="holds neither a run nor an ablation") as refused:
        report(tmp_path, say=print)
    assert "minillm train, ablate or search" in str(refused.value)
    (tmp_path / "run.json").touch()
    with pytest.raises(Refusal, match="holds neither a run") as refused:
        report(Path(f"{tmp_path}@2"), say=print)
    assert str(refused.value.fix).endswith(f"minillm report {tmp_path}")
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    for nameless in (Path(), Path("/"), Path(".@2")):
        with pytest.raises(Refusal, match="holds neither a run"):
            report(nameless, say=print)


def test_plugins_that_make_no_sample_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two", "study"):
        (tmp_path / name).mkdir()
    folder(tmp_path / "one")
    folder(tmp_path / "two")
    (tmp_path / "study" / "ablation.json").write_text("{}")
    with pytest.raises(Refusal, match="not trained with a plugin 'muon'"):
        report(tmp_path / "one", plugins="muon", say=print)
    with pytest.raises(Refusal, match="this page generates none"):
        report(tmp_path / "study", plugins="muon", say=print)
    with pytest.raises(Refusal, match="this page generates none"):
        compare([tmp_path / "one", tmp_path / "two"], plugins="muon")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"plugins": 3}', "\x00"])
@pytest.mark.parametrize("name", ["run.json", "ablation.json"])
def test_what_is_not_understood_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Refusal) as refused:
        report(tmp_path, say=print)
    assert str(tmp_path / name) in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_report_lies_beside_what_it_tells(tmp_path: Path) -> None:
    said: list[str] = []
    path = report(folder(tmp_path, step(1)), say=said.append)
    assert path == tmp_path / "report.html"
    assert re.search("no sample: ", said[0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ablation.json").write_text(json.dumps(ablation([0.1, 0.2])))
    assert report(tmp_path / "other", say=print).name == "ablation.html"


def test_a_page_says_how_when_and_from_which_sources_a_run_was_made(tmp_path: Path) -> None:
    about = {
        "command": ["minillm", "train", "--data", "my text.txt"],
        "started": "2026-01-02T04:04:05.678+01:00",
        "ended": "2026-01-02T03:05:05+00:00",
        "seconds": 60.5,
        "git": {"commit": "0123456789abcdef", "dirty": True},
    }
    shown = harmless(run_page(read_history(folder(tmp_path, step(1), **about)), None, "why"))
    for part in (
        "commandminillm train --data 'my text.txt'",
        "started2026-01-02 03:04:05 UTC",
        "ended2026-01-02 03:05:05 UTC",
        "took60.5 seconds",
        "git0123456789ab, with uncommitted changes",
    ):
        assert part in shown


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"command": None, "started": None, "ended": None, "seconds": None, "git": None},
        {"command": "x", "started": 3, "ended": [], "seconds": "x", "git": {"commit": None}},
    ],
)
def test_an_older_run_says_nothing_of_it(tmp_path: Path, about: dict[str, Any]) -> None:
    page = run_page(read_history(folder(tmp_path, step(1), **about)), None, "why")
    for heading in ("command", "started", "ended", "took", "git"):
        assert f"<dt>{heading}</dt>" not in page


def sample(n: int, prompt: str, text: str) -> dict[str, Any]:
    return {"event": "sample", "step": n, "prompt": prompt, "text": text}


def test_the_samples_of_the_newest_step_are_shown_and_the_others_folded(tmp_path: Path) -> None:
    samples = [sample(2, "def", " early"), sample(4, "def", " late()"), sample(4, "", HOSTILE)]
    page = run_page(read_history(folder(tmp_path, step(1), *samples)), None, None)
    shown = harmless(page)
    assert "def late()" in shown
    assert "There is none" not in shown
    assert page.index("late()") < page.index("1 earlier sample") < page.index(" early")
    assert "<b>def</b>" in page


def test_what_judges_found_is_shown_the_newest_of_each(tmp_path: Path) -> None:
    events = [
        {"event": "judged", "step": at, "judge": judge, "figures": figures}
        for at, judge, figures in (
            (1, "chats", {"answer_loss": 2.5, "chats": 1000}),
            (2, "chats", {"answer_loss": 1.23456, "chats": 1000}),
            (2, "tasks", {"arc_easy": {"acc": 0.25, HOSTILE: 1.0}}),
            (2, "tasks", "no figures"),
        )
    ]
    page = run_page(read_history(folder(tmp_path, step(1), *events)), None, None)
    assert "Judged" in page
    assert ("1.235" in page, "1,000" in page, "2.5<" in page) == (True, True, False)
    assert ("arc_easy, acc" in page, "0.25" in page) == (True, True)
    assert HOSTILE not in page
    assert "Judged" not in run_page(read_history(folder(tmp_path, step(1))), None, None)


def test_recorded_samples_are_shown_instead_of_a_new_one(tmp_path: Path) -> None:
    said: list[str] = []
    out = folder(tmp_path, step(1), sample(1, "def", " main"))
    page = report(out, say=said.append).read_text(encoding="utf-8")
    assert said == []
    assert 'class="sample"' in page
    bare = report(out, sample=False, say=said.append).read_text(encoding="utf-8")
    assert 'class="sample"' not in bare


def test_evaluations_on_the_way_and_their_size_are_shown(tmp_path: Path) -> None:
    evaluations = [
        {"event": "eval", "step": n, "val_loss": 5.0 - n, "bits_per_byte": None, "tokens": count}
        for n, count in ((0, 100), (1, 100), (2, 800))
    ]
    events = [evaluations[0], step(1), evaluations[1], step(2), evaluations[2]]
    page = run_page(read_history(folder(tmp_path, *events)), None, "why")
    assert "100 predictions on the way, 800 predictions at the end" in harmless(page)
    whole = page.split("<h3>The whole run</h3>")[1].split("</svg>")[0]
    for loss, tokens in ((5, 0), (4, 8), (3, 16)):
        assert f"<title>held-out text: {loss} at {tokens}</title>" in whole


def test_a_smoothed_line_never_ends_on_one_raw_step() -> None:
    for count in range(10, 400, 7):
        points = [(float(n), 1.0) for n in range(count - 1)] + [(float(count - 1), 100.0)]
        smooth = smoothed(points)
        assert smooth[-1][1] <= 1.0 + 99.0 / 5
        assert len(smooth) <= 24


def test_a_table_that_goes_on_to_the_side_casts_a_shadow(tmp_path: Path) -> None:
    page = run_page(read_history(folder(tmp_path, step(1))), None, "why")
    rule = page.split(".scroll {")[1].split("}")[0]
    assert "local" in rule
    assert "linear-gradient" in rule
    assert 'class="scroll"' in page


def test_of_torch_on_a_cpu_the_peak_is_the_process_s(tmp_path: Path) -> None:
    bound = {"backend": "torch", "device": "cpu"}
    out = folder(tmp_path, step(1, peak_bytes=2**30), binding=bound)
    assert "peak memory1.00 GiB, of the whole process" in harmless(
        run_page(read_history(out), None, "why")
    )


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    outs = []
    for number, (name, lr) in enumerate((("a", 0.1), ("b" + HOSTILE[:9].replace("/", ""), 0.2))):
        (tmp_path / name).mkdir()
        evaluated = {"event": "eval", "step": 1, "val_loss": 4.5 - number, "bits_per_byte": None}
        config = {**RECORD["config"], "train": {"lr": {"value": lr}, "rows": {"value": 8}}}
        data = {"description": "a text"}
        outs.append(folder(tmp_path / name, step(1), evaluated, config=config, data=data))
    path = compare(outs)
    assert path == tmp_path / "a" / "comparison.html"
    shown = harmless(path.read_text(encoding="utf-8"))
    for part in ("2 runs", "train.lr0.10.2", "4.5000", "3.5000", "held-out loss, nats a token"):
        assert part in shown
    assert "train.rows" not in shown
    assert "not comparable" not in shown
    folder(outs[1], step(1), data={"description": "another text"})
    assert "not comparable" in compare(outs).read_text(encoding="utf-8")

    def warnings(rate: float | None, *records: dict[str, Any]) -> list[bool]:
        evaluated = {"event": "eval", "step": 1, "val_loss": 4.5, "bits_per_byte": rate}
        for out, record in zip(outs, records, strict=True):
            folder(out, step(1), evaluated, **record)
        page = compare(outs).read_text(encoding="utf-8")
        return [f"The runs have other {what}" in page for what in ("data", "tokenizers")]

    def text(fingerprint: str, tokens: str, where: str, sha: str, **data: Any) -> dict[str, Any]:
        described = {
            "fingerprint": fingerprint,
            "description": f"1 file ({tokens} tokens) from {where}",
        }
        plan = {**RECORD["plan"], "data": data}
        return {"data": described, "tokenizer": {"sha256": sha}, "plan": plan}

    first = text("aa", "1,000", "a/", "x")
    assert warnings(1.5, first, text("aa", "1,000", "b/", "x")) == [
        False,
        False,
    ]  # in another folder
    assert warnings(1.5, first, text("bb", "1,000", "a/", "x")) == [True, False]  # of equal length
    assert warnings(1.5, first, text("bb", "900", "a/", "y")) == [
        False,
        False,
    ]  # another vocabulary
    assert warnings(None, first, text("bb", "900", "a/", "y")) == [False, True]
    assert warnings(1.5, first, text("bb", "900", "b/", "y")) == [True, False]
    ordered = text("bb", "1,000", "a/", "x", order="by a plugin")
    assert warnings(1.5, first, ordered) == [False, False]
    with pytest.raises(Refusal, match="holds no run"):
        compare([outs[0], tmp_path])
    with pytest.raises(Refusal, match="compared with itself"):
        compare([outs[0], outs[0] / "."])
