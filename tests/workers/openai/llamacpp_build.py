"""Builds what the tests of llama-server need in one folder: the server, and the tiny model as GGUF.

    python tests/workers/openai/llamacpp_build.py .venv-llamacpp        (make test-llamacpp does this)

The server is built from the llama.cpp in the llama-cpp-python sdist: CPU only, no curl, no TLS, no web page. It requires a C
and a C++ compiler; cmake comes from PyPI if it is missing. Existing parts are kept.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
SDIST = "llama_cpp_python-0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CMAKE = "cmake==3.31.6"  # only if the machine has none
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_FLAGS_RELEASE=-O2 -DNDEBUG",  # the arithmetic is C
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",  # the rest is templates, and builds in half the time
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_OPENMP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_NUMBER=0",  # otherwise the number of this repository's commits
    f"-DLLAMA_BUILD_COMMIT={SDIST}",  # the same; the server reports both as its version
)


def source_in(folder: Path) -> Path:
    """Return the folder for the sources of llama.cpp."""
    return folder / "source" / SDIST / "vendor" / "llama.cpp"


def server_in(folder: Path) -> Path:
    """Return the path for the server."""
    return folder / "build" / "bin" / "llama-server"


def build(folder: Path) -> None:
    """Build everything that is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not server_in(folder).exists():
        _fetch_source(folder)
        _build_server(folder)
    if not (folder / "tiny.gguf").exists():
        _make_model(folder)


def _fetch_source(folder: Path) -> None:
    sdist = folder / f"{SDIST}.tar.gz"
    name, version = SDIST.replace("_", "-").rsplit("-", 1)
    if not sdist.exists():
        _say(f"downloading the sources of {name} {version} (77 MB)")
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--no-binary", name, "--dest", str(folder), f"{name}=={version}",
        )  # fmt: skip
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        sys.exit(f"{sdist} is not the file that we know: sha256 {found}")
    if not source_in(folder).exists():
        unpacked = folder / "unpacked"
        shutil.unpack_archive(sdist, unpacked)
        unpacked.rename(folder / "source")


def _build_server(folder: Path) -> None:
    cmake, jobs = _cmake(folder), max(1, (os.cpu_count() or 2) // 2)
    _say(f"building llama-server with {jobs} jobs (5 to 15 minutes, once)")
    _run(cmake, "-S", str(source_in(folder)), "-B", str(folder / "build"), *OPTIONS, quiet=True)
    _run(cmake, "--build", str(folder / "build"), "--target", "llama-server", "-j", str(jobs), quiet=True)


def _cmake(folder: Path) -> str:
    """Return a cmake: the machine's, or one from PyPI in its own environment."""
    if found := shutil.which("cmake"):
        return found
    tools = folder / "tools"
    if not (tools / "bin" / "cmake").exists():
        _say("installing cmake")
        venv.create(tools, with_pip=True)
        _run(str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", CMAKE)
    return str(tools / "bin" / "cmake")


def _make_model(folder: Path) -> None:
    model = folder / "tiny"
    _say("making the tiny model")
    _run(str(Path(sysconfig.get_path("scripts")) / "holdfast"), "model", "tiny", str(model))
    converter = Path(__file__).with_name("llamacpp_model.py")
    gguf = source_in(folder) / "gguf-py"
    _run(sys.executable, str(converter), str(gguf), str(model), str(folder / "tiny.gguf"))


def _run(*command: str, quiet: bool = False) -> None:
    ended = subprocess.run(command, cwd=ROOT, capture_output=quiet, text=True, check=False)
    if ended.returncode != 0:
        said = (ended.stdout + ended.stderr)[-3000:] if quiet else ""
        sys.exit(f"{said}\nthis failed with {ended.returncode}: {' '.join(command)}")


def _say(line: str) -> None:
    print(f"{line} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.nice(10)  # a long build: other processes on this machine go first
    build(Path(sys.argv[1]).resolve())
