"""Train a language or vision-language model: python -m unirl.train_vlm --config-name=llm/<recipe> [key=value ...]"""

import sys

from unirl.cli.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], domain="vlm"))
