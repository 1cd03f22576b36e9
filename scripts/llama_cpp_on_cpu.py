"""Serves a tiny Qwen3 with llama.cpp on a CPU, in an environment with xllamacpp, gguf and safetensors, without unirl.

    python scripts/llama_cpp_on_cpu.py MODEL_FOLDER PORT

MODEL_FOLDER is a directory of transformers. Its weights are written next to it as one GGUF file of fp32. The tokenizer
of the file has only the right size: the engine sends and reads token ids.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model of a folder as a GGUF file."""
    import gguf
    from safetensors.numpy import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    layers, size = config["num_hidden_layers"], config["vocab_size"]
    writer = gguf.GGUFWriter(str(file), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<t{token}>" for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["< t"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for weights in folder.glob("*.safetensors"):
        for name, tensor in load_file(weights).items():
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(file: Path, port: int) -> None:
    """Serve until the process ends."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.port = str(file), port
    settings.n_parallel, settings.n_ctx, settings.warmup = 4, 1024, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    # The cache is fp16 otherwise.
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_gguf(folder, folder.with_suffix(".gguf"))
    serve(folder.with_suffix(".gguf"), int(sys.argv[2]))
