"""Every name a recipe may use, and how a name becomes a class.

A recipe says `kind:` wherever a part can be chosen. A kind is

- a name of the table below,
- `package.module:Name`, anything importable from where `rlhf` is started or from beside the recipe, or
- `./file.py:Name`, looked for beside the recipe, then in the current folder.

A recipe therefore runs Python that it names: read a stranger's recipe before you run it.

To add a part of our own: write its file and its test, and add one line here. Nothing is imported before it is used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import MissingPackageError, RecipeError, boundary, nearest


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue.

    Attributes:
        target: `module:Class`, imported on first use.
        doc: one line for `rlhf recipes --kinds` and error messages.
        extra: name of the optional dependency group it needs.
    """

    target: str
    doc: str
    extra: str | None = None


CATALOG: Mapping[str, Mapping[str, Entry]] = {
    "policy": {
        "from_scratch": Entry("rlhf.trainers.policy:FromScratch", "a small model and tokenizer made on the spot"),
        "pretrained": Entry("rlhf.trainers.policy:Pretrained", "any Hugging Face causal LM, by folder or hub name"),
    },
    "environment": {
        "textworld_express": Entry(
            "environments.textworld_express:TextWorldExpress", "eight text games in one Java process", extra="twx"
        ),
        "babyai": Entry("environments.babyai:BabyAI", "BabyAI grid worlds told in words", extra="babyai"),
        "keyhole": Entry("environments.keyhole:Keyhole", "find the key, open the door, in houses drawn by seed"),
        "graded": Entry("environments.graded:Graded", "several environments as the levels of one"),
    },
    "agent": {
        "chat": Entry("agents.chat:ChatAgent", "one message per observation, one action per reply"),
    },
    "reward": {
        "outcome": Entry("rewards.outcome:Outcome", "1 if the environment calls the episode solved, else 0"),
        "environment": Entry("rewards.outcome:EnvironmentReward", "the environment's own rewards, turn by turn"),
        "invalid_action": Entry("rewards.penalties:InvalidActionPenalty", "minus a set amount per invalid action"),
        "turn_cost": Entry("rewards.penalties:TurnCost", "minus a set amount per turn"),
        "overlong": Entry("rewards.penalties:Overlong", "falls to -1 towards a number of sampled tokens"),
        "exact_match": Entry("rewards.exact:ExactMatch", "1 if the last action equals the task's reference"),
        "unit_tests": Entry("rewards.unit_tests:UnitTests", "the share of a task's tests that a program passes"),
        "subtask": Entry("rewards.subtasks:Subtask", "F-score of the files, functions, lines or edits named"),
        "reward_model": Entry("rewards.reward_model:RewardModelScore", "what a model trained on pairs says"),
        "majority": Entry("rewards.majority:Majority", "1 if the answer is the commonest of the group's; no labels"),
        "math": Entry("rewards.maths:Maths", "1 if the answer equals the reference as mathematics", extra="rewards"),
        "numeric": Entry("rewards.numeric:Numeric", "1 if the answer is the right number within a tolerance"),
        "multiple_choice": Entry("rewards.choice:MultipleChoice", "1 if the answer names the right letter alone"),
        "qa": Entry("rewards.qa:QuestionAnswer", "exact match or F1 of words, as SQuAD counts them"),
        "ranking": Entry("rewards.ranking:Ranking", "NDCG, recall or reciprocal rank of a list"),
        "sql": Entry("rewards.sql:SqlResult", "1 if a query returns the rows of the right query"),
        "rouge": Entry("rewards.overlap:Rouge", "ROUGE of the answer against the reference", extra="rewards"),
        "bleu": Entry("rewards.overlap:Bleu", "BLEU of the answer against the reference", extra="rewards"),
        "similarity": Entry("rewards.similarity:Similarity", "share of characters in common, in order"),
        "patch_similarity": Entry("rewards.similarity:PatchSimilarity", "how alike edits of files are to right ones"),
        "json_schema": Entry("rewards.structured:JsonSchema", "1 if an action is JSON of a shape", extra="rewards"),
        "pattern": Entry("rewards.pattern:Pattern", "1 if a regular expression matches"),
        "format": Entry("rewards.tags:Format", "1 if what was said keeps to an order of tags"),
        "format_outcome": Entry("rewards.tags:FormatOutcome", "exact match, softened by the form of what was said"),
        "search_efficiency": Entry("rewards.search:SearchEfficiency", "right, with as few searches as possible"),
        "tool_use": Entry("rewards.search:ToolUse", "F1 of the answer, and a bonus for using all tools"),
        "cost_aware": Entry("rewards.search:CostAware", "right, and cheap"),
        "page_action": Entry("rewards.page_action:PageAction", "part marks for a shopper's action", extra="rewards"),
        "concise": Entry("rewards.length:Concise", "correct, and shorter than the group's other correct ones"),
        "budget": Entry("rewards.length:Budget", "minus the share by which a budget is exceeded"),
        "repetition": Entry("rewards.fluency:Repetition", "minus the share of words said before"),
        "language": Entry("rewards.fluency:LanguageConsistency", "share of letters in the script asked for"),
        "combine": Entry("rewards.combine:Combine", "several rewards, with schedules, gates and caps"),
        "ranked": Entry("rewards.ranked:Ranked", "the first signal that tells two attempts apart decides"),
    },
    "engine": {
        "transformers": Entry("rlhf.rollout.engines:TransformersSettings", "in this process, on torch; no server"),
        "vllm": Entry("rlhf.rollout.engines:VllmSettings", "vLLM: an engine of its own, or running servers"),
    },
    "stage": {
        "supervised": Entry(
            "rlhf.trainers.supervised:Supervised", "imitate the oracle, or own attempts that succeeded"
        ),
        "preference": Entry(
            "rlhf.trainers.preference:Preference", "DPO on pairs of attempts, of actions, or of a file"
        ),
        "reward_model": Entry("rlhf.trainers.reward_model:RewardModel", "a model of which attempt is better, by TRL"),
        "policy_gradient": Entry("rlhf.trainers.policy_gradient:PolicyGradient", "reinforcement learning on rollouts"),
    },
    "trainer": {
        "torch": Entry("rlhf.trainers.trainer_kind:Torch", "plain torch in one process"),
        "deepspeed": Entry("rlhf.trainers.trainer_kind:DeepSpeed", "ZeRO 0 to 3 in one or several processes"),
    },
    "rollout": {
        "independent": Entry("rlhf.rollout.grouping:Independent", "every attempt begins where its task does"),
        "tree": Entry("rlhf.rollout.grouping:Tree", "attempts branch off others, and share what led there"),
    },
    "sampler": {
        "shuffled": Entry("rlhf.sampling.shuffled:Shuffled", "every task once, in an order of its own each time"),
        "reverse_curriculum": Entry(
            "rlhf.sampling.reverse_curriculum:ReverseCurriculum", "starts along demonstrations, the goal within reach"
        ),
        "exit": Entry("rlhf.sampling.exit_:ExIt", "starts from own partial histories of mixed success"),
        "greso": Entry("rlhf.sampling.greso:GRESO", "skips what was too easy or too hard when it came last"),
        "curriculum": Entry("rlhf.sampling.curriculum:Curriculum", "easy tasks first, level by level"),
    },
    "selection": {
        "all": Entry("rlhf.sampling.selection:All", "every group of one round"),
        "dynamic": Entry("rlhf.sampling.dynamic:Dynamic", "groups whose attempts differ, drawn until they are enough"),
        "uncertain": Entry("rlhf.sampling.uncertain:Uncertain", "the groups whose attempts differ most"),
    },
    "advantage": {
        "grpo": Entry("rlhf.credit.grpo:GRPO", "reward minus group mean, over the group's deviation"),
        "dr_grpo": Entry("rlhf.credit.dr_grpo:DrGRPO", "reward minus group mean"),
        "rloo": Entry("rlhf.credit.rloo:RLOO", "reward minus the mean of the others in the group"),
        "gigpo": Entry("rlhf.credit.gigpo:GiGPO", "GRPO per episode, plus the same among equal states"),
        "reinforce_pp": Entry("rlhf.credit.reinforce_pp:ReinforcePP", "return of a token, whitened over the step"),
        "reinforce_pp_baseline": Entry(
            "rlhf.credit.reinforce_pp_baseline:ReinforcePPBaseline", "reward minus group mean, whitened over the step"
        ),
        "lite_ppo": Entry("rlhf.credit.lite_ppo:LitePPO", "reward minus group mean, over the step's deviation"),
        "hgpo": Entry("rlhf.credit.hgpo:HGPO", "compares turns of equal state and equal recent history"),
        "step_grpo": Entry("rlhf.credit.step_grpo:StepGRPO", "GRPO of each turn's own reward, turn by turn"),
        "progress": Entry("rlhf.credit.progress:Progress", "what each turn contributed, compared over all turns"),
        "hrpo": Entry("rlhf.credit.hrpo:HRPO", "GRPO, plus a reward of each turn as it stands"),
        "stratified": Entry("rlhf.credit.stratified:Stratified", "GRPO among attempts with as many calls"),
        "loop": Entry("rlhf.credit.loop:LOOP", "RLOO, negligible advantages set to 0"),
        "lightning": Entry("rlhf.credit.lightning:Lightning", "GRPO for agents whose calls are single samples"),
        "grpo_lead": Entry("rlhf.credit.grpo_lead:GRPOLead", "GRPO with weights for length and difficulty"),
        "gae": Entry("rlhf.credit.gae:GAE", "what followed each token, against a critic's values"),
        "turn_gae": Entry("rlhf.credit.turn_gae:TurnGAE", "what followed each turn, against a critic's values"),
        "bilevel_gae": Entry("rlhf.credit.bilevel_gae:BiLevelGAE", "GAE over turns, then within each turn"),
        "archer": Entry("rlhf.credit.archer:ArCHer", "each turn's Q-value minus its state's, learnt off-policy"),
        "tree_grpo": Entry("rlhf.credit.tree_grpo:TreeGRPO", "GRPO among attempts that begin alike, and among all"),
        "treerl": Entry("rlhf.credit.treerl:TreeRL", "what became of the attempts that took each step"),
        "guided": Entry("rlhf.credit.guided:Guided", "reward minus mean, demonstrations counted in it or not"),
        "task_normalised": Entry("rlhf.credit.task_normalised:TaskNormalised", "another one, whitened per task type"),
        "duration_aware": Entry("rlhf.credit.duration_aware:DurationAware", "another one, times the seconds of a turn"),
        "hicra": Entry("rlhf.credit.hicra:HICRA", "another one, raised on planning tokens"),
        "ktae": Entry("rlhf.credit.ktae:KTAE", "another one, plus a value of each kind of token"),
    },
    "critic": {
        "values": Entry("rlhf.trainers.value_model:Critic", "the value of each state, from the present step"),
        "archer": Entry(
            "rlhf.trainers.archer_model:ArcherCritic", "values of turns and states, from a buffer of steps"
        ),
        "contributions": Entry("rlhf.trainers.contributions:Contributions", "how much of the score each turn earned"),
    },
    "loss": {
        "ppo_clip": Entry("rlhf.losses.ppo_clip:PPOClip", "clipped ratio, with clip-higher and dual clip"),
        "reinforce": Entry("rlhf.losses.reinforce:Reinforce", "log-prob times advantage"),
        "cispo": Entry("rlhf.losses.cispo:CISPO", "log-prob times advantage, by a clipped ratio"),
        "gspo": Entry("rlhf.losses.gspo:GSPO", "clipped ratio of a whole trajectory"),
        "cpgd": Entry("rlhf.losses.cpgd:CPGD", "clipped log-ratio, with a drift term"),
        "stable_reinforce": Entry("rlhf.losses.stable_reinforce:StableReinforce", "clipped ratio, bounded log-ratio"),
        "rebel": Entry("rlhf.losses.rebel:REBEL", "regress differences of log-ratios on those of rewards"),
        "a_lol": Entry("rlhf.losses.a_lol:ALoL", "imitate what was better than expected"),
        "nft": Entry("rlhf.losses.nft:NFT", "imitate right attempts, unlearn the implied wrong ones"),
        "shiq": Entry("rlhf.losses.shiq:ShiQ", "logits are Q-values that agree along each trajectory"),
        "rover": Entry("rlhf.losses.rover:ROVER", "log-ratios are Q-values of the random policy"),
        "kdrl": Entry("rlhf.losses.kdrl:KDRL", "clipped ratio, and a teacher's log-probs on the samples"),
        "luffy": Entry("rlhf.losses.luffy:LUFFY", "plain ratio; demonstrations by a shaped probability"),
        "min_entropy": Entry("rlhf.losses.min_entropy:MinEntropy", "more certainty, whatever the reward"),
    },
    "correction": {
        "truncated": Entry("rlhf.losses.correction:Truncated", "importance weight, at most C"),
        "clipped": Entry("rlhf.losses.correction:Clipped", "importance weight, brought between two bounds"),
        "masked": Entry("rlhf.losses.correction:Masked", "importance weight, 0 outside two bounds (IcePop)"),
        "rejection": Entry("rlhf.losses.correction:Rejection", "leave out what engine and trainer disagree on"),
        "bypass": Entry("rlhf.losses.correction:Bypass", "the engine's log-probs are the old ones"),
    },
}

