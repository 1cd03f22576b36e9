"""Train a diffusion or flow model: python -m unirl.train_diffusion --config-name=diffusion/<recipe> [key=value ...]"""

import sys

from unirl.cli.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], domain="diffusion"))
