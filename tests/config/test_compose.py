"""Composition: layers, variants, the command line's grammar, the environment, interpolation. Hydra is the oracle."""

import copy
import shlex

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from unirl.config.compose import ENVIRONMENT, compose, resolve
from unirl.config.errors import ConfigError, UsageError
from unirl.config.load import load
from unirl.config.overrides import OPTIONS
from unirl.config.recipe_files import CARD_SUFFIX, find_recipe, list_recipes
from unirl.trainer.run_folder import continuation

BASE = """\
# @package _global_
batch_size: 4
sampling:
  _target_: unirl.types.sampling.DiffusionSamplingParams
  height: 64
  kernel: {_target_: unirl.sde.kernels.FlowSDEStrategy, eta: 0.5}
run: {name: base}
"""


@pytest.fixture(autouse=True)
def no_path_variables(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def examples(tmp_path):
    """A folder of recipes to write to."""
    folder = tmp_path / "examples" / "diffusion"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(BASE)
    return folder


def composed(examples, name="base", *overrides):
    return compose(f"diffusion/{name}", overrides, (examples.parent,))


def write(examples, name, text):
    (examples / f"{name}.yaml").write_text(text)


def refused(examples, name, *overrides):
    with pytest.raises((ConfigError, UsageError)) as caught:
        composed(examples, name, *overrides).resolved()
    return caught.value


def by_hydra(folder, name, overrides=()):
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return OmegaConf.to_container(hydra.compose(name, overrides=list(overrides)), resolve=False)


OVERRIDES = [
    "batch_size=3",
    "++sampling.width=7",
    "+sampling.extra=null",
    "sampling.sde_indices=[0,2,5]",
    "run.name='a b=c'",
    'run.name="it, is"',
    "run.name=plain-text_1.2/x",
    "sampling.height=1e3",
    "sampling.kernel.eta=.5",
    "flag=true",
    "new.deep.key={a: 1, b: [x, 'y z']}",
    "~sampling.height",
    "~run",
    "run.dir=${run.name}",
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides_mean_what_hydra_says_they_mean(examples, override):
    forced = override if override[0] in "~+" else f"++{override}"
    assert composed(examples, "base", override).tree == by_hydra(examples, "base", [forced])


def test_a_variant_without_a_changed_target_composes_as_hydra_composes_it(examples):
    write(examples, "wide", "# @package _global_\ndefaults: [base, _self_]\nsampling: {width: 9, kernel: {eta: 0.9}}\n")
    assert composed(examples, "wide").tree == by_hydra(examples, "wide")


def test_a_changed_target_replaces_the_node(examples):
    write(
        examples,
        "dance",
        "defaults: [base, _self_]\nsampling: {kernel: {_target_: unirl.sde.kernels.DanceSDEStrategy}}\n",
    )
    tree = composed(examples, "dance").tree
    assert tree["sampling"]["kernel"] == {"_target_": "unirl.sde.kernels.DanceSDEStrategy"}
    assert tree["sampling"]["height"] == 64


@pytest.mark.parametrize("first", [True, False])
def test_a_changed_target_on_the_command_line_keeps_only_what_the_command_line_says(examples, first):
    overrides = ["sampling.kernel._target_=unirl.sde.kernels.EulerODE", "sampling.kernel.order=1"]
    tree = composed(examples, "base", *(overrides if first else overrides[::-1])).tree
    assert tree["sampling"]["kernel"] == {"_target_": "unirl.sde.kernels.EulerODE", "order": 1}


def test_the_same_target_written_again_keeps_the_node(examples):
    tree = composed(examples, "base", "sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy").tree
    assert tree["sampling"]["kernel"]["eta"] == 0.5


@pytest.mark.parametrize("defaults", ["[base, transfer_queue: simple, _self_]", "[transfer_queue: simple]"])
def test_defaults_may_choose_an_option_which_the_recipe_itself_overrules(examples, defaults):
    write(examples, "variant", f"defaults: {defaults}\ntransfer_queue: {{num_units: 3}}\nbatch_size: 2\n")
    tree = composed(examples, "variant").tree
    backend = "unirl.distributed.tensor.backend.transfer_queue.simple.SimpleBackend"
    assert tree["transfer_queue"] == {"_target_": backend, "num_units": 3}


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ("[base, transfer_queue: simpl, _self_]", "transfer_queue: simpl must be one of mooncake, simple"),
        ("[base, nothing: simple, _self_]", "Options such as `transfer_queue: simple` may stand before _self_"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(examples, defaults, says):
    write(examples, "variant", f"defaults: {defaults}\n")
    assert says in str(refused(examples, "variant"))


@pytest.mark.parametrize(
    "defaults",
    [
        "[base]",
        "[_self_, base]",
        "[base, other, _self_]",
        "[../base, _self_]",
        "[../base.yaml, _self_]",
        "[diffusion/bsae, _self_]",
        "[variant.yaml, _self_]",
        "[{group: x}, _self_]",
        "base",
        "[bsae, _self_]",
    ],
)
def test_a_variant_extends_exactly_one_recipe_that_exists(examples, defaults):
    write(examples, "variant", f"defaults: {defaults}\nbatch_size: 2\n")
    assert "variant.yaml" in str(refused(examples, "variant"))


def test_another_class_replaces_a_block_whose_own_is_the_default():
    running = "unirl.algorithms.shared.advantages.RunningAdvantage"
    assert compose("diffusion/sd3_trainside", ()).tree["advantage"] == {"std": "batch"}
    tree = compose("diffusion/sd3_trainside", (f"advantage={{_target_: {running}}}",)).tree
    assert tree["advantage"] == {"_target_": running}
    default = compose(
        "diffusion/sd3_trainside", ("advantage._target_=unirl.algorithms.shared.advantages.GroupAdvantage",)
    ).tree
    assert default["advantage"]["std"] == "batch"


def test_a_variant_in_a_folder_of_the_users_own_extends_a_recipe_that_ships(examples):
    write(examples, "mine", "defaults: [sd3_trainside, _self_]\nbatch_size: 2\n")
    tree, shipped = composed(examples, "mine").tree, compose("diffusion/sd3_trainside", ()).tree
    assert tree == shipped | {"batch_size": 2}


@pytest.mark.parametrize("base", ["diffusion/sd3_trainside", "sd3_trainside", "../shared/base.yaml"])
def test_a_recipe_in_any_folder_extends_by_name_or_by_path(tmp_path, base):
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    shared.mkdir()
    (shared / "base.yaml").write_text("defaults: [diffusion/sd3_trainside, _self_]\n")
    (own / "mine.yaml").write_text(f"defaults: [{base}, _self_]\nbatch_size: 2\n")
    tree, shipped = compose(str(own / "mine.yaml")).tree, compose("diffusion/sd3_trainside").tree
    assert tree == shipped | {"batch_size": 2}


def test_a_variant_of_a_variant_composes_as_hydra_composes_it(examples):
    write(examples, "one", "defaults: [base, _self_]\nsampling: {height: 8, width: 8}\n")
    write(examples, "two", "defaults: [one, _self_]\nsampling: {width: 9}\n")
    assert composed(examples, "two").tree == by_hydra(examples, "two")


def test_recipes_that_ship_extend_whole_recipes():
    layers = {recipe.name: compose(str(recipe.path)).layers for recipe in list_recipes()}
    depths = {name: sum(layer.source != "option" for layer in each) for name, each in layers.items()}
    assert {name for name, depth in depths.items() if depth > 4} == set()


def test_a_cycle_of_recipes_is_refused_with_its_links(examples):
    write(examples, "one", "defaults: [two, _self_]\n")
    write(examples, "two", "defaults: [one, _self_]\n")
    assert "(one.yaml -> two.yaml -> one.yaml)" in str(refused(examples, "one"))


def test_a_base_of_several_domains_must_be_named_with_its_domain(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\n")
    with pytest.raises(
        ConfigError,
        match="Write one of diffusion/quickstart, embodied/quickstart, llm/quickstart, pe/quickstart, vlm/quickstart",
    ):
        compose(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("./mine", "Did you mean 'mine.yaml'"),
        ("mine", "Did you mean 'mine.yaml'"),
        ("./mein.yaml", "Did you mean 'mine.yaml'"),
        ("./mine.txt", "the file of a recipe ends in .yaml"),
        (".", "is a folder"),
        ("list.yaml", "a recipe is a mapping of blocks, got list"),
    ],
)
def test_a_path_that_is_no_recipe_is_answered_with_what_is_there(tmp_path, monkeypatch, typed, answer):
    monkeypatch.chdir(tmp_path)
    for name, text in {"mine.yaml": "batch_size: 2\n", "mine.txt": "", "list.yaml": "- 1\n"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as caught:
        compose(typed)
    assert answer in str(caught.value)


def test_the_command_that_continues_a_run_finds_its_recipe_again(tmp_path):
    own = tmp_path / "diffusion"
    own.mkdir()
    (own / "sd3_trainside.yaml").write_text("defaults: [sd3_trainside, _self_]\nnum_rollouts: 7\n")
    recipe = load(str(own / "sd3_trainside.yaml"), ("batch_size=8",))
    verb, command, name, *overrides, _ = shlex.split(continuation(recipe, tmp_path))
    assert (verb, command) == ("unirl", "train")
    assert load(name, overrides).resolved() == recipe.resolved()


def test_an_override_that_sets_several_blocks_is_written_once(tmp_path):
    """rollout=NAME sets the blocks rollout and sync."""
    recipe = load("llm/quickstart", ("rollout=sglang",))
    assert continuation(recipe, tmp_path).count("rollout=sglang") == 1


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("batch_size", 2003),
        ("=3", 2003),
        ("batch_size=1,2", 2004),
        ("batch_size=range(1,3)", 2004),
        ("sampling={", 2004),
        ("sampling=64", 2005),
        ("sampling.kernel=dance", 2005),
        ("~batch_sizes", 2003),
        ("~", 2003),
        ("kernel@sampling=x", 2003),
        ("a/b=c", 2003),
        ("a..b=1", 2004),
    ],
)
def test_overrides_that_cannot_be_meant_are_refused(examples, override, code):
    assert refused(examples, "base", override).code == code


def test_the_error_for_a_replaced_block_says_what_to_write(examples):
    assert "(sampling.kernel.eta=...), or replace the block: sampling.kernel='{_target_: package.Class}'" in str(
        refused(examples, "base", "sampling.kernel=dance")
    )


def test_one_item_of_a_list_cannot_be_set(examples):
    error = refused(examples, "base", "sampling.sde_indices=[1,2]", "sampling.sde_indices.0=3")
    assert "write the whole list" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "- 1\n- 2\n",
        "batch_size: 1\nbatch_size: 2\n",
        "a: *nowhere\n",
        "a: !!python/object/apply:os.system [x]\n",
    ],
)
def test_broken_yaml_is_one_short_error(examples, text):
    write(examples, "broken", text)
    error = refused(examples, "broken")
    assert error.code == 2004
    assert "broken.yaml" in str(error)


