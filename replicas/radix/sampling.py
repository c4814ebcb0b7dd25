"""Choosing tokens: one pass over a step's logits, each row under its own parameters.

Order, as in vLLM: logit bias; repetition, frequency and presence penalties; no end before
min_tokens; temperature; min_p; top_k; top_p. Log probabilities are of the raw logits, before any of
it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from replicas.engine import Sampling, TokenLogprobs
from replicas.radix.sequence import Sampled, Sequence

GREEDY_BELOW = 1e-5  # a lower temperature divides logits out of float32's range


@dataclass(slots=True)
class State:
    """What sampling remembers of a sequence between steps."""

    random: Random
    counts: "Counts | None" = None  # of sequences with a penalty


@dataclass(slots=True)
class Counts:
    """Which tokens a sequence has used, up to date with its first `read` tokens."""

    seen: Tensor  # [vocab] bool: in the prompt or the output
    output: Tensor  # [vocab] float32: times in the output
    read: int = 0

    def update(self, sequence: Sequence) -> None:
        device = self.seen.device
        new = torch.tensor(sequence.tokens[self.read :], dtype=torch.int64, device=device)
        self.seen[new] = True
        output = new[max(sequence.prompt_len - self.read, 0) :]
        self.output.index_add_(0, output, torch.ones_like(output, dtype=self.output.dtype))
        self.read = len(sequence.tokens)


class Sampler:
    """Samples rows of logits and keeps each sequence's random state and penalty counts.

    `ends` are the ids that end a sequence, beside its own stop ids.
    """

    def __init__(self, ends: frozenset[int] = frozenset()) -> None:
        self._ends = ends
        self._states: dict[Sequence, State] = {}

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended; unknown ones are ignored."""
        self._states.pop(sequence, None)

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """One token for each row of logits [rows, vocab] float32, which may be changed in place.

        The tokens of a row depend on its logits, its parameters and how often its sequence was
        sampled before; never on the other rows.
        """
        params = [sequence.request.sampling for sequence in sequences]
        raw = _Logprobs.of(logits, params)
        for row, (sequence, sampling) in enumerate(zip(sequences, params, strict=True)):
            if sampling.logit_bias:
                _bias(logits[row], sampling.logit_bias)
            if _penalised(sampling):
                _penalise(logits[row], sampling, self._counts(sequence, logits[row]))
            if sequence.generated < sampling.min_tokens:
                logits[row, [*self._ends, *sampling.stop_token_ids]] = -torch.inf
        drawn = [row for row, sampling in enumerate(params) if sampling.temperature >= GREEDY_BELOW]
        tokens = logits.argmax(dim=-1).tolist()
        for row, token in zip(drawn, self._draw(logits, drawn, sequences), strict=True):
            tokens[row] = token
        return [Sampled(token, raw.of_row(row, token)) for row, token in enumerate(tokens)]

    def _state(self, sequence: Sequence) -> State:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = State(Random(sequence.request.sampling.seed))
        return state

    def _counts(self, sequence: Sequence, row: Tensor) -> Counts:
        state = self._state(sequence)
        if state.counts is None:
            state.counts = Counts(torch.zeros_like(row, dtype=torch.bool), torch.zeros_like(row))
        state.counts.update(sequence)
        return state.counts

    def _draw(self, logits: Tensor, rows: list[int], sequences: Seq[Sequence]) -> list[int]:
        """Draw a token for each of `rows` by inverting its cumulative distribution."""
        if not rows:
            return []
        params = [sequences[row].request.sampling for row in rows]
        uniform = [self._state(sequences[row]).random.random() for row in rows]
        temperatures = _column([p.temperature for p in params], logits)
        probs = torch.softmax(logits[rows] / temperatures, dim=-1)
        floor = _column([p.min_p for p in params], logits) * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill_(probs < floor, 0.0)
        chosen = [0] * len(rows)
        cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0]
        whole = [i for i, p in enumerate(params) if not p.top_k and p.top_p >= 1.0]
        if whole:
            picked = _invert(probs[whole], [uniform[i] for i in whole])
            for i, token in zip(whole, picked[:, 0].tolist(), strict=True):
                chosen[i] = token
        if cut:
            ordered, ids = probs[cut].sort(dim=-1, descending=True, stable=True)
            _truncate(ordered, [params[i] for i in cut])
            places = _invert(ordered, [uniform[i] for i in cut])
            for i, token in zip(cut, ids.gather(1, places)[:, 0].tolist(), strict=True):
                chosen[i] = token
        return chosen


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log probabilities of the rows that ask for them, taken before the logits change."""

    values: dict[int, Tensor]  # row to [vocab]
    top: dict[int, tuple[tuple[int, float], ...]]

    @staticmethod
    def of(logits: Tensor, params: Seq[Sampling]) -> "_Logprobs":
        asked = [row for row, sampling in enumerate(params) if sampling.logprobs is not None]
        if not asked:
            return _Logprobs({}, {})
        values = torch.log_softmax(logits[asked], dim=-1)
        widths = [min(params[row].logprobs or 0, values.shape[1]) for row in asked]
        best = values.topk(max(widths), dim=-1)
        ids, logprobs = best.indices.tolist(), best.values.tolist()
        return _Logprobs(
            dict(zip(asked, values, strict=True)),
            {
                row: tuple(zip(ids[i][:width], logprobs[i][:width], strict=True))
                for i, (row, width) in enumerate(zip(asked, widths, strict=True))
            },
        )

    def of_row(self, row: int, token: int) -> TokenLogprobs | None:
        if row not in self.values:
            return None
        return TokenLogprobs(token, float(self.values[row][token]), self.top[row])


def _bias(row: Tensor, bias: dict[int, float]) -> None:
    ids = torch.tensor(list(bias), device=row.device)
    row[ids] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)


def _penalised(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def _penalise(row: Tensor, sampling: Sampling, counts: Counts) -> None:
    """Repetition over prompt and output (Keskar et al., CTRL, section 4.1), others over output."""
    repetition = sampling.repetition_penalty
    if repetition != 1.0:
        penalised = torch.where(row > 0, row / repetition, row * repetition)
        row.copy_(torch.where(counts.seen, penalised, row))
    row.sub_(counts.output, alpha=sampling.frequency_penalty)
    row.sub_((counts.output > 0).to(row.dtype), alpha=sampling.presence_penalty)


def _truncate(ordered: Tensor, params: Seq[Sampling]) -> None:
    """Zero what top_k and top_p cut off, in probabilities [rows, vocab] sorted downwards.

    top_p keeps the fewest most likely tokens that reach its share of what top_k left (Holtzman et
    al., The Curious Case of Neural Text Degeneration, section 3.1).
    """
    vocab = ordered.shape[1]
    top_k = _column([float(p.top_k or vocab) for p in params], ordered)
    places = torch.arange(vocab, dtype=ordered.dtype, device=ordered.device)
    ordered.masked_fill_(places >= top_k, 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    share = _column([p.top_p for p in params], ordered) * ordered.sum(dim=-1, keepdim=True)
    beyond = before >= share
    beyond[:, 0] = False
    ordered.masked_fill_(beyond, 0.0)


def _invert(probs: Tensor, uniform: list[float]) -> Tensor:
    """Index [rows, 1] at which the cumulative weight of `probs` passes a share in [0, 1)."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = _column(uniform, cumulative) * cumulative[:, -1:]
    # right: never an index of weight zero. The clamp is for rows that are not a number.
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=probs.shape[1] - 1)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
