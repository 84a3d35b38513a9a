"""Tests of supported requests, of the reasons for others, and of errors before a run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minillm_core import BackendError, LossForm, Plugin, PluginError, SigmoidCap, TanhCap, install
from minillm_core.backends.bind import bind, kernel_preflight
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, Request
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_liger.liger import Liger

CUDA = Detected("torch", "cuda", "a test")
INSTALLED = {"liger-kernel": "0.8.5"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake an installation of the newest supported liger-kernel."""
    real = install.installed_version
    monkeypatch.setattr(
        install, "installed_version", lambda name: INSTALLED.get(name) or real(name)
    )


def planned(*more: Plugin, kernels: str = "auto", compile: str = "auto", **options: Any) -> Plan:
    config = load(
        preset="tiny",
        assignments=[f"train.compile={compile}"],
        flags={"--kernels": kernels},
        default_preset=lambda: ("tiny", "test"),
    ).config
    named = [("liger", Liger(**options)), *((type(p).__name__.lower(), p) for p in more)]
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def offers(**options: Any) -> dict[str, Candidate]:
    return {candidate.op: candidate for _, candidate in planned(**options).candidates}


def asked(op: str = "linear_cross_entropy", **changes: Any) -> Request:
    facts = {"targets": 1, "form": LossForm(), "weights": None, **changes.pop("facts", {})}
    known = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", "compiled": True}
    return Request(op, **{**known, **changes}, facts=facts)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"form": LossForm(cap=TanhCap(15.0), scale=0.5, smoothing=0.1, z=1e-4)},
        {"weights": "target"},
        {"weights": "position"},
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_loss_is_served(facts: dict[str, Any], compiled: bool) -> None:
    assert offers()["linear_cross_entropy"].refusal(asked(compiled=compiled, facts=facts)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"facts": {"form": LossForm(cap=SigmoidCap(23.0, 5.0, 7.5))}},
            "by a tanh, not by Sigmoid",
        ),
        ({"facts": {"targets": 3}}, "one target, not 3"),
        ({"dtype": "float16"}, "float16"),
        ({"device": "cpu"}, "serves cuda, not cpu"),
        ({"device": "mps"}, "serves cuda, not mps"),
        ({"backend": "mlx", "device": "metal"}, "serves torch, not mlx"),
    ],
)
def test_what_the_loss_does_not_serve_has_a_reason(changes: dict[str, Any], said: str) -> None:
    assert said in (offers()["linear_cross_entropy"].refusal(asked(**changes)) or "")


@pytest.mark.parametrize("op", ["rms_norm", "rotate", "swiglu"])
def test_small_ops_are_for_eager_mode(op: str) -> None:
    kernel = offers()[op]
    assert "fuses" in (kernel.refusal(asked(op)) or "")
    assert kernel.refusal(asked(op, compiled=False)) is None


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.8.4", "here is 0.8.4"), ("0.9.0", "here is 0.9.0"), (None, "it is not installed")],
)
def test_another_liger_or_none_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    monkeypatch.setattr(install, "installed_version", lambda name: version)
    for candidate in offers().values():
        reason = candidate.refusal(asked(candidate.op, compiled=False)) or ""
        assert said in reason
        assert "liger-kernel" in reason


class Asymmetric(Plugin, api=1):
    """The records' softcap."""

    def compute_loss(self, loss: Any) -> None:
        loss.logits(cap=SigmoidCap(23.0, 5.0, 7.5))


class Ahead(Plugin, api=1):
    """Adds a second target."""

    def compute_loss(self, loss: Any) -> None:
        loss.target(0.5, offset=2)


def test_a_compiled_run_takes_the_loss_and_hears_of_the_rest() -> None:
    binding, _ = bind(CUDA, planned())
    chosen = {choice.op: choice.kernel for choice in binding.kernels}
    assert {op for op, kernel in chosen.items() if kernel == "liger"} == {"linear_cross_entropy"}
    told = [note for note in binding.notes if "plugin liger does not serve" in note]
    assert [note.split()[1] for note in told] == [
        f"{op}=liger" for op in ("rms_norm", "rotate", "swiglu")
    ]


def test_an_eager_run_takes_all_four() -> None:
    binding, _ = bind(CUDA, planned(compile="off"))
    assert sum(choice.kernel == "liger" for choice in binding.kernels) == 4