def test_yaml_that_is_not_utf8_is_one_short_error(examples):
    (examples / "latin.yaml").write_bytes(b"run: {name: caf\xe9}\n")
    assert refused(examples, "latin").code == 2004


@pytest.mark.parametrize(
    "value", ["${oc.decode:1}", "${hydra:runtime.cwd}", "x${ oc.create:1}y", "[{a: '${oc.select:b}'}]"]
)
def test_no_other_resolver_than_oc_env_exists(examples, value):
    assert "is not allowed" in str(refused(examples, "base", f"sampling.x={value}"))


def test_references_and_environment_are_resolved(examples, monkeypatch):
    monkeypatch.setenv("MY_FOLDER", "/data")
    tree = composed(examples, "base", "run.dir=${oc.env:MY_FOLDER}/${run.name}", "a=${oc.env:NOT_SET,7}").resolved()
    assert (tree["run"]["dir"], tree["a"]) == ("/data/base", "7")


@pytest.mark.parametrize("value", ["${nothing.here}", "${oc.env:NOT_SET}", "${run.dir}"])
def test_a_reference_to_nothing_is_refused(examples, value):
    error = refused(examples, "base", f"run.dir={value}")
    assert error.code == 2003
    assert "run.dir" in str(error)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": "${oc.env:MY_FOLDER}/x", "c": [1, None, "y"]}, "d": 0.5, "e": {}},
        {"a": [{"b": "${oc.env:NOT_SET,7}"}, 2], "c": {"d": {"e": "${oc.env:NOT_SET,null}", "f": "???"}}},
        {"a": "${oc.env:NOT_SET,${b.c}}", "b": {"c": "${d}", "e": True}, "d": [1, {"f": "g"}]},
        {"a": {"b": "${.c}", "c": 3}, "d": "${a}", "e": "\\${a}"},
    ],
)
def test_what_omegaconf_is_not_given_stays_as_it_would_leave_it(tree, monkeypatch):
    monkeypatch.setenv("MY_FOLDER", "/data")
    as_written = copy.deepcopy(tree)
    assert resolve(tree) == OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    assert tree == as_written


