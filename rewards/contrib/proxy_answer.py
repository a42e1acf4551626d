"""A reward for long answers: whether a model that reads nothing else answers the question rightly."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.extract import tagged
from rewards.answers.qa import exact
from rewards.answers.text import everything_said, reference_of
from rewards.judges.asking import Asker, AsksModel, asked, marked
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RewardError
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProxyAnswer(AsksModel):
    """1 if a model answers the task's question rightly from the attempt's long answer alone, else 0.

    The long answer stands where the task's text stood, so that it has to say what the text says: nothing that the
    question needs may be left out or made up. Beside a reward for the attempt's own short answer (`qa`) and one for the
    form (`format`), it teaches long answers by questions that are easy to check. What was said is fenced, as for
    `grade`; an attempt without a long answer is worth 0, and the model is not asked.

    Source: CANOE's Dual-GRPO, arXiv 2505.16483, whose model is the policy itself; here `path` takes a checkpoint.
    """

    needs_reference: ClassVar[bool] = True

    tag: Annotated[str, Field(pattern=r"^[a-zA-Z_][\w-]*$")] = "long_answer"
    """Tag in which the long answer stands."""
    question: Annotated[str, Field(min_length=1)] = "asked"
    """Name of the question, without the text that it is about, in `Task.info`, or of a column."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one attempt. Raises RewardError where the task has no question, or the model does not answer."""
        reference, about = reference_of(task, "proxy_answer"), self._about(task)
        said = everything_said(trajectory)
        answer = tagged(said, self.tag)
        if answer is None:
            return Verdict(0.0, why=f"no <{self.tag}>")
        wanted = (
            f"{about}\n\nAnswer from the text above and from nothing else. End with one line, VERDICT {{mark}}: and "
        )
        question = asked([("Text", answer[: self.max_chars])], f"{wanted}the answer in a few words.")

        async def call(asker: Asker) -> str:
            return await asker.verdict(question, lambda reply: marked(reply, question.mark, r"[^\n]*?"))

        [found] = await self.all_of([call])
        return Verdict(float(exact(found, reference)), why=f"from the long answer: {found[:60]!r}")

    def _about(self, task: Task) -> str:
        found = task.info.get(self.question, task.info.get("columns", {}).get(self.question))
        if not isinstance(found, str) or not found:
            raise RewardError(
                "the task has no question",
                where="proxy_answer",
                got=f"{task.id} with {self.question}: {found!r}",
                expected=f"a text in Task.info[{self.question!r}], or in a column {self.question} of the data set",
                hint="name the column with `question`",
            )
        return found
