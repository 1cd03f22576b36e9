"""`unirl reward ls|score|lint|serve|ping|bench`: lists and checks scorers, and runs and tests a reward service."""

import inspect
import json
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw
from torch import Tensor

from unirl.cli.arguments import Parser, run_verb
from unirl.config.dependencies import need
from unirl.config.errors import ArgumentError, DataError, RewardError
from unirl.config.failures import Session
from unirl.config.schema import dotted_name
from unirl.models.images import read_image
from unirl.reward.base import RewardScorer
from unirl.reward.client.connection import Connection, ConnectionConfig
from unirl.reward.contract import check_scorer
from unirl.reward.registry import make_scorer, scorer_class, scorers
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec
from unirl.reward.scoring import checked_score
from unirl.reward.service import RewardService
from unirl.types.reward import RewardRequest

EXAMPLES = ("unirl reward ls", "unirl reward ls jpeg_compressibility",
            'unirl reward score -r pickscore --image cat.png --prompt "a cat"',
            "unirl reward lint -r jpeg_compressibility",
            "unirl reward serve -c rewards.yaml", "unirl reward ping http://127.0.0.1:8000")  # fmt: skip


def run(argv: list[str], session: Session) -> int:
    verbs = {"ls": list_all, "score": score, "lint": lint, "serve": serve, "ping": ping, "bench": bench}
    return run_verb("reward", argv, verbs, EXAMPLES)


def list_all(argv: Sequence[str]) -> int:
    parser = Parser("reward ls", "List the scorers of unirl, or show how a run uses one of them.", EXAMPLES)
    parser.add_argument("name", nargs="?", metavar="NAME", help="one scorer: its class, and the columns that it reads")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    names = sorted(scorers()) if options.name is None else [options.name]
    rows = [_described(name) for name in names]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(map(len, names))
    for row in rows:
        gradient = "  (has a gradient)" if row["differentiable"] else ""
        print(f"{row['name']:<{width}}  {row['summary']}{gradient}")
    if options.name is None:
        print("\nunirl reward ls NAME shows how a run uses one.")
    else:
        print(f"  reads     {', '.join(rows[0]['reads']) or 'the columns that its settings need'}")
        print(f"  settings  docs/settings.md, {rows[0]['target'].rpartition('.')[2]}")
        print(f"  in a run  unirl train RECIPE reward.backend='{{_target_: {rows[0]['target']}}}'")
    return 0


def _described(name: str) -> dict[str, Any]:
    """A row of the list: JSON values about the scorer with this name."""
    scorer = scorer_class(name)
    return {
        "name": name,
        "target": dotted_name(scorer),
        "summary": (inspect.getdoc(scorer) or "").split("\n")[0],
        "reads": list(_columns(scorer)),
        "modalities": list(scorer.capabilities.modalities),
        "differentiable": scorer.capabilities.differentiable,
    }


def _columns(scorer: type[RewardScorer]) -> tuple[str, ...]:
    """The columns that every scorer of this class reads. Empty if they depend on its settings."""
    reads = inspect.getattr_static(scorer, "reads", ())
    return reads if isinstance(reads, tuple) else ()