def test_path_variables_work_with_any_recipe(monkeypatch):
    values = {key: f"the {variable}" for variable, key in ENVIRONMENT.items()} | {"bundle.path": "toy"}
    for variable, key in ENVIRONMENT.items():
        monkeypatch.setenv(variable, values[key])
    for recipe in list_recipes():
        loaded = load(recipe.name)
        keys = {key: f"diffusion.{key}" if key == "bundle.path" and "ar" in loaded.policies else key for key in values}
        if recipe.name.startswith("embodied/"):  # starts of episodes come from no file, and new weights neither
            keys = {key: name for key, name in keys.items() if key not in ("bundle.path", "data_source.data_path")}
        assert {key: loaded.value(name) for key, name in keys.items()} == {key: values[key] for key in keys}, (
            recipe.name
        )


def test_the_command_line_beats_the_environment_and_that_the_recipe(examples, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_NAME", "from-env")
    assert composed(examples, "base").tree["run"]["name"] == "from-env"
    both = composed(examples, "base", "run.name=typed")
    assert both.tree["run"]["name"] == "typed"
    assert [(origin.source, origin.value, origin.wins) for origin in both.why("run.name")] == [
        ("command line", "typed", True),
        ("environment", "from-env", False),
        ("recipe", "base", False),
    ]
    assert both.why("run.name")[2].place == "base.yaml:7"


def test_an_empty_path_variable_counts_as_not_set(examples, monkeypatch):
    monkeypatch.setenv("OUTPUT_DIR", "")
    assert "dir" not in composed(examples, "base").tree["run"]


def test_a_recipe_that_reads_a_variable_itself_is_told_apart_from_its_fallback(monkeypatch):
    assert load("diffusion/sd3_trainside").composed.why("bundle.path")[0].source == "recipe"
    monkeypatch.setenv("PRETRAINED_MODEL", "toy")
    assert load("diffusion/sd3_trainside").composed.why("bundle.path")[0].source == "environment"


def test_data_path_is_ignored_by_a_recipe_with_built_in_prompts(tmp_path, monkeypatch):
    tree = load("diffusion/sd3_trainside").composed.tree
    tree["data_source"] = {"_target_": "unirl.data.data_source.DefaultDataSource"}
    (tmp_path / "built_in.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(tree)))
    monkeypatch.setenv("DATA_PATH", "/data/x.txt")
    assert "data_path" not in load(str(tmp_path / "built_in.yaml")).value("data_source")


def test_cfg_job_prints_as_hydra_does(examples):
    assert composed(examples, "base").text() == OmegaConf.to_yaml(by_hydra(examples, "base"))


def test_a_recipe_is_found_by_name_by_path_and_from_anywhere(examples, tmp_path, monkeypatch):
    search = (examples.parent,)
    assert find_recipe("diffusion/base", search).path == examples / "base.yaml"
    assert find_recipe("examples/diffusion/base.yaml", search).path == examples / "base.yaml"
    assert find_recipe(str(examples / "base.yaml"), ()).name == "diffusion/base"
    monkeypatch.chdir(tmp_path)
    assert find_recipe("diffusion/sd3_trainside").name == "diffusion/sd3_trainside"


@pytest.mark.parametrize("folder", ["", "llm/", "vlm/"])
@pytest.mark.parametrize(("wanted", "present"), [("dapo", "dpao"), ("dpao", "dapo")])
def test_a_recipe_with_two_spellings_is_answered_with_the_one_that_is_there(tmp_path, folder, wanted, present):
    """The published name of a recipe has two letters exchanged."""
    (tmp_path / "llm").mkdir()
    for ending in (f"{present}_sglang", "dapo", "dpa0_sglang", "dpap_sglang"):
        (tmp_path / "llm" / f"qwen3_ar_drpo_4b_base_{ending}.yaml").write_text("")
    with pytest.raises(UsageError, match=f"Nearest: llm/qwen3_ar_drpo_4b_base_{present}_sglang,"):
        find_recipe(f"{folder}qwen3_ar_drpo_4b_base_{wanted}_sglang", (tmp_path,))


def test_the_published_spelling_is_the_name_of_the_recipe():
    assert find_recipe("llm/qwen3_ar_drpo_4b_base_dpao_sglang").path.is_file()
    with pytest.raises(UsageError, match="Nearest: llm/qwen3_ar_drpo_4b_base_dpao_sglang,"):
        find_recipe("llm/qwen3_ar_drpo_4b_base_dapo_sglang")


@pytest.mark.parametrize(
    "name", ["diffusion/sd3_trainsid", "sd3_trainside", "diffusion/sd3-trainside", "difusion/sd3_trainside"]
)
def test_an_unknown_recipe_is_answered_with_the_nearest_names(name):
    with pytest.raises(UsageError) as caught:
        find_recipe(name)
    assert caught.value.code == 2001
    assert "Nearest: diffusion/sd3_trainside, " in str(caught.value)


def test_relative_data_of_a_recipe_is_found_from_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = load("diffusion/sd3_trainside").value("data_source.data_path")
    assert path.endswith("/datasets/pickscore/train.txt") and path.startswith("/")


def test_cards_are_not_recipes(examples):
    (examples / f"base{CARD_SUFFIX}").write_text("status: toy\ndate: 2026-11-20\n")
    (recipe,) = list_recipes((examples.parent,))
    assert (recipe.card.status, recipe.card.date, recipe.card.result) == ("toy", "2026-11-20", "none")


@pytest.mark.parametrize("name", ["replica", "server", "sglang", "sglang_diffusion", "trainside", "vllm_omni"])
def test_an_option_takes_the_place_of_the_blocks_that_it_has(name):
    """Keys of the block before are gone, and the command line is the origin of the new ones."""
    composed = compose("llm/quickstart", [f"rollout={name}"])
    blocks = yaml.safe_load((OPTIONS / "rollout" / f"{name}.yaml").read_text())
    tree = composed.tree
    kept = {"forward_batch_size": 256} if name == "trainside" else {}  # the class of the recipe itself
    assert tree["rollout"] == blocks["rollout"] | kept and tree["sync"] == blocks["sync"]
    assert composed.where("rollout") == f" (command line: rollout={name})"


def test_an_option_is_also_that_of_one_of_several_policies():
    tree = compose("pe/quickstart", ["ar.rollout=replica"]).tree
    assert tree["ar"]["rollout"]["_target_"].endswith("ReplicaRolloutEngine") and tree["ar"]["sync"]
    assert tree["diffusion"]["rollout"]["_target_"].endswith("TrainsideRolloutEngine")
    assert "sync" not in tree["diffusion"]


def test_the_origins_that_a_run_records_name_file_and_line_variable_or_command_line(monkeypatch):
    monkeypatch.setenv("PRETRAINED_MODEL", "/models/mine")
    recipe = load("diffusion/sd3_trainside", ["scale=toy", "num_rollouts=3", "sampling.guidance_scale=2.0"])
    origins = recipe.origins()
    assert origins["num_rollouts"] == origins["sampling.guidance_scale"] == {"source": "command line", "place": ""}
    assert {origin["source"] for origin in origins.values()} >= {"recipe", "scale=toy", "command line"}
    file, _, line = origins["algorithm._target_"]["place"].partition(":")
    path = find_recipe("diffusion/sd3_trainside").path
    assert file == path.name
    assert "DiffusionGRPO" in path.read_text().splitlines()[int(line) - 1]
    full = load("diffusion/sd3_trainside").origins()
    assert full["bundle.path"]["source"] == "environment"
    assert full["bundle.path"]["place"].startswith("PRETRAINED_MODEL")
    assert "sampling.negative_prompt" not in full  # a default
