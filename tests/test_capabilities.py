"""Optional members of plug-ins: what a stranger's part says counts, and a default stands for the rest."""

import pytest

from agents import base as agents
from environments.base import Capabilities, Properties, can_demonstrate, max_concurrent_episodes, properties_of
from rewards import base as rewards
from rlhf.capabilities import Capability, CapabilityView


class Bare:
    """Says nothing of itself."""


class Spoken:
    """Says something of everything."""

    properties = Properties(thread_safe=True)
    inline, keeps_limits, demonstrates, max_episodes, max_steps = True, True, False, 3, 7

    def plan(self, task, taken):
        return ["go"]

    def fingerprint(self):
        return "abc"


class Odd:
    """Says things of other types than meant."""

    properties, inline, keeps_limits, demonstrates, max_episodes, max_steps = {}, 1, "yes", 0, "3", None
    plan, close = ["go"], None


@pytest.mark.parametrize("part", [Bare(), Odd(), None], ids=["nothing", "other types", "no part"])
def test_an_environment_that_declares_nothing_of_use_has_the_defaults(part):
    own = Capabilities(part)
    assert (own.inline, own.is_inline, own.keeps_limits, own.demonstrates) == (False, False, False, True)
    assert (own.max_episodes, own.max_steps, own.plan, own.recall, own.fingerprint) == (None,) * 5
    assert own.close() is None and properties_of(part) == Properties() and max_concurrent_episodes(part) is None


def test_an_environment_need_not_inherit_to_declare():
    part = Spoken()
    own = Capabilities(part)
    assert own.inline and own.is_inline and own.keeps_limits and (own.max_episodes, own.max_steps) == (3, 7)
    assert own.fingerprint is not None and own.fingerprint() == "abc" and properties_of(part).thread_safe
    assert own.plan is not None and not can_demonstrate(part)


def test_a_capability_is_read_when_it_is_asked_for_and_each_time():
    class Counting:
        n = 0

        @property
        def size(self):
            self.n += 1
            return self.n

    class Sizes(CapabilityView):
        size = Capability(0, int)
        other = Capability(5, int)

    part = Counting()
    own = Sizes(part)
    assert part.n == 0 and own.other == 5 and (own.size, own.size) == (1, 2)


def test_what_a_capability_raises_is_not_hidden():
    class Broken:
        @property
        def max_steps(self):
            raise OSError("no such level")

    with pytest.raises(OSError, match="no such level"):
        Capabilities(Broken()).max_steps  # noqa: B018


def test_a_plain_function_is_a_reward_with_all_defaults():
    def right(answer: str, reference: str) -> float:
        return 1.0

    own = rewards.Capabilities(right)
    assert (own.inline, own.over_group, own.examples, own.slow_s) == (False, None, (), 1.0)
    assert own.check_policy("any tokenizer") is None
    right.inline = True
    assert own.inline
    assert [rewards.name_of(one) for one in (right, Bare, Bare(), len)] == ["right", "Bare", "Bare", "len"]


def test_an_agent_need_not_say_what_it_needs():
    own = agents.Capabilities(Bare())
    assert (tuple(own.needs), tuple(own.roles), own.needs_tools, own.write) == ((), (), False, None)
