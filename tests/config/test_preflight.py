"""What is refused on the driver before anything loads, and how it is said."""

import dataclasses
import re
import shutil
import sys
import time
from contextlib import nullcontext

import pytest

from unirl.config.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DependencyError,
    IncompatibleError,
    InvalidValueError,
    UniRLError,
)
from unirl.config.load import load
from unirl.config.recipe import RecipeConfig
from unirl.config.recipe_files import find_recipe
from unirl.config.targets import find_target
from unirl.plan.compatibility import OTHER_MODALITY
from unirl.plan.machine import check_engines
from unirl.plan.notices import data_notices
from unirl.plan.preflight import check_disk, preflight
from unirl.rollout.engine.base import EngineUse
from unirl.rollout.engine.sglang.engine import SGLangRolloutEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.trainer.assemble import build_trainer

RECIPE = "diffusion/sd3_trainside"


def refused(*overrides):
    with pytest.raises(UniRLError) as caught:
        preflight(load(RECIPE, overrides))
    return caught.value


def test_the_shipped_recipe_may_start():
    assert preflight(load(RECIPE)).geometry.num_samples == 768


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (["num_devices=8", "runtime=local"], 2020, "Set runtime=ray"),
        (["placement={train: 0-3, rollout: 4-7}"], 2010, "Set num_devices=4"),
        (["stack.num_updates_per_batch=5"], 2010, "does not divide the 768 samples"),
        (["stack.num_updates_per_batch=0"], 2004, "stack.num_updates_per_batch must be >= 1, got 0"),
        (["stack.micro_batch_size=-1"], 2004, "stack.micro_batch_size must be >= 1, got -1"),
        (["sampling.height=500"], 2004, "sampling.height=500 is not a positive multiple of 16"),
        (["sampling.num_inference_steps=1"], 2004, "sampling.sde_steps"),
        (["sampling.kernel._target_=unirl.sde.kernels.EulerODE"], 2020, "no step of sampling has one (EulerODE"),
        (["~sampling.sde_steps", "sampling.sde_indices=[]"], 2020, "trains on log-probs"),
        (["evaluation.weights=ema"], 2020, "backend.ema_cfg"),
        (["evaluation.temperature=0.5"], 2020, "Write ~evaluation.temperature. Evaluation can set"),
        (["sampling={_target_: unirl.types.sampling.ARSamplingParams}"], 2004, "sd3 samples with Diffusion"),
        (["algorithm={_target_: unirl.algorithms.ar_grpo.ARGRPO}"], 2020, "trains what is sampled by ARSamplingParams"),
        (["trainer={_target_: unirl.trainer.text.TextTrainer}"], 2020, "TextTrainer is for text, and SD3"),
        (["scale=toy", "backend.trainable_attr=vae"], 2020, "Write trainable_attr: transformer"),
        (["bundle.path=/no/such/folder"], 4001, "there is no such directory"),
        (["bundle.path=toy2"], 4001, "toy2"),
        (["data_source.data_path=nowhere.txt"], 4002, "DATA_PATH"),
        (["evaluation.data_path=nowhere.txt"], 4002, "EVAL_DATA_PATH"),
        (
            [
                "sampling.init_same_noise=true",
                "sampling.kernel={_target_: unirl.sde.kernels.EulerODE}",
                "backend.ema_lora_cfg={}",
                "algorithm={_target_: unirl.algorithms.diffusion_nft.DiffusionNFT, velocity_coef: 0}",
            ],
            2020,
            "compares the samples of a prompt, which would all be the same: all samples of a prompt start from the",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_rule_and_way_out(overrides, code, says):
    error = refused(*overrides)
    assert error.code == code
    assert says in str(error)


def test_sampling_settings_without_what_the_loop_asks_of_them_are_refused():
    error = refused("plugins=[tests]", "sampling={_target_: tests.config.stand_ins.HalfSampling}")
    assert error.code == 2004
    assert str(error).startswith(
        "sampling must be a unirl.types.sampling.Sampling, and HalfSampling has no at_size, density_problem, describe, "
        "for_evaluation, rows_per_sample"
    )


def test_responses_of_evaluations_fit_the_context_too():
    settings = ["scale=toy", "evaluation.max_new_tokens=2000"]
    with pytest.raises(
        ConfigError, match=r"in evaluations, .* \+ max_new_tokens=2000 is more than the context of \w+, 2048 tokens"
    ):
        preflight(load("llm/qwen3_grpo_4b_base_dapo", settings))


def test_a_missing_data_file_is_answered_with_the_most_similar_one(tmp_path):
    (tmp_path / "prompts_train.txt").write_text("a cat\n")
    error = refused(f"data_source.data_path={tmp_path}/prompt_train.txt")
    assert isinstance(error, DataError)
    assert f"Did you mean '{tmp_path}/prompts_train.txt'?" in str(error)


EULER = "sampling.kernel._target_=unirl.sde.kernels.EulerODE"
LOGIT_NORMAL = "unirl.algorithms.shared.training_times.LogitNormalTimes"
NFT = ("algorithm._target_=unirl.algorithms.diffusion_nft.DiffusionNFT", EULER)
DPO = ("algorithm._target_=unirl.algorithms.diffusion_dpo.DiffusionDPO", EULER)
AWM = ("algorithm._target_=unirl.algorithms.diffusion_awm.DiffusionAWM", EULER)
OLD = "backend.ema_lora_cfg={}"


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (
            NFT,
            2020,
            "DiffusionNFT samples from the weight snapshot 'old', which the backend does not keep. Write backend.e",
        ),
        ((*AWM, "algorithm.ema_coef=0.1"), 2020, "reads the weight snapshot 'old'"),
        ((*AWM, "algorithm.ema_coef=0.1", "algorithm.ema_snapshot=ema"), 2020, "Write backend.ema_cfg={}"),
        ((*DPO, "stack.micro_batch_size=2", "algorithm.reference=ema"), 2020, "reads the weight snapshot 'ema'"),
        ((*NFT, OLD, "weight_sync_interval=2"), 2020, "Set weight_sync_interval=1"),
        ((*NFT, OLD, "sampling.guidance_scale=4.5"), 2020, "CFG at rollout and not at training"),
        ((*AWM, "sampling.guidance_scale=4.5"), 2020, "algorithm.train_guided=true"),
        ((*NFT, OLD, "algorithm.times={fraction: 0.1, skip_first: true}"), 2004, "nothing to draw from"),
        ((*NFT, OLD, "algorithm.times={fraction: 2}"), 2004, "algorithm.times.fraction"),
        ((*DPO, "stack.micro_batch_size=1"), 2010, "Use stack.micro_batch_size=2"),
        ((*DPO, "stack.micro_batch_size=2", "stack.num_updates_per_batch=5"), 2010, "does not divide the 96 samples"),
        (
            (*DPO, "stack.micro_batch_size=2", "sampling.samples_per_prompt=1"),
            2010,
            "Use sampling.samples_per_prompt=2",
        ),
    ],
)
def test_losses_on_clean_samples_are_refused_what_they_cannot_work_with(overrides, code, says):
    error = refused(*overrides)
    assert error.code == code
    assert says in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        (*NFT, OLD),
        (*NFT, OLD, "algorithm.times={num_times: 12}"),
        (*NFT, OLD, "sampling.guidance_scale=4.5", "algorithm.train_guided=true"),
        (
            *NFT,
            OLD,
            "algorithm.times={_target_: unirl.algorithms.shared.training_times.LogitNormalTimes, num_times: 12}",
        ),
        (*AWM, OLD, "algorithm.ema_coef=0.1"),
        (*DPO, "stack.micro_batch_size=2", "algorithm.pairs_per_group=99"),
        (*DPO, "scale=toy"),
        DPO,
        (*DPO, "stack.micro_batch_size=2", "algorithm.reference=ema", "backend.ema_cfg={every: 40, target_decay: 0}"),
        ("algorithm._target_=unirl.algorithms.diffusion_rwr.DiffusionRWR", EULER),
    ],
)
def test_losses_on_clean_samples_may_start_without_a_stochastic_step(overrides):
    preflight(load(RECIPE, overrides))