def score(argv: Sequence[str]) -> int:
    parser = _rows_parser("reward score", "Score rows of your own. The n-th value of each option belongs to row n.")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    scorer = scorer_of(options, options.toy)
    request = rows_of(options, scorer.reads)
    response = checked_score(scorer, request, options.reward)
    rows = [
        {"total": float(response.total[row])}
        | {name: float(scores[row]) for name, scores in response.components.items()}
        for row in range(len(request))
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    for sample, row in zip(request.sample_ids, rows, strict=True):
        print(f"{sample}  " + "  ".join(f"{name}={value:.6g}" for name, value in row.items()))
    return 0


def lint(argv: Sequence[str]) -> int:
    parser = _rows_parser("reward lint", "Check the contract of a scorer on rows of your own or on generated ones.")
    options = parser.parse(argv)
    scorer = scorer_of(options, options.toy)
    has_rows = any(vars(options)[option] for option in OPTION_OF.values())
    request = rows_of(options, scorer.reads) if has_rows else drawn_rows(scorer.reads, options.reward)
    if len(request) < 3:
        raise ArgumentError(f"unirl reward lint needs at least 3 rows that differ, got {len(request)}")
    from unirl.testing.reward import check_gradient, check_reward

    try:
        response = check_reward(scorer, request)
        print(f"{len(request)} rows: finite; order, other rows, batch size and repetition change nothing")
        if scorer.capabilities.differentiable:
            check_gradient(scorer, request)
            print("the objective equals the score on unrounded images, and its gradient equals finite differences")
    except AssertionError as error:
        raise RewardError(f"{options.reward} violates the contract of scorers. {error}") from error
    RewardService(backend=scorer).probe(request)
    low, high = float(response.total.min()), float(response.total.max())
    print(f"not constant: {low:.4g} to {high:.4g} on rows that differ")
    return 0


def serve(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        parser = Parser("reward serve", "Serve the rewards in a YAML file over HTTP until stopped.", EXAMPLES)
        parser.add_argument(
            "arguments", nargs="*", metavar="CONFIG.yaml [--host H] [--port P] [--token-file F] [--toy]"
        )
        parser.parse(argv or ["-h"])
    need("reward_service", by="unirl reward serve", install="pip install ./unirl-reward-service (in a checkout)")
    from reward_service.__main__ import main

    words = [word for word in argv if word not in ("-c", "--config")]
    status: int = main(words)
    return status


def ping(argv: Sequence[str]) -> int:
    parser = _service_parser("reward ping", "Show the rewards of a service and which replicas are ready.")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    connection = Connection(ConnectionConfig(base_url=options.url, token_file=options.token_file))
    health = connection.health(options.patience)
    connection.close()
    if options.json:
        print(json.dumps({"status": health.status, "rewards": health.rewards}, indent=1))
    else:
        print(f"{options.url}: {health.status}")
        for name, replicas in sorted(health.rewards.items()):
            ready = sum(replica is True for replica in replicas)
            print(f"  {name}: {ready} of {len(replicas)} replicas ready")
    return 0 if health.status == "ok" else RewardError.exit_status


def bench(argv: Sequence[str]) -> int:
    parser = _service_parser("reward bench", "Send generated images to a service and measure how long scoring takes.")
    parser.option("-r", "--reward", required=True, metavar="NAME", help="one of the service's rewards")
    parser.option("--items", type=int, default=64, help="number of images (default 64)")
    parser.option("--batch", type=int, default=8, help="images per request (default 8)")
    parser.option("--clients", type=int, default=4, help="requests at the same time (default 4)")
    parser.option("--side", type=int, default=512, help="side of an image in pixels (default 512)")
    options = parser.parse(argv)
    for name in ("items", "batch", "clients", "side"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name} must be >= 1, got {getattr(options, name)}")
    spec = RemoteRewardSpec(
        base_url=options.url,
        token_file=options.token_file,
        required_rewards=(options.reward,),
        batch_size=options.batch,
        concurrency=1,
    )
    remote = RemoteRewardBackend(config=spec)
    rows = drawn_rows(("images", "prompts"), options.reward, options.side)
    rows = replace(rows, metadata=[{}] * len(rows))
    requests = [rows.select([i % len(rows) for i in range(start, min(start + options.batch, options.items))])
                for start in range(0, options.items, options.batch)]  # fmt: skip
    remote.check_start()
    begun = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as clients:
        latencies = sorted(clients.map(partial(_timed, remote), requests))
    seconds = time.perf_counter() - begun
    p50, p99 = (latencies[min(int(share * len(latencies)), len(latencies) - 1)] for share in (0.5, 0.99))
    print(
        f"{options.items} images of {options.side} x {options.side} in {seconds:.2f} s: "
        f"{options.items / seconds:.1f} per second, {options.clients} requests of {options.batch} at the same time, "
        f"latency p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"
    )
    return 0


def _timed(remote: RemoteRewardBackend, request: RewardRequest) -> float:
    begun = time.perf_counter()
    remote.score(request)
    return time.perf_counter() - begun


def _service_parser(command: str, summary: str) -> Parser:
    parser = Parser(command, summary, EXAMPLES)
    parser.add_argument("url", metavar="URL", help="http://host:port")
    parser.option("--token-file", help="a file with the service's token")
    parser.option("--patience", type=float, default=0.0, metavar="SECONDS", help="how long to wait for its start")
    return parser


# Rows


def _rows_parser(command: str, summary: str) -> Parser:
    parser = Parser(command, summary, EXAMPLES)
    parser.option("-r", "--reward", required=True, metavar="NAME", help="a name of `unirl reward ls`, or a class")
    parser.option("--image", action="append", default=[], metavar="FILE")
    parser.option("--prompt", action="append", default=[], metavar="TEXT", help="one for all rows, or one per row")
    parser.option("--text", action="append", default=[], metavar="TEXT", help="generated text")
    parser.option("--metadata", action="append", default=[], metavar="JSON", help="one for all rows, or one per row")
    parser.option("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the scorer")
    parser.option("--toy", action="store_true", help="use a tiny network with random weights")
    parser.option("--plugins", default="", metavar="PACKAGE,...", help="packages whose classes -r may name")
    return parser


def scorer_of(options: Namespace, toy: bool = False) -> RewardScorer:
    """The scorer in the options --reward, --set and --plugins. Raises ConfigError as a run does."""
    plugins = [name for name in options.plugins.split(",") if name]
    scorer = make_scorer(options.reward, settings_of(options.set), toy=toy, plugins=plugins)
    check_scorer(scorer)
    return scorer


def settings_of(words: Sequence[str]) -> dict[str, object]:
    """The values of `--set key=value ...`."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ArgumentError(f"--set {word}: write --set key=value")
        settings[key] = yaml.safe_load(value)
    return settings


OPTION_OF = {"images": "image", "prompts": "prompt", "texts": "text", "metadata": "metadata"}
"""Column of a request to the option that gives its values."""


def rows_of(options: Namespace, reads: Sequence[str]) -> RewardRequest:
    """The request in the options, with the columns that the scorer reads."""
    given = {column: vars(options)[option] for column, option in OPTION_OF.items()}
    count = max(map(len, given.values()))
    for column in reads:
        if column not in given:
            raise ArgumentError(f"{options.reward} reads {column}, for which the command line has no option")
        if len(given[column]) == 1 and column in ("prompts", "metadata"):
            given[column] = given[column] * count
        if not given[column] and column in ("prompts", "metadata"):
            raise ArgumentError(
                f"{options.reward} reads {column}, and no --{OPTION_OF[column]} is given: give one for all rows, or "
                "one for each"
            )
        if len(given[column]) != count or not count:
            raise ArgumentError(
                f"{options.reward} reads {column}: give --{OPTION_OF[column]} once for each of the {max(count, 1)} rows"
                f" (it is given {len(given[column])} times)"
            )
    return RewardRequest(
        sample_ids=options.image or [f"row {row}" for row in range(count)],
        prompts=given["prompts"] if "prompts" in reads else None,
        images=_read_images(given["images"]) if "images" in reads else None,
        texts=given["texts"] if "texts" in reads else None,
        metadata=[_mapping(text) for text in given["metadata"]] if "metadata" in reads else None,
    )


def _read_images(paths: Sequence[str]) -> Tensor:
    images = []
    for path in paths:
        try:
            images.append(read_image(path))
        except DataError as error:
            raise type(error)(f"--image {path}: {error}") from error
    sizes = {(image.height, image.width, 3) for image in images}
    if len(sizes) > 1:
        raise DataError(f"the images have different sizes {sorted(sizes)}: score images of one size together")
    return _pixels(images)


def _pixels(images: Sequence[Image.Image]) -> Tensor:
    """[B, 3, H, W] in [0, 1]."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 255


def _mapping(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"--metadata {text}: not valid JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise ArgumentError(f'--metadata {text}: a JSON object is needed, such as \'{{"answer": "4"}}\'')
    return value


WORDS = ("OPEN", "CAFE", "EXIT", "SALE")
PROMPT_WORDS = ("OPEN", "CAFE", "EXIT", "WARM")
"""The last prompt names another word than its sign shows."""
COLORS = ("red", "green", "blue", "yellow")


def drawn_rows(reads: Sequence[str], name: str, side: int = 96) -> RewardRequest:
    """Four different rows: signs of four colors, each with a word. One word differs from its prompt."""
    unknown = set(reads) - {"images", "prompts"}
    if unknown:
        raise ArgumentError(
            f"{name} reads {', '.join(sorted(unknown))}, which cannot be generated: give your own rows "
            "(--prompt, --text, --metadata)"
        )
    images = []
    for number, (word, color) in enumerate(zip(WORDS, COLORS, strict=True)):
        image = Image.new("RGB", (side, side), "white")
        draw = ImageDraw.Draw(image)
        draw.ellipse((8 + 4 * number, 8, side - 8, side - 8 - 6 * number), fill=color)
        draw.text((side / 2, side / 2), word, fill="black", anchor="mm", font_size=24)
        images.append(image)
    prompts = [f'a {color} sign with the word "{word}"' for word, color in zip(PROMPT_WORDS, COLORS, strict=True)]
    return RewardRequest(
        sample_ids=[f"generated row {row}" for row in range(len(WORDS))],
        prompts=prompts if "prompts" in reads else None,
        images=_pixels(images) if "images" in reads else None,
    )