@pytest.mark.parametrize("plugin", [Asymmetric(), Ahead()])
def test_a_loss_that_it_cannot_serve_is_refused_while_planning(plugin: Plugin) -> None:
    for refuse in (kernel_preflight, lambda plan: bind(CUDA, plan)):
        with pytest.raises(BackendError, match="'liger' must serve linear_cross") as refused:
            refuse(planned(plugin, compile="off"))
        assert "liger.loss=false leaves the op to 'chunked'" in (refused.value.fix or "")
        with pytest.raises(BackendError, match="'liger' must serve linear_cross") as refused:
            refuse(planned(plugin))  # no option makes its other kernels serve
        assert (refused.value.fix or "").startswith(
            "leave the plugin out: 'chunked' serves instead"
        )
    kernel_preflight(planned(plugin, loss=False, compile="off"), CUDA)
    plan = planned(plugin, loss="auto", compile="off")
    kernel_preflight(plan)
    (note,) = (note for note in bind(CUDA, plan)[0].notes if "linear_cross_entropy=liger" in note)
    assert "tanh" in note or "one target" in note


def test_what_is_switched_off_is_not_offered() -> None:
    assert set(offers(loss=False, rope=False)) == {"rms_norm", "swiglu"}


@pytest.mark.parametrize("option", ["rms_norm", "rope", "swiglu"])
def test_what_is_insisted_on_is_refused_in_a_compiled_step(option: str) -> None:
    wanted: dict[str, Any] = {option: True}
    with pytest.raises(BackendError, match="fuses") as refused:
        kernel_preflight(planned(**wanted))
    assert f"liger.{option}=false" in (refused.value.fix or "")
    kernel_preflight(planned(compile="off", **wanted))


def test_a_plugin_without_a_use_is_refused() -> None:
    with pytest.raises(BackendError, match="none of the kernels that plugin 'liger' brings can"):
        bind(CUDA, planned(loss=False))
    for kernels in ("reference", "linear_cross_entropy=chunked"):
        with pytest.raises(BackendError, match="plugin 'liger' brings serves") as refused:
            bind(CUDA, planned(kernels=kernels))
        assert "--kernels linear_cross_entropy=liger" in (refused.value.fix or "")


def test_the_command_line_has_the_last_word() -> None:
    binding, _ = bind(CUDA, planned(kernels="linear_cross_entropy=chunked", compile="off"))
    assert {c.op: c.kernel for c in binding.kernels}["linear_cross_entropy"] == "chunked"
    (note,) = (note for note in binding.notes if "linear_cross_entropy=liger" in note)
    assert note.endswith("chunked does, named by --kernels")
    named, _ = bind(CUDA, planned(kernels="swiglu=liger", compile="off"))
    assert {c.op: c.reason for c in named.kernels}["swiglu"] == "named by --kernels"
    plain, _ = bind(CUDA, planned(kernels="reference,linear_cross_entropy=liger"))
    assert {c.op: c.kernel for c in plain.kernels}["rms_norm"] == "composed"
    with pytest.raises(BackendError, match="the compiled step fuses"):
        bind(CUDA, planned(kernels="swiglu=liger"))


@pytest.mark.parametrize("compile", ["on", "off"])
def test_strict_asks_of_a_step_what_is_best_for_it(compile: str) -> None:
    """All four in eager mode; compiled only the loss, as the others are faster when fused."""
    binding, _ = bind(CUDA, planned(kernels="strict", compile=compile))
    served = {choice.op for choice in binding.kernels if choice.kernel == "liger"}
    everything = {"linear_cross_entropy", "rms_norm", "rotate", "swiglu"}
    assert served == ({"linear_cross_entropy"} if compile == "on" else everything)
    assert {choice.reason for choice in binding.kernels} == {"preferred"}


def test_strict_refuses_to_pass_the_loss_and_says_the_way_out() -> None:
    plan = planned(Ahead(), loss="auto", compile="off", kernels="strict")
    with pytest.raises(BackendError, match="'liger' cannot serve linear_cross_entropy") as refused:
        bind(CUDA, plan)
    way_out = "strict,linear_cross_entropy=chunked"
    assert f"--kernels {way_out} " in (refused.value.fix or "")
    binding, _ = bind(CUDA, planned(Ahead(), loss="auto", compile="off", kernels=way_out))
    assert {c.op: c.kernel for c in binding.kernels}["linear_cross_entropy"] == "chunked"


@pytest.mark.parametrize(("backend", "device"), [("mlx", "gpu"), ("torch", "cpu")])
def test_elsewhere_the_plugin_is_refused(backend: str, device: str) -> None:
    with pytest.raises(PluginError, match="'liger' does not run on"):
        check_support([LoadedPlugin.of("liger", Liger())], backend, device)


def test_candidates_name_functions_with_the_signatures_of_their_ops(kernels: Any) -> None:
    for op, candidate in offers().items():
        module, _, function = candidate.reference.rpartition(".")[2].partition(":")
        wanted = CONTRACTS[op].signature.parameters
        code = getattr(kernels(module), function).__code__
        assert code.co_varnames[: code.co_argcount] == tuple(wanted)


def test_planning_imports_neither_liger_nor_torch() -> None:
    script = (
        "import sys; from minillm_liger.liger import Liger; Liger();"
        "print([m for m in ('torch', 'triton', 'liger_kernel') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
