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
        "from_scratch": Entry("rlhf.training.policy.model:FromScratch", "a small model and tokenizer from scratch"),
        "pretrained": Entry("rlhf.training.policy.model:Pretrained", "any Hugging Face causal LM, by folder or hub"),
    },
    "environment": {
        "textworld_express": Entry(
            "environments.contrib.textworld_express.environment:TextWorldExpress",
            "eight text games in one Java process",
            extra="twx",
        ),
        "babyai": Entry("environments.babyai.environment:BabyAI", "BabyAI grid worlds as text", extra="babyai"),
        "keyhole": Entry("environments.games.key_door:Keyhole", "find the key, open the door, in generated houses"),
        "textworld": Entry(
            "environments.contrib.textworld.environment:TextWorld",
            "cooking, coins, treasure: games by TextWorld",
            extra="textworld",
        ),
        "scienceworld": Entry(
            "environments.contrib.scienceworld.environment:ScienceWorld", "30 science tasks", extra="scienceworld"
        ),
        "bfcl": Entry(
            "environments.contrib.bfcl.environment:BFCL",
            "multi-turn function calls, to evaluate on",
            extra="bfcl",
        ),
        "alfworld": Entry(
            "environments.contrib.alfworld.environment:ALFWorld",
            "household tasks in ALFWorld's format",
            extra="alfworld",
        ),
        "miniwob": Entry(
            "environments.contrib.miniwob.environment:MiniWoB", "small web pages in a real browser", extra="miniwob"
        ),
        "minihack": Entry(
            "environments.contrib.minihack.environment:MiniHack", "small NetHack levels as text", extra="minihack"
        ),
        "sokoban": Entry("environments.games.sokoban:Sokoban", "push boxes onto goals, in generated rooms"),
        "countdown": Entry("environments.games.countdown:Countdown", "make a target out of numbers by arithmetic"),
        "sat": Entry("environments.contrib.sat:Sat", "truth values that satisfy a formula of clauses"),
        "knights_and_knaves": Entry(
            "environments.contrib.knights:Knights", "who lies and who does not, by what they say"
        ),
        "wordle": Entry("environments.contrib.wordle:Wordle", "a word of five letters, by guesses answered in marks"),
        "twenty_questions": Entry(
            "environments.contrib.twenty_questions:TwentyQuestions",
            "identify a thing by yes-no questions",
        ),
        "guess_my_city": Entry(
            "environments.contrib.guess_my_city:GuessMyCity",
            "identify a town by questions about it",
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
        "dataset": Entry("environments.tasks.dataset:Dataset", "questions of your own file, one reply each"),
        "mixed": Entry("environments.wrappers.mixed:Mixed", "a mixture of environments with weights"),
        "graded": Entry("environments.wrappers.difficulty_levels:Graded", "environments as levels of difficulty"),
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
        "colleague": Entry("environments.contrib.colleague:Colleague", "write a program, by asking for its spec"),
        "table_questions": Entry(
            "environments.contrib.questions.table_questions:TableQuestions", "questions about tables that are shown"
        ),
        "hierarchy": Entry("environments.contrib.hierarchy:Hierarchy", "questions about hierarchies"),
        "routing": Entry("environments.contrib.questions.routing:Routing", "which of several experts to ask, and pay"),
        "arc": Entry("environments.contrib.arc:Arc", "ARC grids: find the rule and apply it"),
        "repair": Entry("environments.contrib.repair:Repair", "repair a module with a bug, by its tests"),
        "ml_task": Entry("environments.contrib.ml_task:MlTask", "write a program that learns from a table"),
        "conversations": Entry(
            "environments.contrib.questions.conversations:Conversations",
            "LoCoMo's or MemoryAgentBench's files, read in pieces",
        ),
        "next_segment": Entry(
            "environments.contrib.questions.next_segment:NextSegment", "next sentence of your own text"
        ),
        "verdicts": Entry("environments.contrib.questions.verdicts:Verdicts", "which reply is better; trains judges"),
        "self_made": Entry("environments.contrib.questions.self_made:SelfMade", "write a problem, then answer it"),
        "mcp": Entry("environments.contrib.remote.mcp_tools:McpTools", "tools of an MCP server", extra="mcp"),
        "openenv": Entry(
            "environments.contrib.remote.openenv:OpenEnv",
            "episodes of a server that speaks OpenEnv's protocol",
            extra="servers",
        ),
        "external": Entry(
            "rlhf.gateway.environment:External",
            "attempts by an external program, through the gateway",
        ),
        "worker_processes": Entry("environments.workers.pool:Processes", "another environment, in worker processes"),
    },
    "agent": {
        "chat": Entry("agents.chat:ChatAgent", "one message per observation, one action per reply"),
        "tools": Entry("agents.tools:ToolAgent", "replies are calls of tools, as model families write them"),
        "planner": Entry("agents.planner:PlannerExecutor", "names subgoals, then acts towards each"),
        "self_play": Entry("agents.contrib.self_play:SelfPlay", "one policy in all seats of a game"),
        "critic": Entry("agents.contrib.critic:ActorCritic", "proposes actions; a critic accepts or rejects them"),
        "rafa": Entry("agents.contrib.rafa:ReasonForFuture", "plans by simulation, then takes one step (RAFA)"),
        "team": Entry("agents.contrib.team:Team", "grows a graph of roles, which advise it (MasHost)"),
        "external": Entry("rlhf.gateway.agent:ExternalAgent", "an external program, through the gateway"),
        "remembering": Entry("agents.stores.remembering:Remembering", "another agent with a store across episodes"),
    },
    "store": {
        "cases": Entry("agents.stores.cases:Cases", "case memory of attempts, with learnt retrieval (Memento)"),
        "notes": Entry("agents.stores.contrib.notes:Notes", "notes with links that evolve (A-MEM)", extra="search"),
        "graph": Entry("agents.stores.contrib.graph:Graph", "knowledge graph of facts (AriGraph)", extra="search"),
        "typed": Entry("agents.stores.contrib.typed:Typed", "core, episodic, semantic, procedural", extra="search"),
        "reflection": Entry(
            "agents.stores.contrib.reflection:Reflection", "summaries re-ranked by use (RMM)", extra="search"
        ),
    },
    "extractor": {
        "pattern": Entry("agents.stores.contrib.facts:Pattern", "facts extracted by regular expressions"),
    },
    "memory": {
        "full": Entry("agents.memory.full:FullHistory", "the whole conversation"),
        "window": Entry("agents.memory.window:Window", "the opening and the last turns"),
        "budget": Entry("agents.memory.budget:TokenBudget", "as many observations as fit a token budget"),
        "diff": Entry("agents.memory.contrib.diff:DiffHistory", "differences between observations"),
        "summary": Entry("agents.memory.summary:Summary", "a summary by the policy, and the turns since"),
        "constant": Entry("agents.memory.contrib.constant:ConstantMemory", "only the last reply and its state (MEM1)"),
        "subgoals": Entry("agents.memory.subgoals:Subgoals", "finished subgoals as summaries (HiAgent)"),
        "managed": Entry(
            "agents.memory.contrib.managed:Managed", "a memory bank kept by a manager (Memory-R1)", extra="search"
        ),
    },
    "reward": {
        "outcome": Entry("rewards.shaping.outcome:Outcome", "1 if the environment calls the episode solved, else 0"),
        "environment": Entry("rewards.shaping.outcome:EnvironmentReward", "the environment's own rewards, by turn"),
        "invalid_action": Entry(
            "rewards.shaping.penalties:InvalidActionPenalty", "minus a set amount per invalid action"
        ),
        "team_cost": Entry("rewards.contrib.team_cost:TeamCost", "minus a cost for each role and link of a team"),
        "turn_cost": Entry("rewards.shaping.penalties:TurnCost", "minus a set amount per turn"),
        "overlong": Entry("rewards.shaping.penalties:Overlong", "soft penalty down to -1 near a token limit"),
        "exact_match": Entry("rewards.answers.exact:ExactMatch", "1 if the last action equals the task's reference"),
        "unit_tests": Entry("rewards.code.unit_tests:UnitTests", "the share of a task's tests that a program passes"),
        "subtask": Entry("rewards.contrib.subtasks:Subtask", "F-score of the files, functions, lines or edits named"),
        "reward_model": Entry("rewards.models.reward_model:RewardModelScore", "score of a pairwise reward model"),
        "outcome_model": Entry("rewards.models.reward_model:OutcomeModelScore", "P(correct) by a model"),
        "process_model": Entry("rewards.models.reward_model:ProcessModelScore", "per-turn change of P(success)"),
        "judge": Entry("rewards.judges.judge:Judge", "a language model compares the attempts, in both orders"),
        "grade": Entry("rewards.judges.judge:Grade", "a language model gives points, or says yes or no"),
        "principles": Entry("rewards.judges.judge:Principles", "log p(Yes) - log p(No) of a model, on each principle"),
        "subgoals": Entry("rewards.contrib.guides:Subgoals", "subgoals named by a language model, paid when reached"),
        "feedback": Entry("rewards.contrib.guides:Feedback", "replies that a language model rates as progress"),
        "episodic_memory": Entry(
            "rewards.contrib.episodic_memory:EpisodicMemory", "similarity to past successes, not failures"
        ),
        "found_subgoals": Entry(
            "rewards.contrib.found_subgoals:FoundSubgoals", "subgoals discovered from successes and failures"
        ),
        "majority": Entry("rewards.judges.majority:Majority", "majority vote: 1 for the group's most common answer"),
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
            "rewards.contrib.similarity:PatchSimilarity", "similarity of file edits to the reference edits"
        ),
        "json_schema": Entry(
            "rewards.contrib.json_schema:JsonSchema", "1 if an action is JSON of a schema", extra="rewards"
        ),
        "pattern": Entry("rewards.answers.pattern:Pattern", "1 if a regular expression matches"),
        "format": Entry("rewards.answers.tags:Format", "1 if the tags are in the required order"),
        "format_outcome": Entry("rewards.answers.tags:FormatOutcome", "exact match, softened by format"),
        "search_efficiency": Entry("rewards.contrib.search:SearchEfficiency", "correct, with few searches"),
        "called": Entry("rewards.contrib.search:Called", "1 if a tool was called at all"),
        "tool_use": Entry("rewards.contrib.search:ToolUse", "F1 of the answer, and a bonus for using all tools"),
        "cost_aware": Entry("rewards.contrib.search:CostAware", "right, and cheap"),
        "page_action": Entry("rewards.contrib.page_action:PageAction", "partial credit, shop action", extra="rewards"),
        "concise": Entry("rewards.shaping.length:Concise", "correct, and shorter than the group's other correct ones"),
        "budget": Entry("rewards.shaping.length:Budget", "minus the share by which a budget is exceeded"),
        "repetition": Entry("rewards.contrib.fluency:Repetition", "minus the share of repeated n-grams"),
        "language": Entry("rewards.contrib.fluency:LanguageConsistency", "share of letters in the script asked for"),
        "combine": Entry("rewards.combinators.combine:Combine", "several rewards, with schedules, gates and caps"),
        "of_part": Entry("rewards.combinators.of_part:OfPart", "another reward, for one part of a mixture"),
        "improvement": Entry("rewards.contrib.improvement:Improvement", "improvement of a retry over the previous try"),
        "key_steps": Entry("rewards.contrib.key_steps:KeySteps", "the share of a task's key steps that were said"),
        "intermediate_answers": Entry(
            "rewards.contrib.interleaved:IntermediateAnswers", "intermediate answers before a correct one"
        ),
        "proxy_answer": Entry("rewards.contrib.proxy_answer:ProxyAnswer", "a model answers from the long answer alone"),
        "step_reference": Entry(
            "rewards.contrib.key_steps:StepReference", "similarity of each turn's call to a reference call"
        ),
        "budgeted": Entry("rewards.contrib.budgeted:Budgeted", "correct within the token budget of the attempt"),
        "ranked": Entry("rewards.contrib.ranked:Ranked", "the first signal in which two attempts differ decides"),
    },
    "engine": {
        "transformers": Entry("rlhf.inference.settings:TransformersSettings", "embedded: in process, no server"),
        "guided": Entry(
            "rlhf.inference.settings:GuidedSettings", "embedded, plus the logit change of a small model (RAST)"
        ),
        "vllm": Entry("rlhf.inference.settings:VllmSettings", "vLLM: a local engine, or running servers"),
    },
    "stage": {
        "supervised": Entry(
            "rlhf.training.stages.supervised:Supervised", "SFT on oracle demonstrations or own successes"
        ),
        "preference": Entry(
            "rlhf.training.stages.preference:Preference", "DPO, IPO or KTO on attempts, actions, or a file"
        ),
        "reward_model": Entry("rlhf.training.stages.reward_model:RewardModel", "a reward model, by TRL"),
        "policy_gradient": Entry(
            "rlhf.training.stages.policy_gradient:PolicyGradient", "RL with policy gradients on rollouts"
        ),
    },
    "trainer": {
        "torch": Entry("rlhf.training.backends.settings:Torch", "plain torch in one process"),
        "deepspeed": Entry("rlhf.training.backends.settings:DeepSpeed", "ZeRO 0 to 3 in one or several processes"),
        "fsdp": Entry("rlhf.training.backends.settings:Fsdp", "PyTorch's FSDP2 in one or several processes"),
    },
    "rollout": {
        "independent": Entry("rlhf.rollout.group_structure:Independent", "independent attempts from the task's start"),
        "tree": Entry("rlhf.rollout.group_structure:Tree", "tree rollouts: attempts share prefixes"),
        "value_tree": Entry("rlhf.rollout.contrib.value_tree:ValueTree", "value-guided tree, by a judge or log-probs"),
        "retry": Entry("rlhf.rollout.group_structure:Retry", "retries, each shown the previous attempts"),
        "budgets": Entry("rlhf.rollout.contrib.budgets:Budgets", "attempts with token budgets in their prompts"),
        "shuffled_events": Entry("rlhf.rollout.contrib.shuffled_events:ShuffledEvents", "some see events shuffled"),
    },
    "strategy": {
        "best_of_n": Entry(
            "rlhf.rollout.contrib.strategies:BestOfN", "the best of several attempts, by a judge or log-probs"
        ),
        "self_consistency": Entry("rlhf.rollout.contrib.strategies:SelfConsistency", "majority vote over answers"),
        "tree_search": Entry("rlhf.rollout.contrib.strategies:TreeSearch", "best leaf of tree rollouts"),
        "reflect_and_retry": Entry(
            "rlhf.rollout.contrib.strategies:ReflectAndRetry", "retry, shown the previous attempts"
        ),
    },
    "sampler": {
        "shuffled": Entry("rlhf.tasks.shuffled:Shuffled", "every task once per epoch, reshuffled"),
        "reverse_curriculum": Entry(
            "rlhf.tasks.contrib.start_states.reverse_curriculum:ReverseCurriculum",
            "starts along demonstrations, the goal within reach",
        ),
        "exploratory_iteration": Entry(
            "rlhf.tasks.contrib.start_states.exit:ExIt", "starts from own histories of mixed success"
        ),
        "greso": Entry("rlhf.tasks.contrib.greso:GRESO", "skips what was too easy or too hard when it came last"),
        "curriculum": Entry("rlhf.tasks.contrib.curriculum:Curriculum", "easy tasks first, level by level"),
        "ladder": Entry("rlhf.tasks.contrib.ladder:Ladder", "hard tasks, in easier variants while they are failed"),
    },
    "selection": {
        "all": Entry("rlhf.tasks.selection:All", "every group of one round"),
        "dynamic": Entry("rlhf.tasks.dynamic:Dynamic", "dynamic sampling: groups with non-zero variance"),
        "variance_filter": Entry("rlhf.tasks.contrib.uncertain:Uncertain", "the groups with the highest variance"),
    },
    "advantage": {
        "grpo": Entry("rlhf.credit.grpo:GRPO", "reward minus group mean, divided by the group std"),
        "dr_grpo": Entry("rlhf.credit.dr_grpo:DrGRPO", "reward minus group mean"),
        "rloo": Entry("rlhf.credit.rloo:RLOO", "reward minus the mean of the others in the group"),
        "turn_rloo": Entry("rlhf.credit.contrib.turn_rloo:TurnRLOO", "turn-level RLOO on reward-to-go"),
        "gigpo": Entry("rlhf.credit.gigpo:GiGPO", "GRPO per episode, plus the same among equal states"),
        "reinforce_pp": Entry("rlhf.credit.reinforce_pp:ReinforcePP", "return of a token, whitened over the step"),
        "reinforce_pp_baseline": Entry(
            "rlhf.credit.reinforce_pp_baseline:ReinforcePPBaseline", "reward minus group mean, whitened over the step"
        ),
        "lite_ppo": Entry("rlhf.credit.contrib.lite_ppo:LitePPO", "reward minus group mean, divided by the batch std"),
        "hgpo": Entry("rlhf.credit.contrib.hgpo:HGPO", "groups turns by state and recent history"),
        "step_grpo": Entry("rlhf.credit.contrib.step_grpo:StepGRPO", "GRPO on turn-level rewards, per turn index"),
        "progress": Entry("rlhf.credit.contrib.progress:Progress", "turn contributions, over all turns"),
        "hrpo": Entry("rlhf.credit.contrib.hrpo:HRPO", "GRPO, plus a turn-level reward term"),
        "stratified": Entry("rlhf.credit.contrib.stratified:Stratified", "GRPO in strata of equal calls"),
        "loop": Entry("rlhf.credit.contrib.loop:LOOP", "RLOO, negligible advantages set to 0"),
        "oreal": Entry("rlhf.credit.contrib.oreal:OREAL", "cloning of correct attempts, penalty on wrong ones"),
        "lightning": Entry("rlhf.credit.contrib.lightning:Lightning", "GRPO for agents whose calls are single samples"),
        "grpo_lead": Entry("rlhf.credit.contrib.grpo_lead:GRPOLead", "GRPO with weights for length and difficulty"),
        "gae": Entry("rlhf.credit.gae:GAE", "token-level GAE with a critic"),
        "turn_gae": Entry("rlhf.credit.turn_gae:TurnGAE", "turn-level GAE with a critic"),
        "bilevel_gae": Entry("rlhf.credit.contrib.bilevel_gae:BiLevelGAE", "GAE over turns, then within each turn"),
        "archer": Entry("rlhf.credit.contrib.archer:ArCHer", "Q-value minus state value of each turn, off-policy"),
        "sweet": Entry("rlhf.credit.contrib.sweet:SWEET", "turn advantages by a privileged critic"),
        "tree_grpo": Entry("rlhf.credit.contrib.tree_grpo:TreeGRPO", "GRPO within and across trees"),
        "treerl": Entry("rlhf.credit.contrib.treerl:TreeRL", "value differences along tree segments"),
        "guided": Entry("rlhf.credit.contrib.with_demonstrations:Guided", "GRPO with demonstrations in the group"),
        "task_normalised": Entry(
            "rlhf.credit.contrib.task_normalised:TaskNormalised", "wraps another: whitened per task type"
        ),
        "duration_aware": Entry(
            "rlhf.credit.contrib.duration_aware:DurationAware", "wraps another: weighted by turn duration"
        ),
        "two_level": Entry("rlhf.credit.contrib.two_level:TwoLevel", "wraps two: one for subgoals, one for actions"),
        "seats": Entry("rlhf.credit.contrib.self_play:Seats", "wraps another: per seat of a game"),
        "reviews": Entry(
            "rlhf.credit.contrib.actor_critic_agents:Reviews",
            "wraps another: rewards correct reviews of a critic",
        ),
        "event_order": Entry("rlhf.credit.contrib.event_order:EventOrder", "wraps another: event-order bonus"),
        "hicra": Entry("rlhf.credit.contrib.hicra:HICRA", "wraps another: raised on planning tokens"),
        "ktae": Entry("rlhf.credit.contrib.ktae:KTAE", "wraps another: plus a key-token value"),
    },
    "critic": {
        "values": Entry("rlhf.training.critics.values:Critic", "state values, trained on the current step"),
        "archer": Entry(
            "rlhf.training.contrib.critics.archer:ArcherCritic", "Q-values and state values, off-policy from a buffer"
        ),
        "contributions": Entry(
            "rlhf.training.contrib.critics.contributions:Contributions", "contribution of each turn to the score"
        ),
        "token_rewards": Entry(
            "rlhf.training.contrib.critics.token_rewards:TokenRewards", "token rewards that predict the outcome"
        ),
        "sweet": Entry("rlhf.training.contrib.critics.sweet:SweetCritic", "privileged critic of turns, by pairs"),
    },
    "loss": {
        "ppo_clip": Entry("rlhf.losses.ppo_clip:PPOClip", "clipped ratio, with clip-higher and dual clip"),
        "reinforce": Entry("rlhf.losses.reinforce:Reinforce", "log-prob times advantage"),
        "cispo": Entry("rlhf.losses.cispo:CISPO", "log-prob times advantage, weighted by a clipped ratio"),
        "gspo": Entry("rlhf.losses.gspo:GSPO", "sequence-level clipped ratio"),
        "cpgd": Entry("rlhf.losses.contrib.cpgd:CPGD", "clipped log-ratio, with a drift term"),
        "stable_reinforce": Entry(
            "rlhf.losses.contrib.stable_reinforce:StableReinforce", "clipped ratio, bounded log-ratio"
        ),
        "rebel": Entry("rlhf.losses.contrib.rebel:REBEL", "regression of log-ratio on reward differences"),
        "a_lol": Entry("rlhf.losses.contrib.a_lol:ALoL", "imitate attempts with positive advantage"),
        "nft": Entry("rlhf.losses.contrib.nft:NFT", "imitate correct attempts, unlearn wrong ones"),
        "shiq": Entry("rlhf.losses.contrib.shiq:ShiQ", "logits as Q-values, with Bellman consistency"),
        "rover": Entry("rlhf.losses.contrib.rover:ROVER", "log-ratios as Q-values of the random policy"),
        "kdrl": Entry("rlhf.losses.contrib.kdrl:KDRL", "clipped ratio plus on-policy distillation"),
        "luffy": Entry("rlhf.losses.contrib.luffy:LUFFY", "off-policy demonstrations with policy shaping"),
        "min_entropy": Entry("rlhf.losses.contrib.min_entropy:MinEntropy", "entropy minimisation, without reward"),
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
        "truncated": Entry("rlhf.losses.importance_correction:Truncated", "truncated importance sampling (TIS)"),
        "clipped": Entry("rlhf.losses.importance_correction:Clipped", "clipped importance weight"),
        "masked": Entry("rlhf.losses.importance_correction:Masked", "masked importance sampling (IcePop)"),
        "rejection": Entry("rlhf.losses.importance_correction:Rejection", "rejection by trainer/engine mismatch"),
        "bypass": Entry("rlhf.losses.importance_correction:Bypass", "no correction: engine log-probs as old log-probs"),
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
