"""Puts a real Triton server beside the environment that runs this: ``python -m tests.serving.triton.install_server``.

The wheel of nvidia-pytriton has the server and its Python backend; PyTriton itself is not used. That backend was
compiled for numpy 1, with which it must find ``import numpy``: so it gets an environment of its own, numpy 1 in it, and
everything else from this one. Where the wheels cannot be had, a line says so, and the tests of the server are skipped.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
"""The latter is what the former wants (below 2); it has wheels for Python 3.9 to 3.12."""
FOLDER = Path(sys.prefix) / "triton"


def site_packages() -> Path:
    """Return where the packages of the server's environment are."""
    return FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def install() -> None:
    """Make the environment.

    Raises:
        subprocess.CalledProcessError: the wheels are not there for this machine.
    """
    venv.create(FOLDER, with_pip=False, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", str(FOLDER / "bin" / "python"), "install"]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, *options, *PACKAGES], check=True)
    # ``addsitedir`` comes after the environment's own packages, and reads the .pth files of editable installations.
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site_packages() / "the_other_environment.pth").write_text(line)


if __name__ == "__main__":
    try:
        install()
    except subprocess.CalledProcessError:
        sys.stderr.write(
            f"note: no Triton server: {' '.join(PACKAGES)} do not install here; its tests will be skipped\n"
        )
