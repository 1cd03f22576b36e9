"""The client of an OpenAI-compatible endpoint, which retries until a question about an image is answered."""

from __future__ import annotations

import base64
import math
import os
import random
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from unirl.config.errors import InvalidValueError, RewardError, RewardUnreachableError, did_you_mean
from unirl.reward.client.connection import (
    CONNECT_S,
    MAX_PAUSE_S,
    PROBE_TIMEOUT_S,
    RequestFailed,
    ServerBusy,
    read_bounded,
)

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


class Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    """The part of a response of /models that is read."""

    data: list[Model]


class Endpoint:
    """An OpenAI-compatible server. Threads may share it."""

    def __init__(self, config: JudgeSpec, key: str | None) -> None:
        import httpx2

        self.config = config
        self._http = httpx2.Client(
            base_url=config.base_url.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(config.timeout, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=config.concurrency),
            trust_env=False,
            follow_redirects=False,
            verify=config.base_url.startswith("https"),
        )
        weakref.finalize(self, self._http.close)

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
        import httpx2

        try:
            with self._http.stream("GET", "/models", timeout=PROBE_TIMEOUT_S) as response:
                content = read_bounded(response.iter_bytes())
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise RewardUnreachableError(
                f"no server answers at {self.config.base_url}: {type(error).__name__}: {error}. Start the judge, or "
                "correct base_url"
            ) from error
        except (httpx2.TransportError, httpx2.DecodingError, RequestFailed):
            return  # a server is there, and it need not list its models
        if response.status_code in (401, 403):
            raise self._refusal(response.status_code, content, "")
        names = _model_names(content) if response.status_code == 200 else []
        if names and self.config.model not in names:
            raise RewardUnreachableError(
                f"the judge at {self.config.base_url} does not serve {self.config.model!r}."
                f"{did_you_mean(self.config.model, names)} It has {', '.join(names)}"
            )

    def _question(self, image: bytes, question: str, max_tokens: int, alternatives: bool) -> dict[str, object]:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        logprobs = {"logprobs": True, "top_logprobs": TOP} if alternatives else {}
        return {
            "model": self.config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            **logprobs,
        }

    def _post(self, body: Mapping[str, object], alternatives: bool) -> JudgeReply:
        """Asks once. Raises RequestFailed or ServerBusy when another attempt may succeed."""
        import httpx2

        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                content = read_bounded(response.iter_bytes())
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ServerUnreachable(f"{type(error).__name__}: {error}") from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise self._refusal(response.status_code, content, response.headers.get("retry-after", ""))
        try:
            return _reply(msgspec.json.decode(content, type=Completion), alternatives)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RequestFailed(f"the response is not a completion: {error}: {content[:SHOWN]!r}") from error

    def _refusal(self, status: int, content: bytes, retry_after: str) -> Exception:
        message = f"status {status}: {content[:SHOWN].decode(errors='replace')}"
        if status in (429, 503):
            return ServerBusy(message, float(retry_after) if retry_after.isdecimal() else self.config.retry_delay)
        if status >= 500 or status == 408:
            return RequestFailed(message)
        refuses_all = status in (401, 403, 404)  # the key, the address or the model is wrong for every question
        kind = RewardUnreachableError if refuses_all else RewardError
        return kind(
            f"the judge {self.config.model!r} at {self.config.base_url} refuses: {message}. Correct base_url, model, "
            "api_key_env or the question"
        )


def _model_names(content: bytes) -> list[str]:
    """Returns the model names in a response of /models; none if it has another form."""
    try:
        return [model.id for model in msgspec.json.decode(content, type=Models).data]
    except (msgspec.DecodeError, msgspec.ValidationError):
        return []


class ServerUnreachable(RequestFailed):
    """No server listens at the address."""


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
