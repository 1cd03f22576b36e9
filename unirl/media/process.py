"""Decodes one image in a process of its own, which the system ends if it takes too much memory or time.

    python -m unirl.media.process PIXELS CPU_SECONDS white|opaque < FILE > IMAGE.ppm

The image is that of `decode_upright`. If there is none, standard error has the reason and the exit status is 1.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tempfile
import warnings

from PIL import Image

from unirl.media.files import ImageLimits, UnreadableMedia
from unirl.media.images import BYTES_PER_PIXEL, decode_upright, open_header

MIB = 2**20
SPARE_BYTES = 512 * MIB
"""Address space of the interpreter and its libraries."""
CPU_S = 30
"""CPU time of a process. The largest image takes about 5 s."""
PATIENCE = 10
"""A process counts as stuck after this many times the allowed CPU time, in wall-clock time."""


def limit_process(address_space: int) -> None:
    """Limits the address space of this process, in bytes, and turns off core files."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Pillow warns about large images. Their size is checked before any pixel is read.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def decode_apart(data: bytes, limits: ImageLimits, opaque: bool = False) -> Image.Image:
    """Returns the image of a file as `decode_upright` does, decoded in a process of its own. Raises UnreadableMedia."""
    with tempfile.TemporaryFile() as result:
        command = [
            sys.executable,
            "-m",
            "unirl.media.process",
            str(limits.pixels),
            str(CPU_S),
            "opaque" if opaque else "white",
        ]
        try:
            done = subprocess.run(
                command, input=data, stdout=result, stderr=subprocess.PIPE, timeout=CPU_S * PATIENCE, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UnreadableMedia(f"it is not decoded after {CPU_S * PATIENCE} s") from error
        if done.returncode == -signal.SIGXCPU:
            raise UnreadableMedia(f"it takes more than {CPU_S} s to decode")
        if done.returncode:
            how = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise UnreadableMedia(how or f"its decoder ended with status {done.returncode}")
        result.seek(0)
        with Image.open(result, formats=["PPM"]) as image:
            limits.check(image.width, image.height)
            image.load()
            return image


def main() -> int:
    limits, cpu_s, background = ImageLimits(pixels=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    limit_process(SPARE_BYTES + BYTES_PER_PIXEL * limits.pixels)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    try:
        image = decode_upright(open_header(sys.stdin.buffer.read(), limits), opaque=background == "opaque")
        image.save(sys.stdout.buffer, "PPM")
    except UnreadableMedia as error:
        print(error, file=sys.stderr)
        return 1
    except MemoryError:
        print("it needs more memory than a decoder may use", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
