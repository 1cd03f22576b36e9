"""`unirl engines`: their environments, and servers that speak the messages of an engine without its packages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unirl.cli.arguments import Parser, run_verb
from unirl.cli.engine_install import INSTALL_EXAMPLES, LIST_EXAMPLES, install, show
from unirl.config.errors import AddressError, InvalidValueError
from unirl.config.failures import Session

if TYPE_CHECKING:
    from unirl.rollout.engine.vllm_omni.program.listener import WireServer
    from unirl.testing.conformance.served import ServedModel
    from unirl.types.protocols import DtypeName

EXAMPLES = (
    "unirl engines fake --engine sglang_llm --path toy --port 30000",
    "unirl engines fake --engine sglang_llm --path quickstart --port 0 --fault half-answer",
    "unirl engines fake --engine sglang_llm --path toy --port 30000 -- --enable-deterministic-inference",
    "unirl engines fake --engine openai --path toy --port 8000 --fault text-only",
    "unirl engines fake --engine sglang --path toy --port 30000 --fault other-sigmas",
    "unirl engines fake --engine vllm_omni --path toy --port 30000 --fault list",
)
DTYPES: "Mapping[str, DtypeName]" = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ENGINES = ("sglang_llm", "openai", "sglang", "vllm_omni")


def run(argv: list[str], session: Session) -> int:
    examples = (*LIST_EXAMPLES, *INSTALL_EXAMPLES, *EXAMPLES)
    return run_verb("engines", argv, {"list": show, "install": install, "fake": fake}, examples)


def fake(argv: Sequence[str]) -> int:
    words = list(argv)
    own, theirs = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = Parser("engines fake", "Serve a small model with the messages of a real engine. Ctrl-C ends it.", EXAMPLES)
    parser.option("--engine", choices=ENGINES, default=ENGINES[0], help="whose messages it speaks")
    parser.option(
        "--path",
        default="toy",
        help="toy (random weights), quickstart (trained; tokens only), or the folder of a model",
    )
    parser.option(
        "--bundle", metavar="CLASS", help="with --pipeline: the classes of the model (default: those of a recipe)"
    )
    parser.option("--pipeline", metavar="CLASS", help="see --bundle")
    parser.option("--port", type=int, default=0, help="the port of 127.0.0.1; 0 takes a free one, which is printed")
    parser.option("--dtype", choices=list(DTYPES), default="float32", help="the dtype of the model")
    parser.option("--fault", metavar="NAME", help="make a mistake, to test a client; `list` prints their names")
    parser.epilog = "Arguments after -- are those of the real server."
    options = parser.parse(own)
    from unirl.testing.conformance.faults import FAULTS, checked_fault
    from unirl.testing.conformance.served import RECIPES, ServedModel

    if options.fault == "list":
        print("\n".join(f"{name:<18}{summary}" for name, summary in FAULTS[options.engine].items()))
        return 0
    if not 0 <= options.port <= 65535:
        raise InvalidValueError(f"--port {options.port} is no port: give a number from 0 to 65535")
    fault = checked_fault(options.engine, options.fault)
    model = ServedModel.of_recipe(RECIPES[options.engine], options.path, DTYPES[options.dtype])
    if options.bundle is not None and options.pipeline is not None:
        model = replace(model, bundle=options.bundle, pipeline=options.pipeline)
    try:
        server = fake_server(options.engine)(model, options.port, theirs, fault)
    except OSError as error:
        raise AddressError(f"--port {options.port} cannot be used: {error}. Give another one, or 0") from error
    print(server.url, flush=True)
    server.serve_forever()
    return 0


def fake_server(engine: str) -> "Callable[[ServedModel, int, Sequence[str], str | None], WireServer]":
    """The function that makes the fake server of an engine. It imports the models that the server needs."""
    if engine == "sglang":
        from unirl.testing.conformance.sglang import fake_sglang_diffusion

        return fake_sglang_diffusion
    if engine == "vllm_omni":
        from unirl.testing.conformance.vllm_omni import fake_vllm_omni

        return fake_vllm_omni
    if engine == "openai":
        from unirl.testing.conformance.openai import fake_openai

        return fake_openai
    from unirl.testing.conformance.sglang_llm import fake_sglang

    return fake_sglang
