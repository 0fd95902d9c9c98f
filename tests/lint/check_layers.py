#!/usr/bin/env python3
"""Checks the rules of the layout: which folder may include what, and what may lie where.

    check_layers.py [ROOT]         prints every violation; exit status 1 if there is one
    check_layers.py --self-test    proves on small trees that each rule catches its violation
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Arrows of the architecture: a box sees these boxes and whatever they see.
ARROWS = {
    "core": [],
    "config": ["core"],
    "text": ["core"],
    "kernels": ["core"],
    "comm": ["core"],
    "weights": ["config", "text", "kernels", "comm"],
    "model": ["weights"],
    "speculative": ["model"],
    "placement": ["config", "comm"],
    "engine": ["speculative", "placement"],
    "study": ["engine"],
    "launch": ["study"],
    "tests": ["launch"],
}

TOP_LEVEL_FOLDERS = {"src", "kernels", "comm", "launch", "configs", "tests", "slurm"}
TOP_LEVEL_FILES = {
    "CMakeLists.txt", "CMakePresets.json", "README.md", "LICENSE", "CHANGELOG.md",
    "CONTRIBUTING.md", ".clang-format", ".clang-tidy", ".editorconfig", ".gitattributes",
    ".gitignore", ".ci",
}

GPU_FOLDERS = ("kernels/cuda/", "comm/nccl/", "comm/staged/", "comm/peer/", "tests/gpu_mpi/")
MPI_FOLDERS = ("comm/mpi/", "comm/staged/", "launch/", "tests/")
# The two places that choose among implementations, and so may know the GPU ones.
FACTORIES = {"kernels/make_backend.cpp", "comm/make_communicator.cpp"}

GPU_HEADER = re.compile(r"^(cuda|cublas|cudnn|cusparse|curand|nccl|nvtx|nvml|cooperative_groups|"
                        r"cub/|thrust/|cutlass/|cute/|mma\.h|device_launch_parameters\.h)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.}$)-])/(?:work|home|root)(?![\w-])")

CXX_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in"}


def list_files(root: Path) -> list[str]:
    """Paths below root, relative: those git knows or would add; outside git all but build/."""
    git = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
                         cwd=root, capture_output=True, check=False)
    if git.returncode == 0 and (root / ".git").exists():
        names = set(git.stdout.decode().split("\0")) - {""}
    else:
        names = {str(path.relative_to(root)) for path in root.rglob("*")}
        names = {n for n in names if n.split("/")[0] != "build" and "__pycache__" not in n}
    return sorted(name for name in names if (root / name).is_file())


def visible_from(box: str) -> set[str]:
    seen = {box}
    for below in ARROWS[box]:
        seen |= visible_from(below)
    return seen


def box_of(path: str) -> str | None:
    """The box that a source belongs to, None outside all of them."""
    parts = path.split("/")
    box = parts[1] if parts[0] == "src" and len(parts) > 2 else parts[0]
    return box if box in ARROWS else None


def resolve(root: Path, includer: str, target: str) -> str | None:
    """The file, relative to root, that a quoted include means; None if it is not of the project."""
    for base in ("", "src/"):
        if (root / base / target).is_file():
            return base + target
    beside = Path(includer).parent / target
    return str(beside) if (root / beside).is_file() else None


def check_include(root: Path, path: str, kind: str, target: str) -> str | None:
    """What is wrong with one include of `path`, if anything."""
    if GPU_HEADER.match(target) and not path.startswith(GPU_FOLDERS):
        return f"<{target}> is for {', '.join(GPU_FOLDERS)} only"
    if target == "mpi.h" and not path.startswith(MPI_FOLDERS):
        return f"<mpi.h> is for {', '.join(MPI_FOLDERS)} only"
    if kind == "<":
        return None
    found = resolve(root, path, target)
    if found is None and path in FACTORIES and target.startswith(GPU_FOLDERS):
        return None  # under its condition, until there is a GPU implementation
    if found is None:
        return f'"{target}" is found neither from the root nor from src'
    box, included = box_of(path), box_of(found)
    if box and included and included not in visible_from(box):
        return f'"{target}": {box} must not see {included}'
    if (found.startswith(GPU_FOLDERS) and not path.startswith(GPU_FOLDERS)
            and path not in FACTORIES):
        return f'"{target}" is not in every build: only {", ".join(sorted(FACTORIES))} may know it'
    return None


def check_source(root: Path, path: str, text: str) -> list[str]:
    if path.startswith("src/") and box_of(path) is None:
        return ["src/ holds only the folders of the architecture"]
    problems = [check_include(root, path, kind, target) for kind, target in INCLUDE.findall(text)]
    if "KDTREE_WITH_CUDA" in text and path not in FACTORIES:
        problems.append(f"KDTREE_WITH_CUDA is for {', '.join(sorted(FACTORIES))} only")
    return [problem for problem in problems if problem]


def check_tree(root: Path) -> list[str]:
    problems = []
    for path in list_files(root):
        top = path.split("/")[0]
        if top not in TOP_LEVEL_FOLDERS and top not in TOP_LEVEL_FILES:
            problems.append(f"{path}: {top} is not among the agreed entries of the root")
        data = (root / path).read_bytes()
        if b"\0" in data:
            continue
        text = data.decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line):
                problems.append(f"{path}:{number}: names a path of one machine")
        if Path(path).suffix in CXX_SUFFIXES:
            problems += [f"{path}: {problem}" for problem in check_source(root, path, text)]
    return problems


# Each case: the files of a tree, and a part of the only message expected (None: no message).
ROOT_FOLDER = "/" + "root"
CASES = [
    ({"src/model/a.cpp": '#include "kernels/backend.h"\n#include "core/check.h"\n'}, None),
    ({"src/speculative/a.cpp": '#include "model/moe.h"\n'}, None),
    ({"launch/a.cpp": "#include <mpi.h>\n", "comm/staged/a.cu": "#include <cuda_runtime.h>\n"}, None),
    ({"kernels/make_backend.cpp": '#include "kernels/cuda/cuda_backend.h"\n'}, None),
    ({"README.md": "/usr/local/cuda, build/root, $HOME/work, --allow-run-as-root\n"}, None),
    ({"src/core/a.cpp": '#include "model/moe.h"\n'}, "core must not see model"),
    ({"src/model/a.h": '#include "speculative/tree.h"\n'}, "model must not see speculative"),
    ({"kernels/a.h": '#include "comm/communicator.h"\n'}, "kernels must not see comm"),
    ({"comm/a.h": '#include "kernels/backend.h"\n'}, "comm must not see kernels"),
    ({"src/config/a.h": '#include "kernels/backend.h"\n'}, "config must not see kernels"),
    ({"src/engine/a.h": '# include  "launch/options.h"\n'}, "engine must not see launch"),
    ({"src/core/a.h": '#include "core/missing.h"\n'}, "found neither from the root nor from src"),
    ({"src/misc/a.h": "\n"}, "only the folders of the architecture"),
    ({"src/model/a.cpp": "#include <cuda_runtime.h>\n"}, "<cuda_runtime.h> is for"),
    ({"kernels/cpu/a.cpp": "#include <cublas_v2.h>\n"}, "<cublas_v2.h> is for"),
    ({"comm/mpi/a.cpp": "#include <nccl.h>\n"}, "<nccl.h> is for"),
    ({"tests/unit/a.cpp": "#include <cuda_fp16.h>\n"}, "<cuda_fp16.h> is for"),
    ({"src/engine/a.cpp": "#include <mpi.h>\n"}, "<mpi.h> is for"),
    ({"comm/nccl/a.cpp": '#include "mpi.h"\n'}, "<mpi.h> is for"),
    ({"src/model/a.cpp": '#include "kernels/cuda/cuda_backend.h"\n'}, "not in every build"),
    ({"src/model/a.cpp": "#ifdef KDTREE_WITH_CUDA\n#endif\n"}, "KDTREE_WITH_CUDA is for"),
    ({"tools/a.py": "\n"}, "not among the agreed entries"),
    ({"notes.txt": "\n"}, "not among the agreed entries"),
    ({"configs/a.toml": f'model = "{ROOT_FOLDER}/model"\n'}, "names a path of one machine"),
    ({"slurm/a.sbatch": f"HOME={ROOT_FOLDER}\n"}, "names a path of one machine"),
]
# What the cases include.
HEADERS = ["src/core/check.h", "src/model/moe.h", "src/speculative/tree.h", "kernels/backend.h",
           "kernels/cuda/cuda_backend.h", "comm/communicator.h", "launch/options.h"]


def self_test() -> list[str]:
    problems = []
    for files, expected in CASES:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            for name, text in {**dict.fromkeys(HEADERS, "#pragma once\n"), **files}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            found = check_tree(root)
        if expected is None and found:
            problems.append(f"{files}: allowed, but reported: {found}")
        elif expected is not None and (len(found) != 1 or expected not in found[0]):
            problems.append(f"{files}: expected one message with '{expected}', got {found}")
    return problems


def main(arguments: list[str]) -> int:
    if arguments == ["--self-test"]:
        problems = self_test()
    elif len(arguments) <= 1:
        root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[2]
        problems = check_tree(root)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
