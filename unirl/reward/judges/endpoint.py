"""The client of an OpenAI-compatible endpoint, which retries until a question about an image is answered."""

from __future__ import annotations

import base64
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import msgspec

from unirl.config.errors import InvalidValueError, RewardError, RewardUnreachableError, did_you_mean
from unirl.config.http import (
    MAX_PAUSE_S,
    PROBE_TIMEOUT_S,
    HttpClient,
    Reply,
    RequestFailed,
    ServerBusy,
    ServerUnreachable,
)
from unirl.reward.judges.toy import toy_transport

TOP = 20
"""Number of alternatives requested for a token, which is the most that servers return."""
SHOWN = 200
"""Characters of a reply that an error message quotes."""
TOY = "toy"


@dataclass(frozen=True, kw_only=True)
class JudgeSpec:
    """The address of a judge, its key, timeout and retries."""

    base_url: str
    """The part of the address before /chat/completions, such as http://127.0.0.1:8000/v1. `toy` is an endpoint in this
    process, whose replies depend on image and question and have no meaning."""
    model: str
    """The judge's name at the endpoint."""
    api_key_env: str | None = None
    """The environment variable that holds the key. None: no key is sent."""
    timeout: float = 120.0
    """Timeout of one question, in seconds."""
    retries: int = 5
    """How often a question without an answer is repeated."""
    retry_delay: float = 0.5
    """Seconds before a question is repeated. The delay doubles each time, up to 10 s, and is randomised."""
    concurrency: int = 16
    """Number of rows that are scored at the same time."""

    toy: ClassVar[dict[str, object]] = {"base_url": TOY, "model": TOY, "api_key_env": None, "concurrency": 1}

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.base_url != TOY and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"{name}.base_url must start with http:// or https://, got {self.base_url!r}")
        if self.timeout <= 0 or self.retry_delay <= 0:
            raise ValueError(f"{name}.timeout and retry_delay must be > 0 s, got {self.timeout}, {self.retry_delay}")
        if self.retries < 0:
            raise ValueError(f"{name}.retries must be >= 0, got {self.retries}")
        if self.concurrency < 1:
            raise ValueError(f"{name}.concurrency must be >= 1, got {self.concurrency}")


@dataclass(frozen=True)
class JudgeReply:
    """The reply of a judge."""

    text: str
    first: Mapping[str, float] | None = None
    """Probabilities of the first token, by token, if they were requested."""


