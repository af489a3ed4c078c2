"""Packaging of syncpipe. Settings of tools live in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

#: Where the project is published. A placeholder, and the only place that names it.
URL = "https://example.org/syncpipe"


def long_description() -> str:
    """The README for a package index, where relative links lead nowhere."""
    readme = Path(__file__).parent / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)", rf"\1({URL}/raw/main/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({URL}/blob/main/", text)


class CleanBuild(build_py):
    """Removes the modules of an earlier version, which ``pip install .`` left in ``build/``."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


DEMO = ["scikit-learn>=1.3", "matplotlib>=3.7"]
# (Ninja builds the simulated devices of the tests.)
TEST = [
    "pytest>=9.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ninja>=1.11",
    "tqdm>=4.60",
    "numpy",
    *DEMO,
]
# The formatter and the type checker are pinned: a new release must not turn an old commit red.
DEV = [*TEST, "ruff==0.17.5", "mypy==2.4.1"]

setup(
    name="syncpipe",
    version="0.1.0",
    description="Pipeline parallelism for PyTorch: one machine, one process, two lines of code",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="syncpipe authors",
    url=URL,
    project_urls={
        "Documentation": f"{URL}/blob/main/docs/index.md",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
    },
    cmdclass={"build_py": CleanBuild},
    license="MIT",
    keywords="pytorch, pipeline parallelism, model parallelism, gpipe, 1f1b, checkpointing",
    packages=find_packages(include=["syncpipe", "syncpipe.*"]),
    # An editable install is then a plain path, which editors and type checkers follow.
    package_dir={"": "."},
    package_data={"syncpipe": ["py.typed"], "syncpipe.planner": ["page.html"]},
    python_requires=">=3.11",
    entry_points={"console_scripts": ["syncpipe = syncpipe.commands.main:main"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "demo": DEMO,
        "plot": ["matplotlib>=3.7"],
        "safetensors": ["safetensors>=0.6"],
        "bench": ["torchgpipe>=0.0.7", "fairscale", "tqdm>=4.60", "matplotlib>=3.7"],
        "integrations": [
            "lightning>=2.5",
            "accelerate>=1.10",
            "torchmetrics>=1.6",
            "transformers>=5.23",
            "datasets>=4.0",
            "peft>=0.21",
            "safetensors>=0.6",
            "bitsandbytes>=0.49; sys_platform == 'linux'",
            "trl>=1.10",
        ],
        "lightning": ["lightning>=2.5"],
        "transformers": ["transformers>=5.23", "accelerate>=1.10"],
        "notebook": [  # of docs/huggingface.ipynb
            "ipykernel>=6.29",
            "matplotlib>=3.7",
            "nbclient>=0.10",
            "peft>=0.21",
            "safetensors>=0.6",
            "transformers>=5.23",
        ],
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5"],
        "test": TEST,
        "dev": DEV,
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
