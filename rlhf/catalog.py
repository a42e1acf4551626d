"""Every name a recipe may use; `rlhf.registry` makes a name a class.

To add a part of our own: write its file and its test, and add one line here. Nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of the catalogue.

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
        "from_scratch": Entry("rlhf.training.policy.model:FromScratch", "a small model and tokenizer made on the spot"),
        "pretrained": Entry("rlhf.training.policy.model:Pretrained", "any Hugging Face causal LM, by folder or hub"),
    },
    "environment": {
        "textworld_express": Entry(
            "environments.contrib.textworld_express.environment:TextWorldExpress",
            "eight text games in one Java process",
            extra="twx",
        ),
        "babyai": Entry("environments.babyai.environment:BabyAI", "BabyAI grid worlds told in words", extra="babyai"),
        "keyhole": Entry("environments.games.key_door:Keyhole", "find the key, open the door, in houses drawn by seed"),
        "textworld": Entry(
            "environments.contrib.textworld.environment:TextWorld",
            "cooking, coins, treasure: games by TextWorld",
            extra="textworld",
        ),
        "scienceworld": Entry(
            "environments.contrib.scienceworld.environment:ScienceWorld", "30 tasks of science", extra="scienceworld"
        ),
        "bfcl": Entry(
            "environments.contrib.bfcl.environment:BFCL",
            "multi-turn function calls, to evaluate on",
            extra="bfcl",
        ),
        "alfworld": Entry(
            "environments.contrib.alfworld.environment:ALFWorld", "household tasks in ALFWorld's form", extra="alfworld"
        ),
        "miniwob": Entry(
            "environments.contrib.miniwob.environment:MiniWoB", "small web pages in a real browser", extra="miniwob"
        ),
        "minihack": Entry(
            "environments.contrib.minihack.environment:MiniHack", "NetHack's small levels in words", extra="minihack"
        ),
        "sokoban": Entry("environments.games.sokoban:Sokoban", "push boxes onto goals, in rooms carved by seed"),
        "countdown": Entry("environments.games.countdown:Countdown", "make a target out of numbers by arithmetic"),
        "sat": Entry("environments.contrib.sat:Sat", "truth values that satisfy a formula of clauses"),
        "knights_and_knaves": Entry(
            "environments.contrib.knights:Knights", "who lies and who does not, by what they say"
        ),
        "wordle": Entry("environments.contrib.wordle:Wordle", "a word of five letters, by guesses answered in marks"),
        "twenty_questions": Entry(
            "environments.contrib.twenty_questions:TwentyQuestions",
            "the thing that is meant, by questions with yes or no",
        ),
        "guess_my_city": Entry(
            "environments.contrib.guess_my_city:GuessMyCity",
            "the town that is meant, by questions about what it is like",
        ),
        "bandit": Entry("environments.contrib.bandit:Bandit", "levers that pay at random; regret is the score"),
        "matrix_game": Entry(
            "environments.contrib.matrix_game:MatrixGame", "repeated games against players with a rule"
        ),
        "toy_text": Entry(
            "environments.contrib.toy_text:ToyText", "Gymnasium's lake, taxi, cliff, Blackjack", extra="toytext"
        ),
        "textarena": Entry(
            "environments.contrib.textarena.environment:TextArena",
            "TextArena: puzzles, and games for two players",
            extra="textarena",
        ),
        "reasoning_gym": Entry(
            "environments.contrib.reasoning_gym:ReasoningGym", "105 generators of problems", extra="reasoning-gym"
        ),
        "dataset": Entry("environments.tasks.dataset:Dataset", "questions of a file of one's own, one reply each"),
        "mixed": Entry("environments.wrappers.mixed:Mixed", "several environments in given shares"),
        "graded": Entry("environments.wrappers.difficulty_levels:Graded", "several environments as the levels of one"),
        "long_memory": Entry(
            "environments.contrib.long_memory:LongMemory", "facts that change, and are asked for later"
        ),
        "objectives": Entry("environments.contrib.composite_tasks:Objectives", "k tasks joined into one episode"),
        "search_qa": Entry(
            "environments.contrib.search_qa:SearchQA", "questions to search for, with BM25", extra="search"
        ),
        "tools": Entry("environments.tasks.tools:Tools", "sums and look-ups with tools called in JSON"),
        "text_to_sql": Entry("environments.contrib.text_to_sql:TextToSql", "questions to a SQLite database, retried"),
        "shop": Entry("environments.contrib.shop:Shop", "find and buy what is wanted, as in WebShop", extra="search"),
        "collaborate": Entry(
            "environments.contrib.collaborate:Collaborate", "ask a partner what is wanted, then submit"
        ),
        "table_questions": Entry(
            "environments.contrib.questions.table_questions:TableQuestions", "questions about tables that are shown"
        ),
        "hierarchy": Entry("environments.contrib.hierarchy:Hierarchy", "questions about who is above whom"),
        "routing": Entry("environments.contrib.questions.routing:Routing", "which of several experts to ask, and pay"),
        "arc": Entry("environments.contrib.arc:Arc", "grids with a rule to find, and one to edit by it"),
        "repair": Entry("environments.contrib.repair:Repair", "a module with a bug to mend by its tests"),
        "ml_task": Entry("environments.contrib.ml_task:MlTask", "a program that learns from a table, and predicts"),
        "conversations": Entry(
            "environments.contrib.questions.conversations:Conversations",
            "LoCoMo's or MemoryAgentBench's files, read in pieces",
        ),
        "next_segment": Entry(
            "environments.contrib.questions.next_segment:NextSegment", "the next sentence of a text of one's own"
        ),
        "verdicts": Entry("environments.contrib.questions.verdicts:Verdicts", "which reply is better; trains judges"),
        "mcp": Entry("environments.contrib.remote.mcp_tools:McpTools", "tools of an MCP server", extra="mcp"),
        "openenv": Entry(
            "environments.contrib.remote.openenv:OpenEnv",
            "episodes of a server that speaks OpenEnv's protocol",
            extra="servers",
        ),
        "external": Entry(
            "rlhf.gateway.environment:External",
            "attempts by a program outside, through the gateway",
        ),
        "processes": Entry("environments.workers.pool:Processes", "another environment, in worker processes"),
    },
    "agent": {
        "chat": Entry("agents.chat:ChatAgent", "one message per observation, one action per reply"),
        "tools": Entry("agents.tools:ToolAgent", "replies are calls of tools, as model families write them"),
        "planner": Entry("agents.planner:PlannerExecutor", "names subgoals, then acts towards each"),
        "self_play": Entry("agents.contrib.self_play:SelfPlay", "one policy in all seats of a game"),
        "critic": Entry("agents.contrib.critic:ActorCritic", "proposes, and has a critic accept it or send it back"),
        "rafa": Entry("agents.contrib.rafa:ReasonForFuture", "imagines what could come, then takes one step"),
        "external": Entry("rlhf.gateway.agent:ExternalAgent", "a program outside, through the gateway"),
        "remembering": Entry("agents.stores.remembering:Remembering", "shown what earlier episodes have left"),
    },
    "store": {
        "cases": Entry("agents.stores.cases:Cases", "attempts at other tasks, chosen by what helps (Memento)"),
        "notes": Entry("agents.stores.contrib.notes:Notes", "notes with links that evolve (A-MEM)", extra="search"),
        "graph": Entry(
            "agents.stores.contrib.graph:Graph", "facts of a world and what is around them (AriGraph)", extra="search"
        ),
        "typed": Entry("agents.stores.contrib.typed:Typed", "core, episodes, facts and how-tos", extra="search"),
        "reflection": Entry(
            "agents.stores.contrib.reflection:Reflection", "summaries re-ranked by use (RMM)", extra="search"
        ),
    },
    "extractor": {
        "pattern": Entry("agents.stores.contrib.facts:Pattern", "facts that regular expressions find"),
    },
    "memory": {
        "full": Entry("agents.memory.full:FullHistory", "the whole conversation"),
        "window": Entry("agents.memory.window:Window", "the opening and the last turns"),
        "budget": Entry("agents.memory.budget:TokenBudget", "as many observations as fit into a number of tokens"),
        "diff": Entry("agents.memory.contrib.diff:DiffHistory", "what has changed from observation to observation"),
        "summary": Entry("agents.memory.summary:Summary", "a summary by the policy, and the turns since"),
        "constant": Entry("agents.memory.contrib.constant:ConstantMemory", "only what the last reply carries (MEM1)"),
        "subgoals": Entry("agents.memory.subgoals:Subgoals", "finished subgoals as summaries (HiAgent)"),
        "managed": Entry(
            "agents.memory.contrib.managed:Managed", "a bank that a manager keeps (Memory-R1)", extra="search"
        ),
    },
    "reward": {
        "outcome": Entry("rewards.shaping.outcome:Outcome", "1 if the environment calls the episode solved, else 0"),
        "environment": Entry("rewards.shaping.outcome:EnvironmentReward", "the environment's own rewards, by turn"),
        "invalid_action": Entry(
            "rewards.shaping.penalties:InvalidActionPenalty", "minus a set amount per invalid action"
        ),
        "turn_cost": Entry("rewards.shaping.penalties:TurnCost", "minus a set amount per turn"),
        "overlong": Entry("rewards.shaping.penalties:Overlong", "falls to -1 towards a number of sampled tokens"),
        "exact_match": Entry("rewards.answers.exact:ExactMatch", "1 if the last action equals the task's reference"),
        "unit_tests": Entry("rewards.code.unit_tests:UnitTests", "the share of a task's tests that a program passes"),
        "subtask": Entry("rewards.contrib.subtasks:Subtask", "F-score of the files, functions, lines or edits named"),
        "reward_model": Entry("rewards.models.reward_model:RewardModelScore", "what a model trained on pairs says"),
        "outcome_model": Entry("rewards.models.reward_model:OutcomeModelScore", "P(right) by a model"),
        "process_model": Entry("rewards.models.reward_model:ProcessModelScore", "change in P(right) of each turn"),
        "judge": Entry("rewards.judges.judge:Judge", "a language model compares the attempts, in both orders"),
        "grade": Entry("rewards.judges.judge:Grade", "a language model gives points, or says yes or no"),
        "principles": Entry("rewards.judges.judge:Principles", "log p(Yes) - log p(No) of a model, on each principle"),
        "subgoals": Entry("rewards.contrib.guides:Subgoals", "subgoals named by a language model, paid when reached"),
        "feedback": Entry("rewards.contrib.guides:Feedback", "new replies that a language model takes for progress"),
        "episodic_memory": Entry(
            "rewards.contrib.episodic_memory:EpisodicMemory", "like past successes, unlike failures"
        ),
        "majority": Entry("rewards.judges.majority:Majority", "1 for the group's commonest answer; no labels"),
        "math": Entry("rewards.answers.maths:Maths", "1 if mathematically equal to the reference", extra="rewards"),
        "numeric": Entry("rewards.answers.numeric:Numeric", "1 if the answer is the right number within a tolerance"),
        "multiple_choice": Entry("rewards.answers.choice:MultipleChoice", "1 if the answer is the right letter"),
        "qa": Entry("rewards.answers.qa:QuestionAnswer", "exact match or F1 of words, as SQuAD counts them"),
        "ranking": Entry("rewards.contrib.ranking:Ranking", "NDCG, recall or reciprocal rank of a list"),
        "sql": Entry("rewards.contrib.sql:SqlResult", "1 if a query returns the rows of the right query"),
        "rouge": Entry("rewards.contrib.overlap:Rouge", "ROUGE of the answer against the reference", extra="rewards"),
        "bleu": Entry("rewards.contrib.overlap:Bleu", "BLEU of the answer against the reference", extra="rewards"),
        "similarity": Entry("rewards.contrib.similarity:Similarity", "share of characters in common, in order"),
        "patch_similarity": Entry(
            "rewards.contrib.similarity:PatchSimilarity", "how alike edits of files are to right ones"
        ),
        "json_schema": Entry(
            "rewards.contrib.json_schema:JsonSchema", "1 if an action is JSON of a schema", extra="rewards"
        ),
        "pattern": Entry("rewards.answers.pattern:Pattern", "1 if a regular expression matches"),
        "format": Entry("rewards.answers.tags:Format", "1 if what was said keeps to an order of tags"),
        "format_outcome": Entry("rewards.answers.tags:FormatOutcome", "exact match, softened by format"),
        "search_efficiency": Entry("rewards.contrib.search:SearchEfficiency", "right, with as few searches as can be"),
        "tool_use": Entry("rewards.contrib.search:ToolUse", "F1 of the answer, and a bonus for using all tools"),
        "cost_aware": Entry("rewards.contrib.search:CostAware", "right, and cheap"),
        "page_action": Entry("rewards.contrib.page_action:PageAction", "part marks for a shop action", extra="rewards"),
        "concise": Entry("rewards.shaping.length:Concise", "correct, and shorter than the group's other correct ones"),
        "budget": Entry("rewards.shaping.length:Budget", "minus the share by which a budget is exceeded"),
        "repetition": Entry("rewards.contrib.fluency:Repetition", "minus the share of words said before"),
        "language": Entry("rewards.contrib.fluency:LanguageConsistency", "share of letters in the script asked for"),
        "combine": Entry("rewards.combinators.combine:Combine", "several rewards, with schedules, gates and caps"),
        "of_part": Entry("rewards.combinators.of_part:OfPart", "another reward, for one part of a mixture alone"),
        "improvement": Entry("rewards.contrib.improvement:Improvement", "the difference that another try makes"),
        "key_steps": Entry("rewards.contrib.key_steps:KeySteps", "the share of a task's key steps that were said"),
        "step_reference": Entry(
            "rewards.contrib.key_steps:StepReference", "how like each turn's call is to that of a reference"
        ),
        "budgeted": Entry("rewards.contrib.budgeted:Budgeted", "right, within the tokens that the attempt was told"),
        "ranked": Entry("rewards.contrib.ranked:Ranked", "the first signal that tells two attempts apart decides"),
    },
    "engine": {
        "transformers": Entry("rlhf.inference.settings:TransformersSettings", "in this process, on torch; no server"),
        "guided": Entry(
            "rlhf.inference.settings:GuidedSettings", "the same, with what training did to a small model added"
        ),
        "vllm": Entry("rlhf.inference.settings:VllmSettings", "vLLM: an engine of its own, or running servers"),
    },
    "stage": {
        "supervised": Entry(
            "rlhf.training.stages.supervised:Supervised", "imitate the oracle, or own attempts that succeeded"
        ),
        "preference": Entry(
            "rlhf.training.stages.preference:Preference", "DPO on pairs of attempts, of actions, or of a file"
        ),
        "reward_model": Entry("rlhf.training.stages.reward_model:RewardModel", "a reward model, by TRL"),
        "policy_gradient": Entry(
            "rlhf.training.stages.policy_gradient:PolicyGradient", "reinforcement learning on rollouts"
        ),
    },
    "trainer": {
        "torch": Entry("rlhf.training.backends.settings:Torch", "plain torch in one process"),
        "deepspeed": Entry("rlhf.training.backends.settings:DeepSpeed", "ZeRO 0 to 3 in one or several processes"),
        "fsdp": Entry("rlhf.training.backends.settings:Fsdp", "PyTorch's FSDP2 in one or several processes"),
    },
    "rollout": {
        "independent": Entry("rlhf.rollout.group_structure:Independent", "every attempt begins where its task does"),
        "tree": Entry("rlhf.rollout.group_structure:Tree", "attempts branch off others, and share what led there"),
        "value_tree": Entry(
            "rlhf.rollout.contrib.value_tree:ValueTree", "a tree that grows where a judge or the policy sees most"
        ),
        "retry": Entry("rlhf.rollout.group_structure:Retry", "attempts again, each shown the ones before it"),
        "budgets": Entry("rlhf.rollout.contrib.budgets:Budgets", "attempts told how many tokens they have"),
    },
    "strategy": {
        "best_of_n": Entry(
            "rlhf.rollout.contrib.strategies:BestOfN", "the best of several attempts, by a judge or log-probs"
        ),
        "self_consistency": Entry("rlhf.rollout.contrib.strategies:SelfConsistency", "commonest of several answers"),
        "tree_search": Entry("rlhf.rollout.contrib.strategies:TreeSearch", "the best leaf of attempts that branch"),
        "reflect_and_retry": Entry(
            "rlhf.rollout.contrib.strategies:ReflectAndRetry", "try again, shown what was tried"
        ),
    },
    "sampler": {
        "shuffled": Entry("rlhf.tasks.shuffled:Shuffled", "every task once, in an order of its own each time"),
        "reverse_curriculum": Entry(
            "rlhf.tasks.contrib.start_states.reverse_curriculum:ReverseCurriculum",
            "starts along demonstrations, the goal within reach",
        ),
        "exit": Entry("rlhf.tasks.contrib.start_states.exit:ExIt", "starts from own histories of mixed success"),
        "greso": Entry("rlhf.tasks.contrib.greso:GRESO", "skips what was too easy or too hard when it came last"),
        "curriculum": Entry("rlhf.tasks.contrib.curriculum:Curriculum", "easy tasks first, level by level"),
        "ladder": Entry("rlhf.tasks.contrib.ladder:Ladder", "hard tasks, in easier variants while they are failed"),
    },
    "selection": {
        "all": Entry("rlhf.tasks.selection:All", "every group of one round"),
        "dynamic": Entry("rlhf.tasks.dynamic:Dynamic", "groups whose attempts differ, drawn until they are enough"),
        "uncertain": Entry("rlhf.tasks.contrib.uncertain:Uncertain", "the groups whose attempts differ most"),
    },
    "advantage": {
        "grpo": Entry("rlhf.credit.grpo:GRPO", "reward minus group mean, over the group's deviation"),
        "dr_grpo": Entry("rlhf.credit.dr_grpo:DrGRPO", "reward minus group mean"),
        "rloo": Entry("rlhf.credit.rloo:RLOO", "reward minus the mean of the others in the group"),
        "turn_rloo": Entry("rlhf.credit.contrib.turn_rloo:TurnRLOO", "RLOO of what is still to come, turn by turn"),
        "gigpo": Entry("rlhf.credit.gigpo:GiGPO", "GRPO per episode, plus the same among equal states"),
        "reinforce_pp": Entry("rlhf.credit.reinforce_pp:ReinforcePP", "return of a token, whitened over the step"),
        "reinforce_pp_baseline": Entry(
            "rlhf.credit.reinforce_pp_baseline:ReinforcePPBaseline", "reward minus group mean, whitened over the step"
        ),
        "lite_ppo": Entry("rlhf.credit.contrib.lite_ppo:LitePPO", "reward minus group mean, over the step's deviation"),
        "hgpo": Entry("rlhf.credit.contrib.hgpo:HGPO", "compares turns of equal state and equal recent history"),
        "step_grpo": Entry("rlhf.credit.contrib.step_grpo:StepGRPO", "GRPO of each turn's own reward, turn by turn"),
        "progress": Entry("rlhf.credit.contrib.progress:Progress", "what each turn contributed, over all turns"),
        "hrpo": Entry("rlhf.credit.contrib.hrpo:HRPO", "GRPO, plus a reward of each turn as it stands"),
        "stratified": Entry("rlhf.credit.contrib.stratified:Stratified", "GRPO among attempts with as many calls"),
        "loop": Entry("rlhf.credit.contrib.loop:LOOP", "RLOO, negligible advantages set to 0"),
        "oreal": Entry("rlhf.credit.contrib.oreal:OREAL", "one right attempt cloned, one wrong one pushed away"),
        "lightning": Entry("rlhf.credit.contrib.lightning:Lightning", "GRPO for agents whose calls are single samples"),
        "grpo_lead": Entry("rlhf.credit.contrib.grpo_lead:GRPOLead", "GRPO with weights for length and difficulty"),
        "gae": Entry("rlhf.credit.gae:GAE", "what followed each token, against a critic's values"),
        "turn_gae": Entry("rlhf.credit.turn_gae:TurnGAE", "what followed each turn, against a critic's values"),
        "bilevel_gae": Entry("rlhf.credit.contrib.bilevel_gae:BiLevelGAE", "GAE over turns, then within each turn"),
        "archer": Entry("rlhf.credit.contrib.archer:ArCHer", "Q-value minus state value of each turn, off-policy"),
        "sweet": Entry("rlhf.credit.contrib.sweet:SWEET", "what a critic that knows the answer says of each turn"),
        "tree_grpo": Entry("rlhf.credit.contrib.tree_grpo:TreeGRPO", "GRPO within and across shared beginnings"),
        "treerl": Entry("rlhf.credit.contrib.treerl:TreeRL", "what became of the attempts that took each step"),
        "guided": Entry(
            "rlhf.credit.contrib.with_demonstrations:Guided", "reward minus mean, demonstrations counted in it or not"
        ),
        "task_normalised": Entry(
            "rlhf.credit.contrib.task_normalised:TaskNormalised", "another one, whitened per task type"
        ),
        "duration_aware": Entry(
            "rlhf.credit.contrib.duration_aware:DurationAware", "another one, times the seconds of a turn"
        ),
        "two_level": Entry("rlhf.credit.contrib.two_level:TwoLevel", "one estimator for subgoals, one for actions"),
        "seats": Entry("rlhf.credit.contrib.self_play:Seats", "another one, for each seat of a game alone"),
        "reviews": Entry(
            "rlhf.credit.contrib.actor_critic_agents:Reviews",
            "another one, and a critic of proposals paid for being right",
        ),
        "hicra": Entry("rlhf.credit.contrib.hicra:HICRA", "another one, raised on planning tokens"),
        "ktae": Entry("rlhf.credit.contrib.ktae:KTAE", "another one, plus a value of each kind of token"),
    },
    "critic": {
        "values": Entry("rlhf.training.critics.values:Critic", "the value of each state, from the present step"),
        "archer": Entry(
            "rlhf.training.contrib.critics.archer:ArcherCritic", "values of turns and states, from a buffer of steps"
        ),
        "contributions": Entry(
            "rlhf.training.contrib.critics.contributions:Contributions", "how much of the score each turn earned"
        ),
        "token_rewards": Entry(
            "rlhf.training.contrib.critics.token_rewards:TokenRewards", "which tokens tell how an attempt comes out"
        ),
        "sweet": Entry(
            "rlhf.training.contrib.critics.sweet:SweetCritic", "which turns made the better attempt, told the answer"
        ),
    },
    "loss": {
        "ppo_clip": Entry("rlhf.losses.ppo_clip:PPOClip", "clipped ratio, with clip-higher and dual clip"),
        "reinforce": Entry("rlhf.losses.reinforce:Reinforce", "log-prob times advantage"),
        "cispo": Entry("rlhf.losses.cispo:CISPO", "log-prob times advantage, by a clipped ratio"),
        "gspo": Entry("rlhf.losses.gspo:GSPO", "clipped ratio of a whole trajectory"),
        "cpgd": Entry("rlhf.losses.contrib.cpgd:CPGD", "clipped log-ratio, with a drift term"),
        "stable_reinforce": Entry(
            "rlhf.losses.contrib.stable_reinforce:StableReinforce", "clipped ratio, bounded log-ratio"
        ),
        "rebel": Entry("rlhf.losses.contrib.rebel:REBEL", "regress differences of log-ratios on those of rewards"),
        "a_lol": Entry("rlhf.losses.contrib.a_lol:ALoL", "imitate what was better than expected"),
        "nft": Entry("rlhf.losses.contrib.nft:NFT", "imitate right attempts, unlearn the implied wrong ones"),
        "shiq": Entry("rlhf.losses.contrib.shiq:ShiQ", "logits are Q-values that agree along each trajectory"),
        "rover": Entry("rlhf.losses.contrib.rover:ROVER", "log-ratios are Q-values of the random policy"),
        "kdrl": Entry("rlhf.losses.contrib.kdrl:KDRL", "clipped ratio, and a teacher's log-probs on the samples"),
        "luffy": Entry("rlhf.losses.contrib.luffy:LUFFY", "plain ratio; demonstrations by a shaped probability"),
        "min_entropy": Entry("rlhf.losses.contrib.min_entropy:MinEntropy", "more certainty, whatever the reward"),
    },
    "sandbox": {
        "container": Entry("rewards.sandbox.container:Container", "a container of Docker or Podman for each program"),
    },
    "tracker": {
        "wandb": Entry("rlhf.training.trackers:Wandb", "Weights & Biases, online or offline"),
        "mlflow": Entry("rlhf.training.trackers:MLflow", "MLflow, on a server or in a file"),
        "trackio": Entry("rlhf.training.trackers:Trackio", "Trackio, in a local database"),
        "swanlab": Entry("rlhf.training.trackers:SwanLab", "SwanLab, online or offline"),
        "opentelemetry": Entry(
            "rlhf.training.contrib.opentelemetry:OpenTelemetry", "spans of episodes, to a collector or a file"
        ),
    },
    "correction": {
        "truncated": Entry("rlhf.losses.importance_correction:Truncated", "importance weight, at most C"),
        "clipped": Entry("rlhf.losses.importance_correction:Clipped", "importance weight, brought between two bounds"),
        "masked": Entry("rlhf.losses.importance_correction:Masked", "importance weight, 0 outside two bounds (IcePop)"),
        "rejection": Entry(
            "rlhf.losses.importance_correction:Rejection", "leave out what engine and trainer disagree on"
        ),
        "bypass": Entry("rlhf.losses.importance_correction:Bypass", "the engine's log-probs are the old ones"),
    },
}

#: Import names whose absence means that an extra is not installed.
PACKAGES_OF_EXTRA: Mapping[str, tuple[str, ...]] = {
    "twx": ("textworld_express",),
    "babyai": ("minigrid",),
    "toytext": ("gymnasium",),
    "reasoning-gym": ("reasoning_gym",),
    "textarena": ("textarena",),
    "textworld": ("textworld", "jericho"),
    "scienceworld": ("scienceworld",),
    "bfcl": ("bfcl_eval", "mpmath"),
    "alfworld": ("textworld", "alfworld"),
    "minihack": ("nle", "minihack"),
    "miniwob": ("miniwob",),
    "search": ("bm25s",),
    "mcp": ("mcp",),
    "servers": ("aiohttp",),
    "rewards": ("math_verify", "rouge_score", "sacrebleu", "jsonschema"),
}
