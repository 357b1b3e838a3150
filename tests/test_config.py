"""Tests of runner/config.py: types, unknown keys and targets are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from runner.config import build, nearest, part_class
from runner.contracts import UserError
from runner.optimizer import AdamW

ADAMW = {"_target_": "runner.optimizer.AdamW", "lr": 1e-3}


def fault_of(**changes: object):  # type: ignore
    with pytest.raises(UserError) as caught:
        build({**ADAMW, **changes}, key="optimizer")
    (fault,) = caught.value.faults
    return fault


def test_a_node_becomes_the_part_it_names() -> None:
    part = build({**ADAMW, "betas": [0.5, 0.9]}, key="optimizer")
    assert part == AdamW(lr=1e-3, betas=(0.5, 0.9))


@pytest.mark.parametrize("text", ["1e-4", "1E-4", 0.0001])
def test_scientific_notation_is_a_number_even_as_text(text: object) -> None:
    assert build({**ADAMW, "lr": text}, key="optimizer").lr == 0.0001


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("lr", "fast", "float"),
        ("lr", True, "float"),
        ("lr", None, "float"),
        ("betas", [0.9, 0.9, 0.9], "tuple[float, float]"),
        ("betas", ["x", 0.9], "tuple[float, float]"),
        ("lr", -1.0, "a positive number"),
        ("implementation", "quick", "fused, foreach, plain, compiled"),
    ],
)
def test_a_wrong_value_names_its_full_key_and_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    fault = fault_of(**{name: value})
    assert fault.key == f"optimizer.{name}"
    assert fault.allowed == allowed
    assert fault.given in (repr(value), str(value))


def test_an_unknown_key_names_the_nearest() -> None:
    fault = fault_of(lrr=1)
    assert fault.key == "optimizer.lrr"
    assert fault.allowed.startswith("lr (nearest), of betas, eps")


def test_a_missing_value_is_named() -> None:
    with pytest.raises(UserError, match="lr: given nothing"):
        build({"_target_": "runner.optimizer.AdamW"}, key="optimizer")


def test_all_faults_of_a_part_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        build({**ADAMW, "lr": "x", "eps": "y", "zz": 1}, key="optimizer")
    keys = {fault.key for fault in caught.value.faults}
    assert keys == {"optimizer.lr", "optimizer.eps", "optimizer.zz"}


def test_a_nested_policy_is_typed_too() -> None:
    node = {"_target_": "runner.precision.autocast.Autocast", "dtype": "float16"}
    assert build({**node, "scaling": {"init": 8}}, key="precision").scaling.init == 8.0
    with pytest.raises(UserError, match=r"precision\.scaling\.growht.*growth \(nearest\)"):
        build({**node, "scaling": {"growht": 2}}, key="precision")


@pytest.mark.parametrize(
    "target", ["os.system", "subprocess.Popen", "runner.optimizer.nothing", "AdamW", "runner.step"]
)
def test_targets_outside_the_allowed_packages_or_not_dataclasses_are_refused(target: str) -> None:
    with pytest.raises(UserError, match="_target_: given"):
        build({"_target_": target}, key="optimizer")


def test_a_package_of_the_user_s_own_is_allowed_by_name() -> None:
    target = f"{__name__}.Own"
    with pytest.raises(UserError):
        part_class(target, key="model")
    assert part_class(target, key="model", allow=[__name__.split(".")[0]]) is Own


@dataclass(frozen=True, kw_only=True)
class Own:
    """A part of a user's package."""

    kind: ClassVar[str] = "own"
    names: list[str] = field(default_factory=list)


@pytest.mark.parametrize("node", [None, {}, 3, {"lr": 1}])
def test_a_node_without_a_target_is_refused_with_the_group_s_name(node: object) -> None:
    with pytest.raises(UserError, match="memory/loss=NAME"):
        build(node, key="memory.loss")  # type: ignore


def test_many_allowed_words_are_shortened_to_the_close_ones() -> None:
    words = [f"key{n}" for n in range(50)] + ["accum"]
    assert nearest("acum", words).startswith("accum (51 in all")
    assert nearest("qqqq", words).startswith("none that is close (51 in all")
    assert nearest("b", ["c", "a"]) == "a, c"
