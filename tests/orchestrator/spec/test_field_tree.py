"""What follows from each field of a spec is annotated at the field, and read from there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from tests.conftest import ROOT
from tests.fakes import fake_spec
from troupe.orchestrator.rollouts.kept_samples import fingerprint
from troupe.orchestrator.spec.derived.digests import evaluation_digest, reward_digest
from troupe.orchestrator.spec.errors import models_in
from troupe.orchestrator.spec.field_tree import FieldNode, decisive, field_tree
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import (
    DataSource,
    ExampleSource,
    HeldOutSource,
    MixedExampleSource,
    MixedSource,
    NamedTextSource,
    TextSource,
)
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import (
    COUNTED,
    EVALUATED,
    EVALUATED_IF_SET,
    LIVE,
    NONE,
    SAMPLED,
    Consequences,
    Counts,
    noted,
    refused,
)
from troupe.workers.contract.reward_config import RewardFunctionConfig

SAID = ("resume", "evaluation", "reward", "samples")
"""Consequences that a field, or a section around it, must name."""


def leaves(node: FieldNode, path: str = "") -> Iterator[tuple[str, Consequences]]:
    """(dotted path, consequences) of every field that is no section."""
    for name, below in node.children.items():
        place = f"{path}.{name}" if path else name
        yield from leaves(below, place) if below.children else [(place, below.consequences)]


def unsaid(model: type[BaseModel]) -> list[str]:
    """The fields of a spec without an annotation, with what it would have to say."""
    return [
        f"{path}: {', '.join(missing)}"
        for path, found in leaves(field_tree(model))
        if (missing := [name for name in SAID if getattr(found, name) is None])
    ]


class Function(RewardFunctionConfig):
    """A reward function with a new field."""

    retries: int = 0


class Part(Frozen):
    """Two fields, one of which counts."""

    name: Annotated[str, COUNTED, noted("a note")] = "x"
    size: Annotated[int, EVALUATED_IF_SET] = 3
    rest: int = 0


class OwnPart(Part):
    """A subclass with its own default for what it adds."""

    consequences = SAMPLED
    extra: int = 0


class Whole(Frozen):
    """Sections in every form that specs have."""

    one: Annotated[Part, NONE, EVALUATED, refused("no"), Consequences(of={"rest": LIVE})] = Part()
    none: Annotated[OwnPart | None, NONE, Consequences(itself=refused("not at all").resume)] = None
    many: Annotated[tuple[Part, ...], NONE, EVALUATED_IF_SET] = ()
    named: Annotated[dict[str, Part], NONE, EVALUATED] = Field(default_factory=dict)
    listed: Annotated[tuple[Part, ...], NONE, EVALUATED] = ()
    free: Annotated[dict[str, Any], NONE, EVALUATED] = Field(default_factory=dict)


@pytest.mark.parametrize("model", [RolloutSpec, OfflineSpec])
def test_every_field_of_a_spec_says_what_follows_from_it(model: type[BaseModel]) -> None:
    assert unsaid(model) == []


def test_a_field_without_an_annotation_is_named() -> None:
    class Rewards(Frozen):
        functions: Annotated[tuple[Function, ...], refused("why"), SAMPLED] = ()

    assert unsaid(Rewards) == ["functions.*.retries: evaluation, reward"]
    assert unsaid(Part) == [
        "name: samples",
        "size: resume, reward, samples",
        "rest: resume, evaluation, reward, samples",
    ]


@pytest.mark.parametrize(
    "source", [DataSource, MixedSource, HeldOutSource, TextSource, NamedTextSource, ExampleSource, MixedExampleSource]
)
def test_the_kinds_of_a_source_agree_on_the_fields_that_they_share(source: Any) -> None:
    kinds = [field_tree(model).children for model in models_in(source)]
    for one, other in combinations(kinds, 2):
        assert all(one[name].consequences == other[name].consequences for name in one.keys() & other.keys())


def test_a_field_says_more_than_the_section_around_it() -> None:
    tree = field_tree(Whole)
    assert tree.resume("one.name").note == "a note" and tree.resume("one.size").refused == "no"
    assert tree.at("one.rest").consequences.live and not tree.at("none.rest").consequences.live
    assert tree.at("none.extra").consequences.samples and not tree.at("none.rest").consequences.samples
    assert tree.resume("none").refused == "not at all" and tree.resume("none.rest").refused == ""
    assert tree.at("free.a.b") is tree.at("free") is tree.at("free.name")
    assert tree.at("named.name.size") is tree.at("named.x.size")


def test_a_field_counts_at_most_as_much_as_its_section() -> None:
    tree = field_tree(Whole)
    counts = {path: found.evaluation for path, found in leaves(tree)}
    assert (counts["one.name"], counts["one.size"], counts["one.rest"]) == (Counts.YES, Counts.IF_SET, Counts.YES)
    assert (counts["none.name"], counts["none.size"], counts["none.rest"]) == (Counts.NO, Counts.NO, Counts.NO)
    assert (counts["many.*.name"], counts["many.*.rest"]) == (Counts.IF_SET, None)


def test_a_digest_has_the_fields_that_count() -> None:
    whole = Whole(named={"name": Part(size=4)}, free={"name": {"size": 1}})
    assert field_tree(Whole).counted(whole, "evaluation", Counts.YES) == {
        "one": {"name": "x", "rest": 0},
        "listed": [],
        "named": {"name": {"name": "x", "rest": 0}},
        "free": {"name": {"size": 1}},
    }
    assert field_tree(Whole).counted(whole, "evaluation", Counts.IF_SET) == {"named": {"name": {"size": 4}}}


def test_a_new_field_at_its_default_leaves_digests_as_they_were() -> None:
    """Also in lists and maps of sections, and beside fields that always count."""
    whole = Whole(listed=(Part(), Part()), named={"a": Part()})
    assert field_tree(Whole).counted(whole, "evaluation", Counts.IF_SET) == {}
    part = {"name": "x", "rest": 0}
    assert decisive(whole, "evaluation") == {"one": part, "listed": [part, part], "named": {"a": part}, "free": {}}
    other = whole.model_copy(update={"one": Part(size=4), "listed": (Part(), Part(size=5))})
    assert decisive(other, "evaluation")["one"] == part | {"size": 4}
    assert decisive(other, "evaluation")["listed"] == [part, part | {"size": 5}]


def test_a_section_that_counts_where_it_is_set_counts_with_defaults_too() -> None:
    whole = Whole(many=(Part(), Part(name="y")))
    assert field_tree(Whole).counted(whole, "evaluation", Counts.IF_SET) == {"many": [{}, {"name": "y"}]}


def test_consequences_of_a_field_that_is_not_there_are_an_error() -> None:
    class Wrong(Frozen):
        part: Annotated[Part, NONE, Consequences(of={"sice": LIVE})] = Part()

    with pytest.raises(ValueError, match=r"consequences of sice: no such field in Part"):
        field_tree(Wrong)


@pytest.mark.parametrize(
    ("name", "digests"),
    [
        ("tiny-ppo", ("b56fcfba30c3f37b", "e8441ac0a725fbce", "0a2bc11d84416fa1")),
        ("tiny-environment", ("23603e32088c0657", "6943523d50827294", "6924d26fd6a45ccc")),
        ("tiny-mixture", ("60058c0049b94310", "4e8d561c0f110f87", "6afa319a4d92a38e")),
        ("tiny-dpo", ("19fdbd1680159618", "")),
    ],
)
def test_digests_are_those_of_runs_made_before(name: str, digests: tuple[str, ...]) -> None:
    """With others a resumed run would forget its best steps, and sample again what a checkpoint holds."""
    spec = plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml"))[0].spec
    found = [evaluation_digest(spec), reward_digest(spec)]
    found += [] if spec.rollouts is None else [fingerprint(spec.rollouts)]
    assert tuple(digest[:16] for digest in found) == digests


def test_what_may_change_while_a_run_is_active_is_in_roles_that_scale() -> None:
    live = {path for path, found in leaves(field_tree(RolloutSpec)) if found.live}
    assert {path.rpartition(".")[2] for path in live} == {"workers", "min_workers", "max_workers"}
    assert set(fake_spec().roles.scaled()) <= {path.split(".")[1] for path in live}