def test_an_engine_that_cannot_sample_a_snapshot_is_refused_to_a_loss_that_needs_it(monkeypatch):
    only_live = dataclasses.replace(TrainsideRolloutEngine.capabilities, snapshots=False)
    monkeypatch.setattr(TrainsideRolloutEngine, "capabilities", only_live)
    error = refused(*NFT, OLD)
    assert error.code == 2020
    assert "samples from a weight snapshot, and TrainsideRolloutEngine cannot" in str(error)


def test_an_average_makes_its_evaluation_legal():
    preflight(load(RECIPE, ["backend.ema_cfg={}", "evaluation.weights=ema"]))


def test_settings_without_effect_and_values_from_the_environment_are_said_once(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    said = preflight(load(RECIPE, ["weight_sync_interval=2", "sampling.samples_per_prompt=1"])).notices
    assert len(said) == 3
    assert any("weight_sync_interval=2 has no effect" in line for line in said)
    assert any("a group of one has no advantage" in line for line in said)
    assert any("run.dir" in line and "OUTPUT_DIR" in line for line in said)


@pytest.mark.parametrize(
    ("overrides", "is_idle"),
    [((OLD,), True), ((*NFT, OLD), False), ((*AWM, OLD, "algorithm.ema_coef=0.1"), False), ((*AWM, OLD), True)],
    ids=str,
)
def test_a_notice_names_the_snapshot_old_if_the_loss_never_reads_it(overrides, is_idle):
    notices = preflight(load(RECIPE, overrides)).notices
    assert any("backend.ema_lora_cfg has no effect on training" in line for line in notices) == is_idle


@pytest.mark.parametrize(
    ("name", "words", "is_said"),
    [
        (RECIPE, [], True),
        ("diffusion/sd3_rwr", [], False),
        ("diffusion/sd3_rwr", ["algorithm.weighting=reward"], False),
        ("diffusion/sd3_rwr", ["algorithm.weighting=advantage"], True),
        ("diffusion/sd3_ppo", [], True),
        ("diffusion/sd3_ppo", ["algorithm.outcome=rewards"], False),
        ("diffusion/sd3_refl", [], False),
    ],
)
def test_that_a_group_of_one_teaches_nothing_is_said_of_losses_that_learn_from_advantages(name, words, is_said):
    said = preflight(load(name, [*words, "sampling.samples_per_prompt=1", "stack.num_updates_per_batch=1"])).notices
    assert any("a group of one has no advantage" in line for line in said) == is_said


def test_a_disk_that_is_too_full_is_refused_with_both_numbers(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_disk(tmp_path / "run" / "that is not there yet", free / 2, "5 checkpoints")
    with pytest.raises(CheckpointError) as caught:
        check_disk(tmp_path / "run", free * 2.0, "5 checkpoints")
    assert (caught.value.code, caught.value.exit_status) == (7003, 7)
    assert "5 checkpoints needs" in str(caught.value)


def test_checking_a_recipe_takes_well_under_two_seconds_once_torch_is_there():
    load(RECIPE)
    start = time.process_time()
    preflight(load(RECIPE, ["scale=toy"]))
    assert time.process_time() - start < 2.0


MISMATCH = "algorithm.mismatch={_target_: unirl.algorithms.shared.mismatch.TokenTIS}"
EIGHT_BIT = ("diffusion/sd3_replica_lora_colocate", "rollout.weight_dtype=fp8")


def test_an_engine_in_eight_bits_needs_a_loss_that_weighs_by_its_log_probs():
    recipe, *words = EIGHT_BIT
    with pytest.raises(
        UniRLError, match=r"DiffusionGRPO takes its samples .* algorithm\.old_logp_source=rollout"
    ) as caught:
        preflight(load(recipe, words))
    assert caught.value.code == 2020
    preflight(load(recipe, [*words, "algorithm.old_logp_source=rollout"]))
    preflight(load(recipe, [*words, MISMATCH]))


def test_a_loss_may_also_correct_the_mismatch_of_an_engine_in_eight_bits():
    replica = "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine"
    sync = "sync={_target_: unirl.distributed.weight_sync.sync.EngineSync}"
    words = [f"rollout={{_target_: {replica}, weight_dtype: fp8}}", sync]
    with pytest.raises(
        UniRLError, match=r"algorithm\.mismatch\._target_=unirl\.algorithms\.shared\.mismatch\.TokenTIS"
    ):
        preflight(load("llm/quickstart", words))
    preflight(load("llm/quickstart", [*words, MISMATCH]))


@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        ("llm/quickstart", ["backend.lora_cfg={}"], "Set sync.merge_adapters=true"),
        ("llm/quickstart", ["algorithm.old_logp_source=rollout"], "Set algorithm.old_logp_source=replay"),
        ("diffusion/quickstart", [], "is for text, and SD3Pipeline makes image"),
        (
            "llm/quickstart",
            ["pipeline.tools={_target_: unirl.models.language.tools.Calculator}"],
            "cannot run tools within a response",
        ),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_starts(recipe, overrides, says):
    with pytest.raises(UniRLError) as caught:
        preflight(load(recipe, ["rollout=server", *overrides]))
    assert caught.value.code == 2020 and says in str(caught.value)


def test_a_server_takes_merged_adapters():
    preflight(load("llm/quickstart", ["rollout=server", "backend.lora_cfg={}", "sync.merge_adapters=true"]))


def test_checking_imports_no_heavy_library(monkeypatch):
    heavy = ("ray", "datasets")
    for name in heavy:  # other tests of this process may have imported it
        monkeypatch.delitem(sys.modules, name, raising=False)
    preflight(load(RECIPE))
    assert not set(heavy) & set(sys.modules)


def test_a_recipe_that_lacks_blocks_says_which(tmp_path):
    (tmp_path / "bare.yaml").write_text("batch_size: 2\n")
    with pytest.raises(ConfigError, match="bundle is required"):
        load(str(tmp_path / "bare.yaml"))


def test_scalars_of_the_recipe_have_ranges():
    for key in ("batch_size", "num_rollouts", "num_devices"):
        assert str(refused(f"{key}=0")) == f"{key} must be >= 1, got 0 (command line: {key}=0)"
    assert refused("save_interval=-1").code == 2004
    assert "must be <= 65536" in str(refused("num_devices=65537"))
    assert "stall_timeout_s must be > 0, got 0" in str(refused("stall_timeout_s=0"))
    assert "parity.stop must be >= warn (0.5) or 0, got 0.05" in str(refused("parity.stop=0.05"))
    assert RecipeConfig.__dataclass_fields__["num_rollouts"].default == 100
    assert find_recipe(RECIPE).card.status in ("untested", "toy", "trained")


def test_the_trainers_that_a_way_out_names_exist():
    """The plan may not import the trainers, so it spells their names."""
    names = re.findall(r"unirl(?:\.\w+)+", " ".join(OTHER_MODALITY.values()))
    assert len([find_target(name, "trainer") for name in names]) == 1
    assert "rollout=replica" in OTHER_MODALITY["rollout"]


@pytest.mark.parametrize("target", ["unirl.types.protocols.Capabilities", "unirl.trainer.loop.Trainer"])
def test_a_trainer_must_name_its_track(target):
    with pytest.raises(ConfigError, match="is not a trainer that names its track") as refused:
        preflight(load(RECIPE, [f"trainer._target_={target}"]))
    assert refused.value.code == 2004


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        ("diffusion/sd3_sglang_replay_colocate", ["sampling.init_same_noise=true"], r"init_same_noise=false"),
        ("diffusion/sd3_dancegrpo", ["rollout=sglang_diffusion"], "SGLang has no DanceSDEStrategy"),
        (
            "diffusion/sd3_mixgrpo_flash",
            ["rollout=sglang_diffusion", "sampling.init_same_noise=false"],
            r"sampling\.solver: SGLang takes Euler steps",
        ),
        (
            "diffusion/sd3_trainside",
            ["rollout=sglang_diffusion", "sampling.tail_fraction=0.5"],
            "takes no noise levels",
        ),
        ("diffusion/wan21_t2v", ["rollout=sglang_diffusion"], "SGLangRolloutEngine is for image"),
        ("diffusion/z_image_trainside", ["rollout=sglang_diffusion"], "has no family z_image"),
        (
            "diffusion/qwen_image_trainside",
            ["rollout=sglang_diffusion", "rollout.tp_size=2"],
            r"Set rollout\.tp_size=1",
        ),
        ("diffusion/wan22_i2v", ["rollout=vllm_omni"], r"this model \(wan22\) needs them"),
    ],
)
def test_what_a_diffusion_server_cannot_sample_is_refused_before_it_starts(recipe, words, says):
    with pytest.raises(IncompatibleError, match=says):
        preflight(load(recipe, ["scale=toy", *words]))


