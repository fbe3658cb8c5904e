"""The configuration of a run: typed, frozen, closed to unknown keys. `docs/config.md` is generated from this file.

Every field's description is its documentation; rules that join several fields live in `check.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of the config: frozen, unknown keys forbidden, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """The policy to train."""

    path: str = Field(
        description="A local Hugging Face directory (config.json, *.safetensors, tokenizer.json), or a hub name.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "Type of activations and matmuls; auto: bfloat16 on TPU and GPU, float32 on CPU. Weights are always kept "
            "in float32."
        ),
    )
    max_context: int | None = Field(
        None,
        gt=0,
        description="Longest sequence, prompt and completion; default: the model's own limit.",
    )
    scan_layers: Literal["auto", True, False] = Field(
        "auto",
        description="Run the layers in one compiled loop (fast to compile) or unrolled; auto: a loop, but unrolled in the "
        "sampler on a CPU, which decodes faster so.",
    )
    remat: Literal["auto", "none", "dots", "full"] = Field(
        "auto",
        description=(
            "What the backward pass recomputes: nothing, all but matmul results, or whole layers; auto: none on a CPU, "
            "full elsewhere."
        ),
    )


class DataSection(Section):
    """Where prompts come from. Every column of a row that is not the prompt is passed to the reward functions."""

    train: str | list[str] = Field(
        description="JSONL or Parquet file(s), or a directory written by `datasets.save_to_disk`.",
    )
    eval: str | list[str] | None = Field(None, description="Held-out prompts, same formats; none: no evaluation.")
    prompt_column: str = Field(
        "prompt",
        description="The column with the prompt: a string, or a list of chat messages.",
    )
    prompt_format: Literal["chat", "text"] = Field(
        "chat",
        description=(
            "chat: a string prompt becomes one user message and the model's chat template is applied; text: it is used "
            "as it is."
        ),
    )
    system_prompt: str | None = Field(
        None,
        description="Put before the messages of every row that has no system message.",
    )
    chat_template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Extra variables for the chat template, such as enable_thinking.",
    )
    shuffle: bool = Field(True, description="Shuffle the training rows anew every epoch, from the run's seed.")
    max_prompt_tokens: int = Field(1024, gt=0, description="Longest prompt, in tokens.")
    overlong_prompts: Literal["error", "skip"] = Field(
        "error",
        description="What to do with a longer prompt; skip counts what it leaves out.",
    )
    skip_invalid: bool = Field(
        False,
        description="Leave malformed rows out, and count them, where the default is an error that names file and line.",
    )


class RewardSection(Section):
    """One reward function."""

    name: str = Field(description="A registered reward: a built-in or one from a plug-in file.")
    weight: float = Field(
        1.0,
        description="Its factor in the summed reward; 0: measured and logged, but not trained on.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward function.")
    on_error: Literal["stop", "abstain"] = Field(
        "stop", description="When the function raises: stop the run, or leave the sample unscored and count it."
    )


class SamplingSection(Section):
    """How completions are drawn in training."""

    temperature: float = Field(
        1.0,
        gt=0,
        description="Logits are divided by it, in the sampler and in the learner alike.",
    )
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0: all.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Keep the smallest set of tokens that reaches this probability; 1: all.",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Drop tokens less likely than this share of the most likely one; 0: none.",
    )
    repetition_penalty: float = Field(1.0, gt=0, description="Divide the logits of tokens already seen; 1: off.")
    presence_penalty: float = Field(
        0.0,
        description="Subtract this from the logits of tokens already in the completion; 0: off.",
    )
    frequency_penalty: float = Field(
        0.0,
        description="Subtract this, times the count, from logits of tokens in the completion; 0: off.",
    )
    stop: list[str] = Field(default_factory=list, description="Stop strings, besides the model's end tokens.")


class RolloutSection(Section):
    """How episodes are played."""

    engine: str = Field(
        "jax",
        description="The sampler: `jax`, embedded in the learner's process, or a registered engine.",
    )
    scheduler: str = Field(
        "single_turn",
        description="A registered scheduler: what happens between the turns of an episode.",
    )
    scheduler_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the scheduler.")
    prompts_per_step: int = Field(8, gt=0, description="Prompts drawn from the data set for one step.")
    num_generations: int = Field(8, gt=0, description="Completions of each prompt: the size of a group.")
    max_completion_tokens: int = Field(256, gt=0, description="Sampled tokens of one episode, all turns together.")
    max_turn_tokens: int | None = Field(
        None,
        gt=0,
        description="Sampled tokens of one turn; default: only the episode's limit.",
    )
    max_turns: int | None = Field(None, gt=0, description="Model turns of one episode; default: the scheduler decides.")
    slots: int = Field(64, gt=0, description="Sequences the embedded sampler decodes at once.")
    sampling: SamplingSection = Field(default_factory=SamplingSection)


class ObjectiveSection(Section):
    """The objective: a preset, and what departs from it; null means "as the preset says". See docs/losses.md."""

    preset: str = Field("grpo", description="A named objective; the keys below override its choices.")
    ratio: Literal["token", "sequence", "sequence_token"] | None = Field(
        None,
        description="Level of the importance ratio: each token's own, the sequence's mean (GSPO), or that with each token's own gradient.",
    )
    policy_loss: str | None = Field(
        None,
        description="A registered policy loss: clip, cispo, sapo, fipo, real, reinforce, or a plug-in; the preset's options for another loss are then dropped.",
    )
    policy_loss_options: dict[str, Any] | None = Field(
        None, description="Keyword options of the policy loss, such as tau_pos for sapo; merged over the preset's."
    )
    eps_low: float | None = Field(None, ge=0, lt=1, description="The ratio is clipped from below at 1 - eps_low.")
    eps_high: float | None = Field(
        None, gt=0, description="The ratio is clipped from above at 1 + eps_high; with cispo it is the cap itself."
    )
    eps_dual: float | None = Field(
        None,
        gt=1,
        description="Two-sided clip: caps the unclipped ratio too, which bounds the loss of tokens with a negative advantage.",
    )
    aggregation: Literal["sequence_mean", "sequence_sum", "token_mean", "constant", "group_mean"] | None = Field(
        None,
        description="How token losses become one number: every sequence, token or prompt weighs the same; sequence_sum adds tokens up; constant divides that by max_completion_tokens.",
    )
    kl_coef: float | None = Field(
        None, ge=0, description="Weight of the KL to the reference policy; 0: none, and no reference copy in memory."
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="Estimator of the KL, each token; default k3 in the loss, k1 in the reward. k1 in the loss is refused: its gradient is zero in expectation.",
    )
    kl_in_reward: bool | None = Field(
        None, description="Subtract the KL from each sample's reward, in place of a term in the loss."
    )
    kl_aggregation: Literal["sequence_mean", "sequence_sum", "token_mean", "constant", "group_mean"] | None = Field(
        None, description="Aggregation of the KL term, where it should differ from the policy term's."
    )
    entropy_coef: float | None = Field(
        None, description="Weight of the entropy bonus, subtracted from the loss; 0: none."
    )
    top_entropy_quantile: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Only this share of the tokens, those with the highest entropy in the micro-batch, carries the policy loss; 1: all.",
    )
    drop_truncated: bool | None = Field(
        None,
        description="Mask samples that a token limit cut; they still count in rewards and advantages, not in the loss's denominators.",
    )
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        None,
        description="Importance weights for the gap between sampler and learner: each token's or the sequence's ratio, truncated or zeroed above the threshold.",
    )
    sampler_correction_threshold: float | None = Field(
        None, gt=0, description="The threshold of sampler_correction; default 2."
    )
    sampler_diagnostics: bool | None = Field(
        None, description="Log the measures of the gap between sampler and learner even without a correction."
    )
    off_policy_mask_delta: float | None = Field(
        None,
        description="Drop a sample with a negative advantage whose mean log-prob fell by more than this since it was drawn, nats a token.",
    )
    token_weights: dict[str, dict[str, Any]] | None = Field(
        None, description="Further registered token weights, by name, each with its options."
    )
    advantage: str | None = Field(
        None, description="A registered advantage estimator: grpo, dr_grpo, rloo, reinforce_pp, gdpo, or a plug-in."
    )
    advantage_options: dict[str, Any] | None = Field(
        None, description="Keyword options of the advantage estimator, merged over the preset's."
    )
    scale: Literal["group", "batch", "none"] | None = Field(
        None, description="What advantages are divided by: the group's standard deviation, the batch's, or nothing."
    )


class OptimizerSection(Section):
    """The optimizer: an optax chain."""

    name: Literal["adamw", "sgd", "lion", "adafactor"] = Field("adamw", description="The update rule.")
    learning_rate: float = Field(1e-6, gt=0, description="The peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="After the warm-up: constant, or down to `final_learning_rate` at the run's end.",
    )
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up from 0.")
    final_learning_rate: float = Field(0.0, ge=0, description="Where linear and cosine schedules end.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only.")
    beta1: float = Field(0.9, ge=0, lt=1, description="First-moment decay.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Second-moment decay.")
    epsilon: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    max_grad_norm: float | None = Field(
        1.0,
        gt=0,
        description="Clip the global gradient norm to this; null: no clipping.",
    )
    frozen: list[str] = Field(
        default_factory=list,
        description=(
            "Parameters that do not train: regular expressions searched in paths such as "
            "`layers/attention/query/kernel`."
        ),
    )
    max_skipped_updates: int = Field(
        10,
        ge=0,
        description=(
            "Stop the run after this many consecutive updates with a non-finite loss or gradient (each is skipped)."
        ),
    )


class MeshSection(Section):
    """Devices by axis; -1 takes the rest."""

    data: int = Field(1, ge=-1, description="Copies of the parameters.")
    fsdp: int = Field(-1, ge=-1, description="Shards of the parameters; rows of a batch are split over data × fsdp.")
    tensor: int = Field(1, ge=-1, description="Shards of heads, hidden width and vocabulary.")


class LearnerSection(Section):
    """How a batch of trajectories becomes updates."""

    updates_per_step: int = Field(
        1,
        gt=0,
        description="Optimizer updates one pass over a step's samples is split into; must divide prompts_per_step.",
    )
    num_iterations: int = Field(1, gt=0, description="Passes over a step's samples.")
    micro_batch_tokens: int = Field(
        2048,
        gt=0,
        description="Packed tokens processed at once, on each data shard; changes memory and speed, never the result.",
    )
    row_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of a packed row; default: chosen from the longest sequence that can occur.",
    )
    share_prompts: bool = Field(
        True,
        description="Let the completions of a group share one copy of their prompt in a row.",
    )
    mesh: MeshSection = Field(default_factory=MeshSection)


class EvalSection(Section):
    """Held-out evaluation."""

    every_steps: int = Field(
        0,
        ge=0,
        description="Evaluate after every this many steps; 0: only before and after training.",
    )
    num_prompts: int | None = Field(None, gt=0, description="Use the first this many held-out prompts; default: all.")
    num_generations: int = Field(1, gt=0, description="Completions of each prompt.")
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    accuracy_reward: str | None = Field(
        None,
        description="The reward whose mean is called eval/accuracy; default: the first reward.",
    )


class CheckpointSection(Section):
    """Checkpoints and the export at the end."""

    every_steps: int = Field(
        50,
        ge=0,
        description="Save after every this many steps, and at the end; 0: only at the end.",
    )
    keep: int = Field(2, gt=0, description="Checkpoints kept; older ones go once a newer one is complete.")
    export: bool = Field(True, description="Write a Hugging Face directory at the end.")
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of the exported tensors; the masters in a checkpoint are always float32."
    )


class LoggingSection(Section):
    """Where metrics go, besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    completions: bool = Field(True, description="Write completions.jsonl, every trajectory of every step.")
    wandb_project: str | None = Field(
        None,
        description="Also log to this Weights & Biases project (needs the package wandb).",
    )
    progress: Literal["auto", "rich", "plain", "none"] = Field(
        "auto",
        description="auto: rich in a terminal, plain lines elsewhere.",
    )


class Config(Section):
    """A whole run."""

    output_dir: str = Field(description="Everything the run writes goes here.")
    steps: int | None = Field(None, gt=0, description="Number of steps; give this or `epochs`.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training prompts; give this or `steps`.")
    seed: int = Field(0, ge=0, lt=2**31, description="Decides data order and every sampled token.")
    plugins: list[str] = Field(
        default_factory=list,
        description="Python files (relative to the config) or modules that register plug-ins.",
    )
    model: ModelSection
    data: DataSection
    rewards: list[RewardSection] = Field(
        default_factory=list,
        description="Reward functions; their weighted sum is the reward.",
    )
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
