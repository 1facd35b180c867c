"""llama.cpp's own converter, for a tokenizer that it has not seen.

`gguf_converter.py FOLDER ARGUMENTS`: FOLDER holds `convert_hf_to_gguf.py`. It knows tokenizers by
hashes of their output; those of the benchmark's checkpoints split text as GPT-2 does.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    script = folder / "convert_hf_to_gguf.py"
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