#: What is used where a recipe gives a section but no kind, or leaves the section out.
DEFAULT_KIND: Mapping[str, str] = {"agent": "chat", "engine": "transformers", "trainer": "torch", "critic": "values"}

#: Import names whose absence means that an extra is not installed.
PACKAGES_OF_EXTRA: Mapping[str, tuple[str, ...]] = {
    "twx": ("textworld_express",),
    "babyai": ("minigrid",),
    "rewards": ("math_verify", "rouge_score", "sacrebleu", "jsonschema"),
}

#: Members that a part of each section must have; the contracts say what they do.
REQUIRED_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "environment": ("tasks", "start"),
    "agent": ("act",),
    "reward": ("__call__",),
    "advantage": ("__call__", "needs_values", "min_group"),
    "critic": ("start",),
    "loss": ("__call__",),
    "correction": ("__call__",),
    "trainer": ("start",),
    "rollout": ("n_rounds", "n_from_start", "branches"),
    "sampler": ("start",),
    "selection": ("__call__",),
}

#: A field with one of these types is a section of its own: its value has a kind.
SECTION_OF_TYPE: Mapping[str, str] = {
    "environments.base:Environment": "environment",
    "agents.base:Agent": "agent",
    "rewards.base:Reward": "reward",
    "rlhf.credit.estimator:AdvantageEstimator": "advantage",
    "rlhf.trainers.critic_kind:CriticKind": "critic",
    "rlhf.losses.policy_loss:PolicyLoss": "loss",
    "rlhf.losses.correction:Correction": "correction",
    "rlhf.trainers.trainer_kind:TrainerKind": "trainer",
    "rlhf.rollout.grouping:Grouping": "rollout",
    "rlhf.sampling.sampler:TaskSampler": "sampler",
    "rlhf.sampling.selection:GroupSelection": "selection",
}


