"""Writes tiny models with random weights, so that engines run without any download.

usage: tiny_models.py KIND DIR     (needs torch and transformers; seeded: two runs write the same weights)

    latent    multi-head latent attention (DeepSeek): one latent per token for all heads
    windows   layers with a sliding window beside layers with full attention (Gemma 3)
    states    layers with recurrent state beside layers with full attention (Qwen3-Next)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.vllm.tiny_llama import VOCABULARY, write_tokenizer

WINDOW = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def latent() -> PreTrainedModel:
    config = DeepseekV2Config(
        **COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=4,  # all of them: no mixture of experts
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        n_shared_experts=1,
    )
    return DeepseekV2ForCausalLM(config)


def windows() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
    )
    return Gemma3ForCausalLM(config)


def states() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mlp_only_layers=[0, 1, 2],  # vLLM asks for at least one with a mixture of experts
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


def main(kind: str, folder: str) -> None:
    write_tokenizer(folder)
    torch.manual_seed(0)
    model = {"latent": latent, "windows": windows, "states": states}[kind]()
    model.to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
