"""Prompt enhancement: a language model rewrites every prompt, and a diffusion model draws the rewrites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from unirl.config.errors import InvalidValueError, RewriteError
from unirl.rollout.engine.base import RolloutEngine
from unirl.types.facts import ModelFacts
from unirl.types.primitives import Decoded, Preview, Texts, VideoPreviews
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

PROMPT = "{prompt}"
QUOTES = ('""', "''", "``", "\u201c\u201d", "\u2018\u2019", "\u00ab\u00bb")
"""Pairs of quotation marks that are removed around a whole rewrite."""
SHOWN_RESPONSES = 3


class ComposedRolloutEngine(RolloutEngine):
    """Joins the engines of two policies: N rewrites of each prompt (track `ar`), M samples of each (track `diffusion`).

    It lives in the driver's process. Metadata and noise keys reach both engines; the images of a prompt reach those
    models that take images. Rewards are given for the original prompt.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(old_logp="native", snapshots=True)
    toy: ClassVar[Mapping[str, object]] = {"pe_marker": None, "pe_max_missing": 1.0}  # random weights never write it

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        turn: Callable[[str], None],
        *,
        pe_instruction: str = PROMPT,
        pe_marker: str | None = None,
        pe_max_chars: Annotated[int, Meta(ge=1)] | None = None,
        pe_max_missing: Annotated[float, Meta(ge=0, le=1)] = 0.9,
    ) -> None:
        """
        Args:
            engines: by track, `ar` and `diffusion`.
            turn: called with a track before its engine works, so that policies on the same devices can take turns.
            pe_instruction: the text that the language model gets; {prompt} stands for the prompt.
            pe_marker: the rewrite is what follows the last occurrence of this text; absent = the whole response. A
                response without the marker is an empty rewrite, in place of which the original prompt is drawn.
            pe_max_chars: a rewrite is cut to this many characters; absent = any length.
            pe_max_missing: the run stops if the marker is missing in more than this share of the responses of a step.
        """
        check_texts(pe_instruction, pe_marker)
        self.engines = engines
        self.turn = turn
        self.instruction = pe_instruction
        self.marker = pe_marker
        self.max_chars = pe_max_chars
        self.max_missing = pe_max_missing

    def facts(self) -> ModelFacts:
        """The facts of the language model, which reads the prompts."""
        return self.engines["ar"].facts()

    def preview(self, decoded: Decoded) -> Preview:
        """The samples for display. Texts and pixels have a preview each, which no engine needs to make."""
        return self.engines["ar" if isinstance(decoded, Texts) else "diffusion"].preview(decoded)

    def spell(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        """The tokens of the language model."""
        return self.engines["ar"].spell(rows)

    def trace(self, track: RolloutTrack) -> VideoPreviews:
        """The trajectories of the diffusion model."""
        return self.engines["diffusion"].trace(track)

    def rows(self, track: RolloutTrack, name: str) -> dict[str, Tensor]:
        # Any engine can read the rows of all workers.
        return next(iter(self.engines.values())).rows(track, name)

    def generate(self, req: RolloutReq) -> RolloutResp:
        """Sample the rewrites, then the images of each. Tracks `ar` (one row per row of `req`) and `diffusion`.

        Raises:
            RewriteError: the marker is missing in too many responses of a training step.
        """
        self.turn("ar")
        texts = [self.instruction.replace(PROMPT, prompt) for prompt in req.prompts()]
        written = self.engines["ar"].generate(self._of_track(req, "ar", texts)).tracks["ar"]
        rewrites = self._rewrites(req, written)
        self.turn("diffusion")
        rewritten = req.replace(primitives={**req.primitives, "text": Texts(texts=rewrites)}).branched("diffusion")
        below = self._of_track(rewritten, "diffusion", rewritten.prompts())
        drawn = self.engines["diffusion"].generate(below).tracks["diffusion"]
        return RolloutResp(
            {"ar": written, "diffusion": drawn.replace(parent_track="ar", parent_ids=list(below.group_ids))}
        )

    def _of_track(self, req: RolloutReq, track: str, prompts: Sequence[str]) -> RolloutReq:
        """The rows of the request for the engine of one track, with the prompts that it reads."""
        takes_images = self.engines[track].facts().condition_images != (0, 0)
        primitives = {name: each for name, each in req.primitives.items() if takes_images or name != "images"}
        spec = replace(req.tracks[track], parent=None, branch=1)
        return req.replace(primitives={**primitives, "text": Texts(texts=list(prompts))}, tracks={track: spec})

    def _rewrites(self, req: RolloutReq, written: RolloutTrack) -> list[str]:
        """The prompt of the diffusion model for each row: the rewrite, or the original prompt where it is empty."""
        assert written.decoded is not None
        decoded = self.engines["ar"].preview(written.decoded)
        assert isinstance(decoded, Texts), "the engine of track `ar` makes texts"
        if self.marker is not None and req.purpose == "r":
            self._check_marker(decoded.texts, self.marker)
        rewrites = [rewrite_in(text, self.marker, self.max_chars) for text in decoded.texts]
        return [rewrite or prompt for rewrite, prompt in zip(rewrites, req.prompts(), strict=True)]

    def _check_marker(self, responses: Sequence[str], marker: str) -> None:
        missing = [text for text in responses if marker not in text]
        if len(missing) <= self.max_missing * len(responses):
            return
        shown = "\n".join(f"  {text[:200]!r}" for text in missing[:SHOWN_RESPONSES])
        raise RewriteError(
            f"rollout.pe_marker={marker!r} is missing in {len(missing)} of {len(responses)} responses of a step "
            f"(rollout.pe_max_missing={self.max_missing:g}), such as\n{shown}\n  Ask for it in rollout.pe_instruction, "
            "allow longer responses (ar.sampling.max_new_tokens), or leave rollout.pe_marker out"
        )


def check_texts(instruction: str, marker: str | None) -> None:
    """Refuse (2004) an instruction without the prompt, and an empty marker."""
    if PROMPT not in instruction:
        raise InvalidValueError(
            f"rollout.pe_instruction={instruction!r} has no {PROMPT}: write it where the prompt goes"
        )
    if marker is not None and not marker.strip():
        raise InvalidValueError("rollout.pe_marker is empty. Name the text that the rewrite follows, or leave it out")


def rewrite_in(response: str, marker: str | None = None, max_chars: int | None = None) -> str:
    """The rewrite in a response: the text after the marker, without outer quotation marks, cut. May be empty."""
    if marker is not None and marker not in response:
        return ""
    text = (response if marker is None else response.split(marker)[-1]).strip()
    for quotes in QUOTES:
        if len(text) > 1 and text[0] + text[-1] == quotes:
            text = text[1:-1].strip()
            break
    return text[:max_chars].rstrip()