@pytest.mark.parametrize(
    ("recipe", "program", "length"),
    [
        ("diffusion/sd3_trainside", "sglang", 256),
        ("diffusion/hunyuan_video15_t2v_dancegrpo_trainside", "vllm_omni", 1000),
    ],
)
def test_a_length_of_text_that_a_real_server_ignores_is_refused_before_it_starts(recipe, program, length):
    engine = "sglang_diffusion" if program == "sglang" else program
    words = ["scale=toy", f"rollout={engine}", "sampling.max_sequence_length=77"]
    preflight(load(recipe, words))  # a fake server takes any length
    with pytest.raises(IncompatibleError, match=rf"Set sampling\.max_sequence_length={length}"):
        preflight(load(recipe, [*words, f"rollout.program={program}"]))


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        ("unified_model/hi3_vllmomni", [], "samples with ReplicaRolloutEngine, in place of vLLM-Omni"),
        ("pe/pe_sglang_lora_pickscore", [], "samples with ReplicaRolloutEngine, in place of SGLang"),
        ("diffusion/sd3_vllmomni", [], None),
        ("diffusion/sd3_vllmomni", ["rollout=replica"], "samples with ReplicaRolloutEngine, in place of vLLM-Omni"),
    ],
)
def test_a_recipe_that_is_named_after_another_engine_says_what_it_samples_with(recipe, words, says):
    notices = [line for line in preflight(load(recipe, words)).notices if "after which it is named" in line]
    assert len(notices) == (says is not None) and all(says in line for line in notices)