def api_key(config: JudgeSpec) -> str | None:
    """Returns the key for the endpoint. Raises ConfigError when its environment variable is not set."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise InvalidValueError(
            f"{type(config).__name__}.api_key_env names the environment variable {config.api_key_env}, which is not "
            "set. Set it to the endpoint's key, or remove api_key_env"
        )
    return key


class Alternative(msgspec.Struct):
    token: str
    logprob: float


class TokenLogprobs(msgspec.Struct):
    top_logprobs: list[Alternative]


class Logprobs(msgspec.Struct):
    content: list[TokenLogprobs] | None = None


class Message(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Completion(msgspec.Struct):
    """The part of a response of /chat/completions that is read."""

    choices: list[Choice]


class Models(msgspec.Struct):
    """The part of a response of /models that is read."""

    data: list[dict[str, object]]


class Endpoint(HttpClient):
    """An OpenAI-compatible server. Threads may share it."""

    def __init__(self, config: JudgeSpec, key: str | None) -> None:
        toy = config.base_url == TOY
        self.config = config
        super().__init__(
            "http://toy" if toy else config.base_url.rstrip("/"),
            token=key,
            timeout_s=config.timeout,
            connections=config.concurrency,
            transport=toy_transport() if toy else None,
        )

    def ask(self, image: bytes, question: str, max_tokens: int, alternatives: bool = False) -> JudgeReply:
        """Returns the answer, after retries.

        Raises:
            RewardError: 6001 no server answers, or it refuses every question; 6002 it does not answer this question.
        """
        body = self._question(image, question, max_tokens, alternatives)
        delay = self.config.retry_delay
        for attempt in range(self.config.retries + 1):
            try:
                return self._post(body, alternatives)
            except (RequestFailed, ServerBusy) as error:
                last = error
            if attempt < self.config.retries:
                wanted = last.retry_after_s if isinstance(last, ServerBusy) else delay * random.uniform(0.5, 1.0)
                time.sleep(min(wanted, MAX_PAUSE_S))
                delay *= 2
        attempts = self.config.retries + 1
        kind = RewardUnreachableError if isinstance(last, ServerUnreachable) else RewardError
        raise kind(f"the judge at {self.config.base_url} gave no answer in {attempts} attempts, the last one: {last}")

    def check_model(self) -> None:
        """Raises RewardError (6001) when no server answers, it refuses the key, or it lists other models only."""
        try:
            reply = self.request("GET", "/models", timeout_s=PROBE_TIMEOUT_S)
        except ServerUnreachable as error:
            raise RewardUnreachableError(
                f"no server answers at {self.config.base_url}: {error}. Start the judge, or correct base_url"
            ) from error
        except RequestFailed:
            return  # a server is there, and it need not list its models
        if reply.status in (401, 403):
            self._refuse(reply)
        try:
            models = msgspec.json.decode(reply.body, type=Models).data if reply.status == 200 else []
            names = [str(model["id"]) for model in models]
        except (msgspec.DecodeError, KeyError):
            return  # a list in another form says nothing
        if names and self.config.model not in names:
            raise RewardUnreachableError(
                f"the judge at {self.config.base_url} does not serve {self.config.model!r}."
                f"{did_you_mean(self.config.model, names)} It has {', '.join(names)}"
            )

    def _question(self, image: bytes, question: str, max_tokens: int, alternatives: bool) -> bytes:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
        }
        return msgspec.json.encode(body | ({"logprobs": True, "top_logprobs": TOP} if alternatives else {}))

    def _post(self, body: bytes, alternatives: bool) -> JudgeReply:
        """Asks once. Raises RequestFailed or ServerBusy when another attempt may succeed."""
        headers = {"Content-Type": "application/json"}
        reply = self.request("POST", "/chat/completions", content=body, headers=headers)
        if reply.status != 200:
            self._refuse(reply)
        try:
            return _reply(msgspec.json.decode(reply.body, type=Completion), alternatives)
        except msgspec.DecodeError as error:
            raise RequestFailed(f"the response is not a completion: {error}: {reply.body[:SHOWN]!r}") from error

    def _refuse(self, reply: Reply) -> NoReturn:
        """Raises the error for a response that is not a success."""
        message = f"status {reply.status}: {reply.body[:SHOWN].decode(errors='replace')}"
        reply.raise_if_retryable(message, self.config.retry_delay)
        refuses_all = reply.status in (401, 403, 404)  # the key, the address or the model is wrong for every question
        raise (RewardUnreachableError if refuses_all else RewardError)(
            f"the judge {self.config.model!r} at {self.config.base_url} refuses: {message}. Correct base_url, model, "
            "api_key_env or the question"
        )


def _reply(completion: Completion, alternatives: bool) -> JudgeReply:
    """Returns the reply in a completion. Raises RewardError when it is cut off, empty or lacks the log-probs."""
    if not completion.choices:
        raise RewardError("the judge returned no choices")
    choice = completion.choices[0]
    text = (choice.message.content or "").strip()
    if alternatives:
        return JudgeReply(text, _first_token(choice))
    if choice.finish_reason not in ("stop", None):
        raise RewardError(f"the judge was cut off ({choice.finish_reason}) after: {text[:SHOWN]!r}")
    if not text:
        raise RewardError("the judge returned an empty reply")
    return JudgeReply(text)


def _first_token(choice: Choice) -> dict[str, float]:
    content = choice.logprobs.content if choice.logprobs is not None else None
    if not content or not content[0].top_logprobs:
        raise RewardError("the endpoint returns no log-probs, which soft answers need. Write soft: false in the config")
    probabilities: dict[str, float] = {}
    for alternative in content[0].top_logprobs:
        token, probability = alternative.token, math.exp(min(alternative.logprob, 0.0))
        probabilities[token] = probabilities.get(token, 0.0) + probability
    return probabilities
