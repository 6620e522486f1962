"""From the training code to a checkpoint folder in the Hugging Face layout, and the check that transformers agrees."""

from __future__ import annotations

import json
import os

import torch
from corpus import BOS, CONTEXT, EOS
from network import CHOSEN, EPS, EXPERTS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, THETA, VOCAB, WIDTH
from safetensors.torch import save_file

PAD = 2


def hub_tensors(model):
    """The weights under the names and in the shapes of a Mixtral checkpoint, rounded to bf16."""
    tensors = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head,
    }
    for n, block in enumerate(model.blocks):
        prefix = f"model.layers.{n}."
        q, k, v = block.attention.qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        tensors.update(
            {
                prefix + "input_layernorm.weight": block.norm1.weight,
                prefix + "post_attention_layernorm.weight": block.norm2.weight,
                prefix + "self_attn.q_proj.weight": q,
                prefix + "self_attn.k_proj.weight": k,
                prefix + "self_attn.v_proj.weight": v,
                prefix + "self_attn.o_proj.weight": block.attention.out,
                prefix + "block_sparse_moe.gate.weight": block.experts.router,
            }
        )
        for e in range(EXPERTS):
            w1, w3 = block.experts.w13[e].chunk(2)
            name = f"{prefix}block_sparse_moe.experts.{e}."
            tensors.update({name + "w1.weight": w1, name + "w3.weight": w3, name + "w2.weight": block.experts.w2[e]})
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=2, ensure_ascii=False)
        handle.write("\n")


def export(model, tokenizer, folder, balance):
    os.makedirs(folder, exist_ok=True)
    save_file(hub_tensors(model), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    write_json(
        folder,
        "config.json",
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rope_theta": THETA,
            "rms_norm_eps": EPS,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "router_jitter_noise": 0.0,
            "router_aux_loss_coef": balance,
            "output_router_logits": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        },
    )
    write_json(
        folder,
        "generation_config.json",
        {
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
        },
    )
    write_json(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )


@torch.no_grad()
def largest_difference(model, folder, rows):
    """Largest difference of these logits to those of transformers' Mixtral, both float32 with the exported weights."""
    from transformers import AutoModelForCausalLM

    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).float())
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return (model(rows)[0] - theirs(rows).logits).abs().max().item()