def resolve(section: str, kind: str, *, base: Path, where: str = "") -> Any:
    """Return the class (for a reward: or the function) that `kind` names.

    Args:
        section: a key of `CATALOG`.
        kind: catalogue name, `package.module:Name` or `./file.py:Name`.
        base: folder of the recipe.
        where: YAML path for messages.

    Raises:
        RecipeError: no such kind, file, module or name; a file that raises on import; a part of the wrong shape.
        MissingPackageError: an optional package is absent.
    """
    where = where or f"{section}.kind"
    if ":" not in kind:
        return _from_table(section, kind, where)
    source, _, name = kind.rpartition(":")
    module = _file_module(source, base, where) if _is_file(source) else _named_module(source, base, where)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        public = [n for n in public if getattr(vars(module)[n], "__module__", "") == module.__name__] or public
        raise RecipeError(
            f"{source} defines no '{name}'",
            where=where,
            got=kind,
            expected=", ".join(public) or "a module that defines something",
            hint=nearest(name, public) or "name a class of that file after the colon",
        )
    return _checked(section, getattr(module, name), kind, where)


def kind_of(section: str, part: object) -> str:
    """Return a kind that resolves to `part` (a live object or a function) from any folder."""
    target = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    module, name = target.__module__, target.__qualname__
    for kind, entry in CATALOG.get(section, {}).items():
        if entry.target == f"{module}:{name}":
            return kind
    loaded = sys.modules.get(module)
    if module.startswith(_FILE_PREFIX) and loaded is not None:
        return f"{loaded.__file__}:{name}"
    return f"{module}:{name}"


