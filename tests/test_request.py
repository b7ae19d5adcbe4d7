"""What SamplingParams refuses, in which words."""

import math
from dataclasses import fields
from typing import Any

import pytest

from shardwise.serve.api.requests import SAMPLING_FIELDS, GenerationRequest
from shardwise.serve.request import SamplingParams


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but it must be 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0, but it must be above 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 17}, "min_tokens is 17, but it must be from 0 to 16, the most tokens"),
        ({"min_tokens": -1, "max_tokens": None}, "min_tokens is -1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but it must be from 0.01 to 100"),
        ({"frequency_penalty": 2.1}, "frequency_penalty is 2.1, but it must be between -2 and 2"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"logit_bias": {5: 101}}, "logit_bias of 5 is 101, but it must be between -100 and 100"),
        ({"logit_bias": {-5: 1}}, "logit_bias of -5 is 1"),
        ({"n": 0}, "n is 0, but it must be at least 1"),
        ({"logprobs": 21}, "logprobs is 21, but it must be from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"stop": ("a", "")}, "stop must contain non-empty strings"),
        ({"stop": [3]}, "stop must contain non-empty strings"),
    ],
)
def test_params_out_of_range_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**fields)


def test_stop_takes_one_text_or_several() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams().stop == ()


def test_every_sampling_parameter_has_an_api_field_that_sets_it() -> None:
    """A field that is missing from SAMPLING_FIELDS would be accepted and ignored."""
    set_by_name = {"max_tokens", "logprobs", "logit_bias", "structure"}
    names = {each.name for each in fields(SamplingParams)}
    assert names - set(SAMPLING_FIELDS) == set_by_name
    assert set(SAMPLING_FIELDS) <= names & GenerationRequest.model_fields.keys()
