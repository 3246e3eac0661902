"""Packaging. torch needs no Horovod; where it is wanted, scripts/install_horovod.sh builds it for the frameworks."""

from setuptools import find_packages, setup

RUNNER = ["numpy", "pillow", "scikit-learn", "scipy", "tqdm", "tensorboard"]
TOOLS = ["hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "types-psutil", "types-tqdm"]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material", "mkdocstrings[python]"]
RELEASE = ["build", "check-jsonschema", *DOCS]
OF_RECIPES = {
    "lightning": ["pytorch-lightning", "scikit-learn"],
    "transformers": ["accelerate", "scikit-learn", "transformers"],
    "timm": ["timm"],
    "ray": ["ray[train]", "scikit-learn"],
}
"""Packages that the scripts of docs/examples/recipes import, by extra."""
RECIPES = sorted({package for packages in OF_RECIPES.values() for package in packages})
"""All of them: some 700 MB, most of it Ray and what it needs."""
TORCHFT = "sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.14'"
"""Where it has wheels. It is a benchmark's rival."""
DECENT_DP = "python_version < '3.14'"
"""What it says it needs. A benchmark's rival too."""
RIVALS = [f"decent-dp; {DECENT_DP}", f"torchft; {TORCHFT}"]

# "tensorflow" leaves Horovod out, although it is needed there: its source on the package index fails to build beside
# today's frameworks, so that no installation would succeed. "horovod" is for indexes that have one that does.
setup(
    name="hvd_async",
    version="0.2.0",
    description="Distributed optimizers that do not wait: eager-SGD, gossip and leaders for PyTorch and TensorFlow",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hvd_async", "hvd_async.*"]),
    package_data={"hvd_async": ["py.typed"]},
    install_requires=["msgspec", "numpy", "prometheus_client", "psutil", "pyzmq"],
    entry_points={"console_scripts": ["hvd_async = hvd_async.cli.main:main"]},
    extras_require={
        "torch": ["torch>=2.3"],
        "tensorflow": ["tensorflow>=2.16", "keras>=3"],
        "horovod": ["horovod>=0.28.1"],
        "runners": ["torchvision", *RUNNER],
        "advisor": ["matplotlib"],
        "docs": DOCS,
        "monitor": ["tensorboard"],
        "recipes": RECIPES,
        **OF_RECIPES,
        "dev": [*RUNNER, *TOOLS, *RELEASE, *RECIPES, *RIVALS, "matplotlib", "networkx"],
    },
)