def section_of_type(annotation: object) -> str | None:
    """Return the section whose contract `annotation` is, or None."""
    if not isinstance(annotation, type):
        return None
    return SECTION_OF_TYPE.get(f"{annotation.__module__}:{annotation.__qualname__}")


def _from_table(section: str, kind: str, where: str) -> Any:
    table = CATALOG[section]
    if kind not in table:
        raise RecipeError(
            f"no {section} is called '{kind}'",
            where=where,
            got=kind,
            expected=", ".join(table) + ", package.module:Name, or ./file.py:Name",
            hint=f"name what it defines after a colon: {kind}:Name"
            if _is_file(kind)
            else nearest(kind, table) or "`rlhf recipes --kinds` lists all kinds",
        )
    entry = table[kind]
    for package in PACKAGES_OF_EXTRA.get(entry.extra or "", ()):
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"'{kind}' needs a package that is not installed",
                where=where,
                got=f"no module named {package}",
                expected=f"the extra '{entry.extra}'",
                hint=f"pip install 'rlhf-agents[{entry.extra}]'",
            )
    module, _, name = entry.target.partition(":")
    return getattr(_imported(module, where), name)


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _named_module(name: str, base: Path, where: str) -> ModuleType:
    # At the end of the path, so that nothing beside a recipe can take the place of an installed package.
    for folder in (str(base.resolve()), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)
    return _imported(name, where)


