"""One answer while it is made: when it ends and why, and which text and tokens are shown of it.

As vLLM does it, after each token, the first that holds:

    an end token of the model (unless ignore_eos)   "stop", stopped by None
    one of stop_token_ids                           "stop", stopped by that id
    a stop string is complete                       "stop", stopped by that text
    max_tokens, or the model's length               "length"

None of the first three before min_tokens tokens: the sampler lets no end token through
(penalties.py), and a stop string counts only if it is completed by a later token. Tokens and
log-probabilities are all that were generated: also the end token, and those of a stop string. The
text has neither: the end token has no text, and a stop string cuts it.
"""

from collections.abc import Collection

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.request import FinishReason, Logprob, Piece, SamplingParams
from shardwise.serve.sampling.detokenize import Detokenizer


def end_ids(params: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset(params.stop_token_ids) | (
        frozenset() if params.ignore_eos else frozenset(eos_ids)
    )


class Answer:
    """One of a request's n answers: takes tokens as they come, gives what can be shown of each.

    `room` is how many tokens the model's length leaves after the prompt. After the piece with a
    finish_reason no more may come.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        room: int,
        index: int = 0,
        skip_special: bool = True,
    ) -> None:
        assert room > 0, "a prompt that leaves no room is refused before"
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.end_ids = end_ids(params, tokenizer.eos_ids)
        self._silent_ids = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids)
        self._most_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._min_tokens = params.min_tokens
        self._text = Detokenizer(tokenizer, params.stop, skip_special)

    def add(self, token: int, logprob: Logprob | None = None) -> Piece:
        """The next token; what it shows, and whether it ends the answer."""
        assert self.finish_reason is None, "the answer has ended"
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        stopped_by: str | int | None = None
        text = ""
        if may_stop and token in self.end_ids:
            self.finish_reason = "stop"
            stopped_by = None if token in self._silent_ids else token
        else:
            text = self._text.add(token, may_stop)
            if not self._text.stopped and self.num_tokens >= self._most_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            text += self._text.flush(may_stop)
        if self._text.stopped:
            self.finish_reason = "stop"
            stopped_by = self._text.stopped_by
        logprobs = () if logprob is None else (logprob,)
        return Piece(self.index, text, (token,), logprobs, self.finish_reason, stopped_by)

    def end(self, reason: FinishReason) -> Piece:
        """It goes on no further: its request was aborted, or its logits were no numbers. Shows the
        text that waited."""
        assert self.finish_reason is None, "the answer has ended"
        self.finish_reason = reason
        return Piece(self.index, self._text.flush(may_stop=False), finish_reason=reason)
