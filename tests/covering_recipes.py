"""Recipes that together choose whatever any recipe chooses, for tests that would take long with all of them."""

from __future__ import annotations

from tests.source_tree import ROOT
from unirl.config.compose import compose
from unirl.config.merge import leaves
from unirl.config.recipe_files import list_recipes

RECIPES = sorted(recipe.name for recipe in list_recipes((ROOT / "examples",)))
COVERING = {
    "diffusion": """
        flux1_dev_trainside flux2_klein_editreward flux2_klein_sglang hunyuan_video15_t2v_vllmomni_nccl_separate
        hunyuan_video_t2v_trainside lumina2_trainside quickstart_dpo_offline quickstart_dppo quickstart_drtune
        quickstart_ocr qwen_image_edit_trainside qwen_image_mixgrpo sd3_alignprop sd3_awm sd3_ddpo
        sd3_dpo_offline sd3_draft sd3_draft_lv sd3_flowgrpo_fast sd3_geneval2 sd3_mixgrpo_flash sd3_multi_reward
        sd3_nft_sglang sd3_ppo sd3_refl sd3_rwr sd3_trainside_tq_mooncake wan21_i2v wan21_t2v_dancegrpo
        wan22_i2v wan22_t2v_14b_mixgrpo wan22_ti2v_5b z_image_trainside
    """,
    "embodied": """
        cartpole_ppo halfcheetah_ppo libero_gr00t_ppo libero_pi0_dsrl libero_pi0_ppo libero_smolvla_ppo
        maniskill_pickcube_ppo_openvla_oft metaworld_flow_grpo metaworld_push_iql metaworld_reach_dagger
        metaworld_reach_grpo pixel_reach_ppo quickstart_groups world_model_pixel_reach_grpo
    """,
    "llm": """
        quickstart_opd quickstart_rloo qwen3_ar_drpo_4b_base_dpao_sglang qwen3_gspo_4b_base_dapo
        qwen3_ppo_4b_base_dapo
    """,
    "pe": """
        pe_sglang_full_wise pe_trainside_short quickstart
    """,
    "unified_model": """
        bagel_trainside_lora hi3_i2t hi3_t2t hi3_think janus_pro_grpo nextstep_1_grpo
    """,
    "vlm": """
        quickstart
    """,
}
"""Recipes, by folder, that together name every class and every switch that any recipe names."""
COVERED = [f"{folder}/{name}" for folder, names in COVERING.items() for name in names.split()]


def choices_of(recipe: str) -> set[tuple[str, object]]:
    """The keys of a recipe that hold a class, a switch or nothing, with what they hold."""
    composed = leaves(compose(recipe, ["scale=toy"]).resolved())
    return {(key, each) for key, each in composed if key.endswith("_target_") or isinstance(each, bool | None)}