def test_what_sglang_cannot_sample_is_refused_before_it_starts():
    with pytest.raises(IncompatibleError, match=r"Set sampling\.min_new_tokens=0"):
        preflight(load("llm/quickstart", ["rollout=sglang", "sampling.min_new_tokens=3"]))


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        (
            "llm/quickstart",
            ["rollout=sglang", "num_devices=2", "runtime=ray", "rollout.url=http://127.0.0.1:9"],
            r"rollout\.url=http://127\.0\.0\.1:9 is one server, and 2 devices are to.*placement='{train: 0, ",
        ),
        (
            "diffusion/sd3_sglang_lora_separate",
            ["num_devices=2", "backend.lora_cfg.alpha=2.5"],
            r"backend\.lora_cfg\.alpha=2\.5: SGLang takes integers only.*sync\.merge_adapters=true",
        ),
    ],
)
def test_what_servers_cannot_take_over_is_refused_before_they_start(recipe, words, says):
    with pytest.raises(IncompatibleError, match=says):
        preflight(load(recipe, ["scale=toy", *words]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["save_interval=2", "checkpoint.keep_every=3"], r"keep_every=3 must be a multiple of save_interval=2"),
        (["save_interval=0", "checkpoint.keep_every=3"], r"keep_every=3 must be a multiple of save_interval=0"),
        (["checkpoint.copy_to=/tmp/x"], r"checkpoint\.copy_to=/tmp/x is not a URL of fsspec\. Write SCHEME://PLACE"),
        (["checkpoint.copy_to=gss://b/x"], r"gss://b/x is not a URL of fsspec\. Did you mean 'gc?s'\?"),
        (["checkpoint.copy_to=s3://"], r"copy_to=s3:// is not a URL of fsspec\. Write SCHEME://PLACE"),
    ],
)
def test_settings_of_checkpoints_that_cannot_work_are_refused(words, says):
    with pytest.raises(InvalidValueError, match=says):
        preflight(load("diffusion/quickstart", words))


