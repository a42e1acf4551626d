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


#: By section: name | target | extra, or - | doc; what is too long for a line goes on, further in, in the next.
_TABLE = """
policy:
  from_scratch | rlhf.training.policy.model:FromScratch | - | a small model and tokenizer from scratch
  pretrained | rlhf.training.policy.model:Pretrained | - | any Hugging Face causal LM, by folder or hub
environment:
  textworld_express | environments.contrib.textworld_express.environment:TextWorldExpress | twx |
      eight text games in one Java process
  babyai | environments.babyai.environment:BabyAI | babyai | BabyAI grid worlds as text
  keyhole | environments.games.key_door:Keyhole | - | find the key, open the door, in generated houses
  textworld | environments.contrib.textworld.environment:TextWorld | textworld |
      cooking, coins, treasure: games by TextWorld
  scienceworld | environments.contrib.scienceworld.environment:ScienceWorld | scienceworld | 30 science tasks
  bfcl | environments.contrib.bfcl.environment:BFCL | bfcl | multi-turn function calls, to evaluate on
  alfworld | environments.contrib.alfworld.environment:ALFWorld | alfworld | household tasks in ALFWorld's format
  miniwob | environments.contrib.miniwob.environment:MiniWoB | miniwob | small web pages in a real browser
  minihack | environments.contrib.minihack.environment:MiniHack | minihack | small NetHack levels as text
  sokoban | environments.games.sokoban:Sokoban | - | push boxes onto goals, in generated rooms
  countdown | environments.games.countdown:Countdown | - | make a target out of numbers by arithmetic
  sat | environments.contrib.sat:Sat | - | truth values that satisfy a formula of clauses
  knights_and_knaves | environments.contrib.knights:Knights | - | who lies and who does not, by what they say
  wordle | environments.contrib.wordle:Wordle | - | a word of five letters, by guesses answered in marks
  twenty_questions | environments.contrib.twenty_questions:TwentyQuestions | - | identify a thing by yes-no questions
  guess_my_city | environments.contrib.guess_my_city:GuessMyCity | - | identify a town by questions about it
  bandit | environments.contrib.bandit:Bandit | - | levers that pay at random; regret is the score
  matrix_game | environments.contrib.matrix_game:MatrixGame | - | repeated games against players with a rule
  toy_text | environments.contrib.toy_text:ToyText | toytext | Gymnasium's lake, taxi, cliff, Blackjack
  textarena | environments.contrib.textarena.environment:TextArena | textarena |
      TextArena: puzzles, and games for two players
  reasoning_gym | environments.contrib.reasoning_gym:ReasoningGym | reasoning-gym | 105 generators of problems
  dataset | environments.tasks.dataset:Dataset | - | questions of your own file, one reply each
  mixed | environments.wrappers.mixed:Mixed | - | a mixture of environments with weights
  graded | environments.wrappers.difficulty_levels:Graded | - | environments as levels of difficulty
  long_memory | environments.contrib.long_memory:LongMemory | - | facts that change, and are asked for later
  objectives | environments.contrib.composite_tasks:Objectives | - | k tasks joined into one episode
  search_qa | environments.contrib.search_qa:SearchQA | search | questions to search for, with BM25
  tools | environments.tasks.tools:Tools | - | sums and look-ups with tools called in JSON
  text_to_sql | environments.contrib.text_to_sql:TextToSql | - | questions to a SQLite database, retried
  shop | environments.contrib.shop:Shop | search | find and buy what is wanted, as in WebShop
  collaborate | environments.contrib.collaborate:Collaborate | - | ask a partner what is wanted, then submit
  colleague | environments.contrib.colleague:Colleague | - | write a program, by asking for its spec
  table_questions | environments.contrib.questions.table_questions:TableQuestions | - |
      questions about tables that are shown
  hierarchy | environments.contrib.hierarchy:Hierarchy | - | questions about hierarchies
  routing | environments.contrib.questions.routing:Routing | - | which of several experts to ask, and pay
  arc | environments.contrib.arc:Arc | - | ARC grids: find the rule and apply it
  repair | environments.contrib.repair:Repair | - | repair a module with a bug, by its tests
  ml_task | environments.contrib.ml_task:MlTask | - | write a program that learns from a table
  conversations | environments.contrib.questions.conversations:Conversations | - |
      LoCoMo's or MemoryAgentBench's files, read in pieces
  next_segment | environments.contrib.questions.next_segment:NextSegment | - | next sentence of your own text
  verdicts | environments.contrib.questions.verdicts:Verdicts | - | which reply is better; trains judges
  self_made | environments.contrib.questions.self_made:SelfMade | - | write a problem, then answer it
  mcp | environments.contrib.remote.mcp_tools:McpTools | mcp | tools of an MCP server
  openenv | environments.contrib.remote.openenv:OpenEnv | servers | episodes of a server that speaks OpenEnv's protocol
  external | rlhf.gateway.environment:External | - | attempts by an external program, through the gateway
  worker_processes | environments.workers.pool:Processes | - | another environment, in worker processes
agent:
  chat | agents.chat:ChatAgent | - | one message per observation, one action per reply
  tools | agents.tools:ToolAgent | - | replies are calls of tools, as model families write them
  planner | agents.planner:PlannerExecutor | - | names subgoals, then acts towards each
  self_play | agents.contrib.self_play:SelfPlay | - | one policy in all seats of a game
  critic | agents.contrib.critic:ActorCritic | - | proposes actions; a critic accepts or rejects them
  rafa | agents.contrib.rafa:ReasonForFuture | - | plans by simulation, then takes one step (RAFA)
  team | agents.contrib.team:Team | - | grows a graph of roles, which advise it (MasHost)
  external | rlhf.gateway.agent:ExternalAgent | - | an external program, through the gateway
  remembering | agents.stores.remembering:Remembering | - | another agent with a store across episodes
store:
  cases | agents.stores.cases:Cases | - | case memory of attempts, with learnt retrieval (Memento)
  notes | agents.stores.contrib.notes:Notes | search | notes with links that evolve (A-MEM)
  graph | agents.stores.contrib.graph:Graph | search | knowledge graph of facts (AriGraph)
  typed | agents.stores.contrib.typed:Typed | search | core, episodic, semantic, procedural
  reflection | agents.stores.contrib.reflection:Reflection | search | summaries re-ranked by use (RMM)
extractor:
  pattern | agents.stores.contrib.facts:Pattern | - | facts extracted by regular expressions
memory:
  full | agents.memory.full:FullHistory | - | the whole conversation
  window | agents.memory.window:Window | - | the opening and the last turns
  budget | agents.memory.budget:TokenBudget | - | as many observations as fit a token budget
  diff | agents.memory.contrib.diff:DiffHistory | - | differences between observations
  summary | agents.memory.summary:Summary | - | a summary by the policy, and the turns since
  constant | agents.memory.contrib.constant:ConstantMemory | - | only the last reply and its state (MEM1)
  subgoals | agents.memory.subgoals:Subgoals | - | finished subgoals as summaries (HiAgent)
  managed | agents.memory.contrib.managed:Managed | search | a memory bank kept by a manager (Memory-R1)
reward:
  outcome | rewards.shaping.outcome:Outcome | - | 1 if the environment calls the episode solved, else 0
  environment | rewards.shaping.outcome:EnvironmentReward | - | the environment's own rewards, by turn
  invalid_action | rewards.shaping.penalties:InvalidActionPenalty | - | minus a set amount per invalid action
  team_cost | rewards.contrib.team_cost:TeamCost | - | minus a cost for each role and link of a team
  turn_cost | rewards.shaping.penalties:TurnCost | - | minus a set amount per turn
  overlong | rewards.shaping.penalties:Overlong | - | soft penalty down to -1 near a token limit
  exact_match | rewards.answers.exact:ExactMatch | - | 1 if the last action equals the task's reference
  unit_tests | rewards.code.unit_tests:UnitTests | - | the share of a task's tests that a program passes
  subtask | rewards.contrib.subtasks:Subtask | - | F-score of the files, functions, lines or edits named
  reward_model | rewards.models.reward_model:RewardModelScore | - | score of a pairwise reward model
  outcome_model | rewards.models.reward_model:OutcomeModelScore | - | P(correct) by a model
  process_model | rewards.models.reward_model:ProcessModelScore | - | per-turn change of P(success)
  judge | rewards.judges.judge:Judge | - | a language model compares the attempts, in both orders
  grade | rewards.judges.judge:Grade | - | a language model gives points, or says yes or no
  principles | rewards.judges.judge:Principles | - | log p(Yes) - log p(No) of a model, on each principle
  subgoals | rewards.contrib.guides:Subgoals | - | subgoals named by a language model, paid when reached
  feedback | rewards.contrib.guides:Feedback | - | replies that a language model rates as progress
  episodic_memory | rewards.contrib.episodic_memory:EpisodicMemory | - | similarity to past successes, not failures
  found_subgoals | rewards.contrib.found_subgoals:FoundSubgoals | - | subgoals discovered from successes and failures
  majority | rewards.judges.majority:Majority | - | majority vote: 1 for the group's most common answer
  math | rewards.answers.maths:Maths | rewards | 1 if mathematically equal to the reference
  numeric | rewards.answers.numeric:Numeric | - | 1 if the answer is the right number within a tolerance
  multiple_choice | rewards.answers.choice:MultipleChoice | - | 1 if the answer is the right letter
  qa | rewards.answers.qa:QuestionAnswer | - | exact match or F1 of words, as SQuAD counts them
  ranking | rewards.contrib.ranking:Ranking | - | NDCG, recall or reciprocal rank of a list
  sql | rewards.contrib.sql:SqlResult | - | 1 if a query returns the rows of the right query
  rouge | rewards.contrib.overlap:Rouge | rewards | ROUGE of the answer against the reference
  bleu | rewards.contrib.overlap:Bleu | rewards | BLEU of the answer against the reference
  similarity | rewards.contrib.similarity:Similarity | - | share of characters in common, in order
  patch_similarity | rewards.contrib.similarity:PatchSimilarity | - | similarity of file edits to the reference edits
  json_schema | rewards.contrib.json_schema:JsonSchema | rewards | 1 if an action is JSON of a schema
  pattern | rewards.answers.pattern:Pattern | - | 1 if a regular expression matches
  format | rewards.answers.tags:Format | - | 1 if the tags are in the required order
  format_outcome | rewards.answers.tags:FormatOutcome | - | exact match, softened by format
  search_efficiency | rewards.contrib.search:SearchEfficiency | - | correct, with few searches
  called | rewards.contrib.search:Called | - | 1 if a tool was called at all
  tool_use | rewards.contrib.search:ToolUse | - | F1 of the answer, and a bonus for using all tools
  cost_aware | rewards.contrib.search:CostAware | - | right, and cheap
  page_action | rewards.contrib.page_action:PageAction | rewards | partial credit, shop action
  concise | rewards.shaping.length:Concise | - | correct, and shorter than the group's other correct ones
  budget | rewards.shaping.length:Budget | - | minus the share by which a budget is exceeded
  repetition | rewards.contrib.fluency:Repetition | - | minus the share of repeated n-grams
  language | rewards.contrib.fluency:LanguageConsistency | - | share of letters in the script asked for
  combine | rewards.combinators.combine:Combine | - | several rewards, with schedules, gates and caps
  of_part | rewards.combinators.of_part:OfPart | - | another reward, for one part of a mixture
  improvement | rewards.contrib.improvement:Improvement | - | improvement of a retry over the previous try
  key_steps | rewards.contrib.key_steps:KeySteps | - | the share of a task's key steps that were said
  intermediate_answers | rewards.contrib.interleaved:IntermediateAnswers | - | intermediate answers before a correct one
  proxy_answer | rewards.contrib.proxy_answer:ProxyAnswer | - | a model answers from the long answer alone
  step_reference | rewards.contrib.key_steps:StepReference | - | similarity of each turn's call to a reference call
  budgeted | rewards.contrib.budgeted:Budgeted | - | correct within the token budget of the attempt
  ranked | rewards.contrib.ranked:Ranked | - | the first signal in which two attempts differ decides
engine:
  transformers | rlhf.inference.settings:TransformersSettings | - | embedded: in process, no server
  guided | rlhf.inference.settings:GuidedSettings | - | embedded, plus the logit change of a small model (RAST)
  vllm | rlhf.inference.settings:VllmSettings | - | vLLM: a local engine, or running servers
stage:
  supervised | rlhf.training.stages.supervised:Supervised | - | SFT on oracle demonstrations or own successes
  preference | rlhf.training.stages.preference:Preference | - | DPO, IPO or KTO on attempts, actions, or a file
  reward_model | rlhf.training.stages.reward_model:RewardModel | - | a reward model, by TRL
  policy_gradient | rlhf.training.stages.policy_gradient:PolicyGradient | - | RL with policy gradients on rollouts
trainer:
  torch | rlhf.training.backends.settings:Torch | - | plain torch in one process
  deepspeed | rlhf.training.backends.settings:DeepSpeed | - | ZeRO 0 to 3 in one or several processes
  fsdp | rlhf.training.backends.settings:Fsdp | - | PyTorch's FSDP2 in one or several processes
rollout:
  independent | rlhf.rollout.group_structure:Independent | - | independent attempts from the task's start
  tree | rlhf.rollout.group_structure:Tree | - | tree rollouts: attempts share prefixes
  value_tree | rlhf.rollout.contrib.value_tree:ValueTree | - | value-guided tree, by a judge or log-probs
  retry | rlhf.rollout.group_structure:Retry | - | retries, each shown the previous attempts
  budgets | rlhf.rollout.contrib.budgets:Budgets | - | attempts with token budgets in their prompts
  shuffled_events | rlhf.rollout.contrib.shuffled_events:ShuffledEvents | - | some see events shuffled
strategy:
  best_of_n | rlhf.rollout.contrib.strategies:BestOfN | - | the best of several attempts, by a judge or log-probs
  self_consistency | rlhf.rollout.contrib.strategies:SelfConsistency | - | majority vote over answers
  tree_search | rlhf.rollout.contrib.strategies:TreeSearch | - | best leaf of tree rollouts
  reflect_and_retry | rlhf.rollout.contrib.strategies:ReflectAndRetry | - | retry, shown the previous attempts
sampler:
  shuffled | rlhf.tasks.shuffled:Shuffled | - | every task once per epoch, reshuffled
  reverse_curriculum | rlhf.tasks.contrib.start_states.reverse_curriculum:ReverseCurriculum | - |
      starts along demonstrations, the goal within reach
  exploratory_iteration | rlhf.tasks.contrib.start_states.exit:ExIt | - | starts from own histories of mixed success
  greso | rlhf.tasks.contrib.greso:GRESO | - | skips what was too easy or too hard when it came last
  curriculum | rlhf.tasks.contrib.curriculum:Curriculum | - | easy tasks first, level by level
  ladder | rlhf.tasks.contrib.ladder:Ladder | - | hard tasks, in easier variants while they are failed
selection:
  all | rlhf.tasks.selection:All | - | every group of one round
  dynamic | rlhf.tasks.dynamic:Dynamic | - | dynamic sampling: groups with non-zero variance
  variance_filter | rlhf.tasks.contrib.uncertain:Uncertain | - | the groups with the highest variance
advantage:
  grpo | rlhf.credit.grpo:GRPO | - | reward minus group mean, divided by the group std
  dr_grpo | rlhf.credit.dr_grpo:DrGRPO | - | reward minus group mean
  rloo | rlhf.credit.rloo:RLOO | - | reward minus the mean of the others in the group
  turn_rloo | rlhf.credit.contrib.turn_rloo:TurnRLOO | - | turn-level RLOO on reward-to-go
  gigpo | rlhf.credit.gigpo:GiGPO | - | GRPO per episode, plus the same among equal states
  reinforce_pp | rlhf.credit.reinforce_pp:ReinforcePP | - | return of a token, whitened over the step
  reinforce_pp_baseline | rlhf.credit.reinforce_pp_baseline:ReinforcePPBaseline | - |
      reward minus group mean, whitened over the step
  lite_ppo | rlhf.credit.contrib.lite_ppo:LitePPO | - | reward minus group mean, divided by the batch std
  hgpo | rlhf.credit.contrib.hgpo:HGPO | - | groups turns by state and recent history
  step_grpo | rlhf.credit.contrib.step_grpo:StepGRPO | - | GRPO on turn-level rewards, per turn index
  progress | rlhf.credit.contrib.progress:Progress | - | turn contributions, over all turns
  hrpo | rlhf.credit.contrib.hrpo:HRPO | - | GRPO, plus a turn-level reward term
  stratified | rlhf.credit.contrib.stratified:Stratified | - | GRPO in strata of equal calls
  loop | rlhf.credit.contrib.loop:LOOP | - | RLOO, negligible advantages set to 0
  oreal | rlhf.credit.contrib.oreal:OREAL | - | cloning of correct attempts, penalty on wrong ones
  lightning | rlhf.credit.contrib.lightning:Lightning | - | GRPO for agents whose calls are single samples
  grpo_lead | rlhf.credit.contrib.grpo_lead:GRPOLead | - | GRPO with weights for length and difficulty
  gae | rlhf.credit.gae:GAE | - | token-level GAE with a critic
  turn_gae | rlhf.credit.turn_gae:TurnGAE | - | turn-level GAE with a critic
  bilevel_gae | rlhf.credit.contrib.bilevel_gae:BiLevelGAE | - | GAE over turns, then within each turn
  archer | rlhf.credit.contrib.archer:ArCHer | - | Q-value minus state value of each turn, off-policy
  sweet | rlhf.credit.contrib.sweet:SWEET | - | turn advantages by a privileged critic
  tree_grpo | rlhf.credit.contrib.tree_grpo:TreeGRPO | - | GRPO within and across trees
  treerl | rlhf.credit.contrib.treerl:TreeRL | - | value differences along tree segments
  guided | rlhf.credit.contrib.with_demonstrations:Guided | - | GRPO with demonstrations in the group
  task_normalised | rlhf.credit.contrib.task_normalised:TaskNormalised | - | wraps another: whitened per task type
  duration_aware | rlhf.credit.contrib.duration_aware:DurationAware | - | wraps another: weighted by turn duration
  two_level | rlhf.credit.contrib.two_level:TwoLevel | - | wraps two: one for subgoals, one for actions
  seats | rlhf.credit.contrib.self_play:Seats | - | wraps another: per seat of a game
  reviews | rlhf.credit.contrib.actor_critic_agents:Reviews | - | wraps another: rewards correct reviews of a critic
  event_order | rlhf.credit.contrib.event_order:EventOrder | - | wraps another: event-order bonus
  hicra | rlhf.credit.contrib.hicra:HICRA | - | wraps another: raised on planning tokens
  ktae | rlhf.credit.contrib.ktae:KTAE | - | wraps another: plus a key-token value
critic:
  values | rlhf.training.critics.values:Critic | - | state values, trained on the current step
  archer | rlhf.training.contrib.critics.archer:ArcherCritic | - | Q-values and state values, off-policy from a buffer
  contributions | rlhf.training.contrib.critics.contributions:Contributions | - | contribution of each turn to the score
  token_rewards | rlhf.training.contrib.critics.token_rewards:TokenRewards | - | token rewards that predict the outcome
  sweet | rlhf.training.contrib.critics.sweet:SweetCritic | - | privileged critic of turns, by pairs
loss:
  ppo_clip | rlhf.losses.ppo_clip:PPOClip | - | clipped ratio, with clip-higher and dual clip
  reinforce | rlhf.losses.reinforce:Reinforce | - | log-prob times advantage
  cispo | rlhf.losses.cispo:CISPO | - | log-prob times advantage, weighted by a clipped ratio
  gspo | rlhf.losses.gspo:GSPO | - | sequence-level clipped ratio
  cpgd | rlhf.losses.contrib.cpgd:CPGD | - | clipped log-ratio, with a drift term
  stable_reinforce | rlhf.losses.contrib.stable_reinforce:StableReinforce | - | clipped ratio, bounded log-ratio
  rebel | rlhf.losses.contrib.rebel:REBEL | - | regression of log-ratio on reward differences
  a_lol | rlhf.losses.contrib.a_lol:ALoL | - | imitate attempts with positive advantage
  nft | rlhf.losses.contrib.nft:NFT | - | imitate correct attempts, unlearn wrong ones
  shiq | rlhf.losses.contrib.shiq:ShiQ | - | logits as Q-values, with Bellman consistency
  rover | rlhf.losses.contrib.rover:ROVER | - | log-ratios as Q-values of the random policy
  kdrl | rlhf.losses.contrib.kdrl:KDRL | - | clipped ratio plus on-policy distillation
  luffy | rlhf.losses.contrib.luffy:LUFFY | - | off-policy demonstrations with policy shaping
  min_entropy | rlhf.losses.contrib.min_entropy:MinEntropy | - | entropy minimisation, without reward
sandbox:
  container | rewards.sandbox.container:Container | - | a container of Docker or Podman for each program
tracker:
  wandb | rlhf.training.trackers:Wandb | - | Weights & Biases, online or offline
  mlflow | rlhf.training.trackers:MLflow | - | MLflow, on a server or in a file
  trackio | rlhf.training.trackers:Trackio | - | Trackio, in a local database
  swanlab | rlhf.training.trackers:SwanLab | - | SwanLab, online or offline
  opentelemetry | rlhf.training.contrib.opentelemetry:OpenTelemetry | - | spans of episodes, to a collector or a file
correction:
  truncated | rlhf.losses.importance_correction:Truncated | - | truncated importance sampling (TIS)
  clipped | rlhf.losses.importance_correction:Clipped | - | clipped importance weight
  masked | rlhf.losses.importance_correction:Masked | - | masked importance sampling (IcePop)
  rejection | rlhf.losses.importance_correction:Rejection | - | rejection by trainer/engine mismatch
  bypass | rlhf.losses.importance_correction:Bypass | - | no correction: engine log-probs as old log-probs
"""


def _read(table: str) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for line in table.replace("|\n", "|").split("\n"):
        if line.endswith(":"):
            entries = found.setdefault(line[:-1], {})
        elif line:
            name, target, extra, doc = (cell.strip() for cell in line.split("|"))
            entries[name] = Entry(target, doc, None if extra == "-" else extra)
    return found


CATALOG: Mapping[str, Mapping[str, Entry]] = _read(_TABLE)

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
