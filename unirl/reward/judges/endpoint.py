"""An OpenAI-compatible endpoint: one question about one picture, asked until there is an answer."""

from __future__ import annotations

import base64
import math
import os
import random
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
"""Alternatives of a token that are asked for: what servers give at most."""
SHOWN = 200
"""Characters of an answer that an error quotes."""
TOY = "toy"


@dataclass(frozen=True, kw_only=True)
class JudgeSpec:
    """Which judge, where, and how much patience there is with it."""

    base_url: str
    """The part of the address before /chat/completions, such as http://127.0.0.1:8000/v1; `toy`: a stand-in on this
    machine, whose answers depend on picture and question and mean nothing."""
    model: str
    """The judge's name at the endpoint."""
    api_key_env: str | None = None
    """The environment variable that holds the key; None: no key is sent."""
    timeout: float = 120.0
    """Seconds that one question may take."""
    retries: int = 5
    """How often a question is asked again when there is no answer."""
    retry_delay: float = 0.5
    """Seconds before it is asked again; doubles each time, up to 10 s, and jitters."""
    concurrency: int = 16
    """Rows in flight at once."""

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
    """What a judge said."""

    text: str
    first: Mapping[str, float] | None = None
    """Probabilities of the tokens that it may begin with, if they were asked for and given."""


def api_key(config: JudgeSpec) -> str | None:
    """The key that the endpoint asks for. Raises ConfigError when its variable is not set."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise InvalidValueError(
            f"{type(config).__name__}.api_key_env names the environment variable {config.api_key_env}, which is not "
            "set. Set it to the endpoint's key, or leave api_key_env away"
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
    """The part of an answer of /chat/completions that is read."""

    choices: list[Choice]


class Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    """The part of an answer of /models that is read."""

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

    def ask(self, picture: bytes, question: str, max_tokens: int, alternatives: bool = False) -> JudgeReply:
        """The answer, after retries.

        Raises:
            RewardError: 6001 nobody is there, or refuses everything; 6002 there is no answer to this question.
        """
        body = self._question(picture, question, max_tokens, alternatives)
        pause = self.config.retry_delay
        for attempt in range(self.config.retries + 1):
            try:
                return self._post(body, alternatives)
            except (RequestFailed, ServerBusy) as fault:
                last = fault
            if attempt < self.config.retries:
                wanted = last.retry_after_s if isinstance(last, ServerBusy) else pause * random.uniform(0.5, 1.0)
                time.sleep(min(wanted, MAX_PAUSE_S))
                pause *= 2
        attempts = self.config.retries + 1
        kind = RewardUnreachableError if isinstance(last, ServerUnreachable) else RewardError
        raise kind(f"the judge at {self.config.base_url} gave no answer in {attempts} attempts, at last: {last}")

    def check_model(self) -> None:
        """Raises RewardError (6001) when nobody is there, refuses the key, or lists models without this one."""
        import httpx2

        try:
            with self._http.stream("GET", "/models", timeout=PROBE_TIMEOUT_S) as response:
                content = read_bounded(response.iter_bytes())
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise RewardUnreachableError(
                f"nobody answers at {self.config.base_url}: {type(error).__name__}: {error}. Start the judge, or mend "
                "base_url"
            ) from error
        except (httpx2.TransportError, httpx2.DecodingError, RequestFailed):
            return  # somebody is there, and need not list models
        if response.status_code in (401, 403):
            raise self._refusal(response.status_code, content, "")
        names = _model_names(content) if response.status_code == 200 else []
        if names and self.config.model not in names:
            raise RewardUnreachableError(
                f"the judge at {self.config.base_url} does not serve {self.config.model!r}."
                f"{did_you_mean(self.config.model, names)} It has {', '.join(names)}"
            )

    def _question(self, picture: bytes, question: str, max_tokens: int, alternatives: bool) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        asked = {"logprobs": True, "top_logprobs": TOP} if alternatives else {}
        return {
            "model": self.config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            **asked,
        }

    def _post(self, body: Mapping[str, Any], alternatives: bool) -> JudgeReply:
        """One attempt. Raises RequestFailed or ServerBusy where another may do better."""
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
            raise RequestFailed(f"the answer is no completion: {error}: {content[:SHOWN]!r}") from error

    def _refusal(self, status: int, content: bytes, retry_after: str) -> Exception:
        said = f"status {status}: {content[:SHOWN].decode(errors='replace')}"
        if status in (429, 503):
            return ServerBusy(said, float(retry_after) if retry_after.isdecimal() else self.config.retry_delay)
        if status >= 500 or status == 408:
            return RequestFailed(said)
        everything = status in (401, 403, 404)  # the key, the address or the model: no other question fares better
        kind = RewardUnreachableError if everything else RewardError
        return kind(
            f"the judge {self.config.model!r} at {self.config.base_url} refuses: {said}. Mend base_url, model or "
            "api_key_env, or what is asked"
        )


def _model_names(content: bytes) -> list[str]:
    """What an answer of /models lists; nothing where it has another form."""
    try:
        return [model.id for model in msgspec.json.decode(content, type=Models).data]
    except (msgspec.DecodeError, msgspec.ValidationError):
        return []


class ServerUnreachable(RequestFailed):
    """Nobody listens at the address."""


def _reply(completion: Completion, alternatives: bool) -> JudgeReply:
    """What a completion says. Raises RewardError when it is cut off, empty or lacks what was asked for."""
    if not completion.choices:
        raise RewardError("the judge gave no choice")
    choice = completion.choices[0]
    text = (choice.message.content or "").strip()
    if alternatives:
        return JudgeReply(text, _first_token(choice))
    if choice.finish_reason not in ("stop", None):
        raise RewardError(f"the judge was cut off ({choice.finish_reason}) after: {text[:SHOWN]!r}")
    if not text:
        raise RewardError("the judge said nothing")
    return JudgeReply(text)


def _first_token(choice: Choice) -> dict[str, float]:
    content = choice.logprobs.content if choice.logprobs is not None else None
    if not content or not content[0].top_logprobs:
        raise RewardError("the endpoint gives no log-probs, which soft answers need. Write soft: false in the config")
    probabilities: dict[str, float] = {}
    for one in content[0].top_logprobs:
        probabilities[one.token] = probabilities.get(one.token, 0.0) + math.exp(min(one.logprob, 0.0))
    return probabilities
