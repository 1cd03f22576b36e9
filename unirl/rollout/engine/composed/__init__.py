"""Engines of several policies, composed: a language model rewrites prompts, a diffusion model draws them."""