def test_memory_is_shared_with_servers_of_this_machine_alone():
    here = ["rollout=sglang_diffusion", "rollout.transport=ipc", "rollout.model_id=stable-diffusion-3.5-medium"]
    preflight(load("diffusion/sd3_trainside", [*here, "rollout.url=http://localhost:9"]))
    with pytest.raises(InvalidValueError, match=r"rollout\.transport=ipc.*http://gpu7:9.*rollout\.transport=http"):
        preflight(load("diffusion/sd3_trainside", [*here, "rollout.url=http://gpu7:9"]))


def test_a_folder_by_whose_name_sglang_knows_no_model_is_refused_before_it_starts(tmp_path):
    use = EngineUse(num_devices=1, adapter_alpha=None, model_path=str(tmp_path), num_weights=2)
    SGLangRolloutEngine.check_use({"url": None, "model_id": "stable-diffusion-3.5-medium"}, use)
    SGLangRolloutEngine.check_use({"url": "http://127.0.0.1:9", "model_id": None}, use)
    with pytest.raises(IncompatibleError, match=rf"bundle\.path={tmp_path} is a folder.* Set rollout\.model_id"):
        SGLangRolloutEngine.check_use({"url": None, "model_id": None}, use)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("llm/quickstart", ["rollout=sglang", "rollout.engine_args={tp-size: 2}"]),
        ("diffusion/quickstart", ["rollout=sglang_diffusion", "rollout.engine_args={--num_gpus: 2}"]),
        ("diffusion/quickstart", ["rollout=vllm_omni", "rollout.engine_args={num_gpus: 2}"]),
    ],
)
def test_arguments_that_an_engine_sets_itself_are_refused_before_it_starts(recipe, words):
    with pytest.raises(InvalidValueError, match=r"rollout\.engine_args sets .*, which the engine sets itself"):
        preflight(load(recipe, words))


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [
        ("llm/quickstart", "sglang"),
        ("diffusion/quickstart", "sglang_diffusion"),
        ("diffusion/quickstart", "vllm_omni"),
    ],
)
def test_a_run_without_the_environment_of_its_server_leaves_no_folder(recipe, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("UNIRL_ENGINES", str(tmp_path / "engines"))
    words = [f"rollout={engine}", f"run.dir={tmp_path / 'run'}"]
    for more, says in (([], "unirl engines install"), (["rollout.python_executable=/no/python"], "is no program")):
        missing = pytest.raises(DependencyError, match=says)
        with missing, build_trainer(load(recipe, [*words, *more])):
            pass
    assert not (tmp_path / "run").exists()
    check_engines(load(recipe, [*words, "rollout.url=http://127.0.0.1:9"]))
    check_engines(load(recipe, [*words, "rollout.program=fake"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("url=localhost:30000", r"rollout\.url=localhost:30000 is no address .* http://HOST:PORT"),
        ("url=http://127.0.0.1:300000", r"is no address"),
        ("concurrency=0", r"rollout\.concurrency must be >= 1, got 0"),
        ("tp_size=0", r"rollout\.tp_size must be >= 1, got 0"),
        ("max_restarts=-1", r"rollout\.max_restarts must be >= 0, got -1"),
        ("timeout_s=0", r"rollout\.timeout_s must be > 0 seconds, got 0"),
        ("mem_fraction_static=1.5", r"rollout\.mem_fraction_static is a share .* got 1\.5"),
    ],
)
def test_settings_of_a_server_have_ranges(words, says):
    with pytest.raises(InvalidValueError, match=says):
        preflight(load("llm/quickstart", ["rollout=sglang", f"rollout.{words}"]))
    preflight(load("llm/quickstart", ["rollout=sglang", "rollout.url=http://127.0.0.1:30000"]))


@pytest.mark.parametrize(
    ("old_logp", "words", "says"),
    [
        ("native", ["algorithm.old_logp_source=rollout"], None),
        ("replay", [], None),
        ("replay", ["algorithm.old_logp_source=rollout"], r"Set algorithm\.old_logp_source=replay"),
        ("none", [], "reports neither these nor what the trainer needs to compute them"),
    ],
)
def test_the_origin_of_old_log_probs_is_checked_against_the_loss(monkeypatch, old_logp, words, says):
    """One capability of the engine: it reports log-probs, or what a replay needs, or neither."""
    capabilities = dataclasses.replace(SGLangRolloutEngine.capabilities, old_logp=old_logp)
    monkeypatch.setattr(SGLangRolloutEngine, "capabilities", capabilities)
    loaded = load("diffusion/sd3_sglang_replay_colocate", words)
    with nullcontext() if says is None else pytest.raises(IncompatibleError, match=says):
        preflight(loaded)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (["data_source.data_path=mine.txt"], True),
        (["data_source.data_path=mine.txt", "evaluation.data_path=held.txt"], False),
        (["data_source.data_path=mine.txt", "evaluation.data_path=null"], False),
        (["data_source.data_path=mine.txt", "evaluation.eval_steps=0"], False),
        (["evaluation.data_path=held.txt"], False),
        ([], False),
    ],
)
def test_prompts_of_evaluations_that_stay_those_of_the_recipe_are_said(tmp_path, monkeypatch, words, is_said):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.txt", "held.txt"):
        (tmp_path / name).write_text("a red circle\n")
    said = list(data_notices(load("diffusion/quickstart", words)))
    assert bool(said) == is_said
    if said:
        assert said[0].startswith(
            "evaluations still score the prompts of datasets/shapes/eval.jsonl (quickstart.yaml:44), and training "
            "those of mine.txt: set evaluation.data_path to held-out prompts of yours, or evaluation.data_path=null"
        )


def test_an_own_recipe_and_the_environment_are_told_of_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a red circle\n")
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [diffusion/quickstart, _self_]\ndata_source: {data_path: mine.txt}\n")
    assert len(list(data_notices(load(str(own))))) == 1
    assert not list(data_notices(load("diffusion/quickstart_dpo_offline"))), "a recipe that ships means what it says"
    monkeypatch.setenv("DATA_PATH", "mine.txt")
    assert len(list(data_notices(load("diffusion/quickstart")))) == 1