def _imported(name: str, where: str) -> ModuleType:
    with _explained(name, where, "mend the module, or name another"):
        return importlib.import_module(name)


@contextmanager
def _explained(name: str, where: str, hint: str) -> Iterator[None]:
    """Turn whatever an import of `name` raises into a message: a package that is absent, or a module that is broken."""
    try:
        with boundary(RecipeError, f"{where}, importing {name}", hint):
            yield
    except RecipeError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
            raise
        if name == cause.name or name.startswith(cause.name + "."):
            raise RecipeError(
                f"no module is called '{cause.name}'",
                where=where,
                got=name,
                expected="a module that is installed, or lies beside the recipe or in the current folder",
                hint="pip install it, or write ./file.py:Name",
            ) from cause
        raise MissingPackageError(
            f"{name} needs a package that is not installed",
            where=where,
            got=f"no module named {cause.name}",
            expected="a Python with that package",
            hint=f"pip install the package that provides {cause.name}",
        ) from cause


_FILE_PREFIX = "recipe_file_"


def _file_module(source: str, base: Path, where: str) -> ModuleType:
    tried = list(dict.fromkeys((root / source).resolve() for root in (base, Path.cwd())))
    path = next((p for p in tried if p.is_file()), None)
    if path is None:
        raise RecipeError(
            "no such file",
            where=where,
            got=source,
            expected=" or ".join(map(str, tried)),
            hint="a file is looked for beside the recipe, then in the current folder",
        )
    # One file is one module however it is named, so that its classes are equal and can be pickled within the process.
    name = f"{_FILE_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:10]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError("not a Python file", where=where, got=str(path), expected="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _explained(str(path), where, "mend the file: it raises when it is imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(section: str, target: Any, kind: str, where: str) -> Any:
    if inspect.isfunction(target) and section == "reward":
        return target
    if not inspect.isclass(target):
        raise RecipeError(
            f"this is no {section}",
            where=where,
            got=f"{kind} is a {type(target).__name__}",
            expected="a class or a function" if section == "reward" else "a class",
            hint=f"name a class with {', '.join(REQUIRED_MEMBERS.get(section, ())) or 'its settings as fields'}",
        )
    missing = [member for member in REQUIRED_MEMBERS.get(section, ()) if not hasattr(target, member)]
    if missing and not (section == "reward" and hasattr(target, "over_group")):
        raise RecipeError(
            f"this is no {section}: {target.__name__} lacks {', '.join(missing)}",
            where=where,
            got=kind,
            expected=f"a class with {', '.join(REQUIRED_MEMBERS[section])}",
            hint="docs/plugins.md has whole parts to start from",
        )
    return target
