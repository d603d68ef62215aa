"""Packaging. Two top-level folders travel inside the package (README: The tokenizers trap)."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["mimkit", "mimkit.*"]),
        "mimkit.tokenizers",
        "mimkit.configs",
    ],
    # `tokenizers` is also the name of HuggingFace's package, so ours is installed below mimkit/.
    package_dir={"mimkit.tokenizers": "tokenizers", "mimkit.configs": "configs"},
    package_data={
        "mimkit": ["py.typed", "ablation/pages/*.j2"],
        "mimkit.tokenizers": ["weights/*.safetensors", "weights/*.md"],
        "mimkit.configs": ["*.yaml", "stems/*.yaml"],
    },
)
