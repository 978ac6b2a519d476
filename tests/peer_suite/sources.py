"""transformers' own test mixins, taken from the source distribution of the installed version.

The wheel does not carry them. They are fetched once into a cache folder (METAPHRASE_PEER_TESTS, or the user's cache),
and given the stubs that they need outside the library's repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

PACKAGE = "transformers_tests"
FILES = ("test_modeling_common.py", "test_configuration_common.py")
STUBS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": (
        "config_common_kwargs = {\n"
        '    "return_dict": False,\n'
        '    "output_hidden_states": True,\n'
        '    "output_attentions": True,\n'
        '    "dtype": "float16",\n'
        '    "chunk_size_feed_forward": 5,\n'
        '    "architectures": ["BertModel"],\n'
        '    "finetuning_task": "translation",\n'
        '    "id2label": {0: "label"},\n'
        '    "label2id": {"label": "0"},\n'
        '    "prefix": "prefix",\n'
        '    "bos_token_id": 6,\n'
        '    "pad_token_id": 7,\n'
        '    "eos_token_id": 8,\n'
        '    "sep_token_id": 9,\n'
        '    "decoder_start_token_id": 10,\n'
        '    "problem_type": "regression",\n'
        "}\n"
    ),
}


class Unreachable(RuntimeError):
    """The package index does not answer, or does not have the source distribution."""


def folder() -> Path:
    """The folder that holds the package `transformers_tests`, filled if it is not yet.

    Raises:
        Unreachable: with what pip said.
    """
    cache = os.environ.get("METAPHRASE_PEER_TESTS") or Path.home() / ".cache" / "metaphrase" / "peer_suite"
    target = Path(cache) / transformers.__version__
    package = target / PACKAGE
    if not all((package / name).exists() for name in FILES):
        package.mkdir(parents=True, exist_ok=True)
        for name, text in _fetch().items():
            (package / name).write_text(text, encoding="utf-8")
    for name, text in STUBS.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    return target


def _fetch() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", ":all:", "--no-deps", "--dest"]
        command += [scratch, f"transformers=={transformers.__version__}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise Unreachable(f"the source distribution cannot be had: {done.stderr.strip()[-300:]}")
        with tarfile.open(archives[0]) as archive:
            root = archive.getnames()[0].split("/")[0]
            return {name: archive.extractfile(f"{root}/tests/{name}").read().decode() for name in FILES}
