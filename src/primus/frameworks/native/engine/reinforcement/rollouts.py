"""Rollouts of a step: completions that the model generates, what they are worth, and the micro batches of them.

Shape suffixes: B batch, S sequence, G groups, N completions of a group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from primus.data.instruction.policy_settings import POLICY_FORMULAS, PolicySettings
from primus.data.instruction.prompts import NUMBER, ROW, UPDATE, PromptDataset
from primus.data.permutation import create_permutation, mix_numbers
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.pipeline import Batch
from primus.frameworks.native.engine.post_training.generate import Completion, Sampling, generate
from primus.frameworks.native.engine.reinforcement.gathered_weights import gather_weights
from primus.frameworks.native.engine.reinforcement.policy_loss import PolicyLoss, RolloutBatch, compute_advantages
from primus.frameworks.native.engine.reinforcement.reference_policy import ReferencePolicy
from primus.runs.rollouts import Rollout, read_rollouts, write_rollouts
from primus.session.engine import MicroBatches
from primus.session.ranks.torch_processes import TorchProcesses
from primus.session.rewards.reward_process import CompletionToScore, RewardProcess
from primus.session.session import Session


class CompletionFacts(NamedTuple):
    """What all processes know of a completion of one of them."""

    number: int
    reward: float
    rewards: dict[str, float]
    length: int
    is_cut: bool
    """Whether it has not ended by itself."""
    num_problems: int


class RolloutCollector:
    """Generates the completions of the samples that the training loop reads.

    Draws depend on the seed of the run and the number of a completion only: a resumed run on one device has the same.

    Args:
        session: The run.
        model: That is trained, and generates.
        loss: Gets what the passes need besides tokens.
        settings: How completions are generated and rewarded.
        processes: That train together.
    """

    def __init__(
        self,
        session: Session,
        model: Transformer,
        loss: PolicyLoss,
        settings: PolicySettings,
        processes: TorchProcesses,
    ) -> None:
        assert isinstance(session.data.train, PromptDataset) and session.data.tokenizer_path is not None
        self._session, self._model, self._settings, self._processes = session, model, settings, processes
        self.loss = loss
        self.reference: ReferencePolicy | None = None
        self.facts: dict[str, Any] = {}
        """Numbers of the newest rollouts, over all processes."""
        self._prompts = session.data.train.prompts
        self._tokenizer: Tokenizer = load_tokenizer(session.data.tokenizer_path, parse_special_tokens=True)
        self._scorer = RewardProcess(
            list(settings.rewards), settings.reward_timeout_s, settings.reward_on_error, settings.reward_pattern
        )
        self._step = 0
        self._rollouts: dict[int, Rollout] = {}
        """Of the newest step that generated some, by number."""
        self.mismatch_limit = settings.rollout_mismatch_limit
        self.data_group = model.layout.data.group

    def continue_from(self, step: int) -> None:
        """Set the number of steps that are taken; what was generated after it is forgotten."""
        self._step, self._rollouts, self.facts = step, {}, {}

    def close(self) -> None:
        """End the process of the rewards."""
        self._scorer.close()

    def collect(self, batches: MicroBatches) -> list[Batch]:
        """The micro batches of a step, with the completions of its samples.

        Raises:
            FinalError: A reward fails.
        """
        self._step += 1
        samples = np.concatenate(batches)
        update = int(samples[0, UPDATE])
        self._session.attempt.beat("rollout", self._step - 1)
        if update == 0 or not self._find_earlier(samples, self._step - update):
            self._generate(samples)
        self._session.attempt.beat("train", self._step - 1)
        return [self._build_batch([self._rollouts[int(n)] for n in batch[:, NUMBER]], update) for batch in batches]

    def _find_earlier(self, samples: np.ndarray, step: int) -> bool:
        """Whether there are rollouts of an earlier step for these samples: in memory, or where a run resumes in its
        folder."""
        wanted = {int(number) for number in samples[:, NUMBER]}
        if not wanted <= self._rollouts.keys():
            self._rollouts = {each.number: each for each in read_rollouts(self._session.attempt.run, step)}
        has_all = self._processes.all_reduce_max(int(not wanted <= self._rollouts.keys())) == 0
        if has_all and not self.facts:
            own = [self._rollouts[number] for number in sorted(wanted)]
            self._summarize(self._exchange(own), 0.0)
        return has_all

    def _generate(self, samples: np.ndarray) -> None:
        session, started = self._session, time.perf_counter()
        completions = self._complete_prompts(samples)
        generated_s = time.perf_counter() - started
        rollouts = self._score(samples, completions)
        facts = self._exchange(rollouts)
        advantages = self._compare_rewards(facts)
        rollouts = [structs.replace(each, advantage=advantages[each.number]) for each in rollouts]
        self._rollouts = {each.number: each for each in rollouts}
        write_rollouts(session.attempt.run, self._step, self._processes.rank, rollouts)
        self._summarize(facts, generated_s)

    def _complete_prompts(self, samples: np.ndarray) -> list[Completion]:
        settings, found = self._settings, list[Completion]()
        sampling = Sampling(settings.temperature, seed=self._session.trainer.training.seed)
        size = settings.rollout_batch_size or len(samples)
        # The caches of generation need the model as it is between steps, without dropout and gradients.
        with gather_weights(self._model):
            for begin in range(0, len(samples), size):
                part = samples[begin : begin + size]
                prompts = [self._prompts.tokens[row] for row in part[:, ROW]]
                numbers = [int(number) for number in part[:, NUMBER]]
                found += generate(
                    self._model, prompts, settings.max_new_tokens, sampling, self._prompts.ends, numbers=numbers
                ).completions
        return found

    def _score(self, samples: np.ndarray, completions: Sequence[Completion]) -> list[Rollout]:
        asked = [
            CompletionToScore(self._prompts.texts[row], self._decode(completion), self._prompts.columns[row])
            for row, completion in zip(samples[:, ROW], completions, strict=True)
        ]
        attempt, weights = self._session.attempt, self._settings.rewards
        scored = self._scorer.score(asked, lambda: attempt.beat("rollout", self._step - 1))
        return [
            Rollout(
                number=int(sample[NUMBER]),
                row=int(sample[ROW]) + 1,
                prompt=given.prompt,
                completion=given.completion,
                tokens=completion.tokens,
                log_probabilities=completion.log_probabilities,
                length=len(completion.tokens),
                stop_reason=completion.stop_reason,
                rewards=found.rewards,
                reward=sum(weights[name] * value for name, value in found.rewards.items()),
                advantage=0.0,
                problems=found.problems,
            )
            for sample, completion, given, found in zip(samples, completions, asked, scored, strict=True)
        ]

    def _decode(self, completion: Completion) -> str:
        """Text of a completion without the token that ends it; of tokens that only the model's vocabulary has, which
        may be larger, a sign that no answer has."""
        tokens = completion.tokens[:-1] if completion.tokens[-1] in self._prompts.ends else completion.tokens
        known = [token for token in tokens if token < self._tokenizer.vocab_size]
        return self._tokenizer.decode(known) + "\N{REPLACEMENT CHARACTER}" * (len(tokens) - len(known))

    def _exchange(self, rollouts: Sequence[Rollout]) -> list[CompletionFacts]:
        """The completions of all processes in the order of their numbers."""
        own = [
            CompletionFacts(
                each.number, each.reward, each.rewards, each.length, each.stop_reason != "stop", len(each.problems)
            )
            for each in rollouts
        ]
        gathered = self._processes.all_gather_values(own)
        return sorted((each for part in gathered for each in part), key=lambda each: each.number)

    def _compare_rewards(self, facts: Sequence[CompletionFacts]) -> Mapping[int, float]:
        """Advantages by number."""
        rewards = np.array([each.reward for each in facts])
        if self._settings.shuffle_rewards:
            key = mix_numbers(self._session.trainer.training.seed, facts[0].number)
            rewards = rewards[create_permutation(len(rewards), key)]
        rewards_GN = torch.from_numpy(rewards).view(-1, self._settings.num_generations)
        advantages = compute_advantages(rewards_GN, POLICY_FORMULAS[self.loss.kind].is_scaled).flatten().tolist()
        return dict(zip((each.number for each in facts), advantages, strict=True))

    def _summarize(self, facts: Sequence[CompletionFacts], generated_s: float) -> None:
        rewards = np.array([each.reward for each in facts])
        groups_GN = rewards.reshape(-1, self._settings.num_generations)
        lengths = np.array([each.length for each in facts])
        self.facts = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "rewards": {
                name: float(np.mean([each.rewards[name] for each in facts])) for name in self._settings.rewards
            },
            "groups_without_spread": float(np.mean(np.ptp(groups_GN, 1) == 0)),
            "length": float(lengths.mean()),
            "longest": int(lengths.max()),
            "cut": float(np.mean([each.is_cut for each in facts])),
            "reward_problems": sum(each.num_problems for each in facts),
            "generated_tokens": int(lengths.sum()),
            "generation_s": round(generated_s, 3),
        }

    def _build_batch(self, rollouts: Sequence[Rollout], update: int) -> Batch:
        """Tokens and targets of completions behind their prompts, and what the loss needs besides, in turn."""
        prompts = [self._prompts.tokens[each.row - 1] for each in rollouts]
        width = max(len(prompt) + each.length for prompt, each in zip(prompts, rollouts, strict=True)) - 1
        tokens_BS = np.zeros((len(rollouts), width), dtype=np.int64)
        targets_BS = np.full((len(rollouts), width), IGNORED, dtype=np.int64)
        drawn_BS = np.zeros((len(rollouts), width))
        for place, (prompt, each) in enumerate(zip(prompts, rollouts, strict=True)):
            whole, part = [*prompt, *each.tokens], slice(len(prompt) - 1, len(prompt) + each.length - 1)
            tokens_BS[place, : len(whole) - 1] = whole[:-1]
            targets_BS[place, part], drawn_BS[place, part] = each.tokens, each.log_probabilities
        device = self._processes.device
        tokens, targets, drawn = (torch.from_numpy(each).to(device) for each in (tokens_BS, targets_BS, drawn_BS))
        self.loss.batches.append(
            RolloutBatch(
                torch.tensor([each.advantage for each in rollouts], dtype=torch.float64, device=device),
                drawn,
                None if self.reference is None else self.reference.score(tokens, targets),
                is_first_update=update == 0,
            )
        )
        return tokens, targets
