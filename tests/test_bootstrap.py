"""scripts/bootstrap.sh on machines that lack something; the Python it finds is a stub that notes what it was asked."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.source_tree import ROOT

TOOLS = ("bash", "sh", "cat", "cksum", "df", "awk", "head", "tail", "rm", "mkdir", "cp", "dirname", "chmod", "sleep")

STUB = """#!/bin/sh
echo "$@" >>"{log}"
case "$*" in
  --version) echo "Python {version}"; exit 0 ;;
  *version_info*) exit {unsupported} ;;
  *ensurepip*) exit {no_venv} ;;
  "-m venv "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; exit 0 ;;
  "-m uv "*) sleep {slow}; exit {uv_fails} ;;
  *"-e .[dev] -e ./unirl-reward-service[dev]") exit {pip_fails} ;;
esac
exit 0
"""


class Machine:
    """A checkout in a folder with a blank in its name, and a PATH that holds only `TOOLS` and a stub of python3."""

    def __init__(self, folder: Path):
        self.checkout = folder / "my checkout"
        self.bin = folder / "bin"
        self.log = folder / "log"
        (self.checkout / "scripts").mkdir(parents=True)
        (self.checkout / "unirl-reward-service").mkdir()
        self.bin.mkdir()
        for name in (
            "pyproject.toml",
            "unirl-reward-service/pyproject.toml",
            "constraints.txt",
            "scripts/bootstrap.sh",
        ):
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.python()

    def python(self, version="3.12.1", unsupported=0, no_venv=0, uv_fails=0, pip_fails=0, slow=0):
        facts = {
            "unsupported": unsupported,
            "no_venv": no_venv,
            "uv_fails": uv_fails,
            "pip_fails": pip_fails,
            "slow": slow,
        }
        self.tool("python3", STUB.format(version=version, log=self.log, **facts))

    def tool(self, name: str, text: str):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self) -> subprocess.CompletedProcess:
        self.log.write_text("")
        return subprocess.run(
            ["bash", str(self.checkout / "scripts" / "bootstrap.sh")],
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/")},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=600,
        )

    @property
    def asked(self) -> str:
        return self.log.read_text()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_too_old_a_python_is_named_with_the_way_out(machine):
    machine.python(version="3.9.2", unsupported=1)
    done = machine.start()
    assert done.returncode == 3
    assert "Python 3.9.2" in done.stderr
    assert "3.11 to 3.13" in done.stderr
    assert "apt install python3" in done.stderr


def test_no_python_at_all_is_said(machine):
    (machine.bin / "python3").unlink()
    done = machine.start()
    assert done.returncode == 3
    assert "nothing answers to python3" in done.stderr


def test_a_missing_venv_module_names_the_debian_package(machine):
    machine.python(no_venv=1)
    done = machine.start()
    assert done.returncode == 3
    assert "apt install python3-venv" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_too_little_disk_is_said_in_mebibytes(machine):
    machine.tool("df", "#!/bin/sh\necho Filesystem\necho /dev/x 9999999 9 102400 99% /\n")
    done = machine.start()
    assert done.returncode == 5
    assert "100 MiB free" in done.stderr
    assert machine.asked == ""


def test_a_slow_installation_shows_that_it_goes_on_and_its_signs_of_life_end_with_it(machine):
    machine.python(slow=5)
    done = machine.start()
    assert done.returncode == 0
    ticks = re.findall(r"unirl set-up: installing packages \((\d+) s\)", done.stderr)
    assert ticks and done.stderr.splitlines()[-1].startswith("unirl set-up: ready after")
    assert "Terminated" not in done.stderr


def test_a_second_start_does_nothing(machine):
    assert machine.start().returncode == 0
    assert "-m uv pip install" in machine.asked
    second = machine.start()
    assert (second.returncode, second.stderr, machine.asked) == (0, "", "")


def test_changed_requirements_are_installed_into_the_same_environment(machine):
    machine.start()
    with open(machine.checkout / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    assert machine.start().returncode == 0
    assert "-m uv pip install" in machine.asked
    assert "-m venv" not in machine.asked


def test_an_interrupted_install_is_done_again_from_scratch(machine):
    machine.python(uv_fails=1, pip_fails=1)
    failed = machine.start()
    assert failed.returncode == 3
    assert "could not be installed" in failed.stderr
    machine.python()
    assert machine.start().returncode == 0
    assert "-m venv --clear" in machine.asked


def test_a_moved_checkout_starts_anew(machine, tmp_path):
    machine.start()
    machine.checkout = machine.checkout.rename(tmp_path / "moved here")
    assert machine.start().returncode == 0
    assert "-m venv --clear" in machine.asked


def test_plain_pip_installs_where_uv_cannot(machine):
    machine.python(uv_fails=1)
    done = machine.start()
    assert done.returncode == 0
    assert "trying pip" in done.stderr
    assert "-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]" in machine.asked


@pytest.mark.parametrize("script", ["run.sh", "test.sh", ".ci/run", "scripts/bootstrap.sh"])
def test_scripts_parse_and_can_be_started(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK)
