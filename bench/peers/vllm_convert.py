"""Makes a folder in bfloat16 of a GGUF file, as vLLM's CPU build reads it; runs in vLLM's venv.

python vllm_convert.py FILE.gguf FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    plain = type(model)(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
