"""The one thing that pyproject.toml cannot say: the card's template lies at the top of the repository, for readers, and
beside `training/card.py` in an installed package, for the code."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithTemplate(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            copyfile("model_card.md", Path(self.build_lib) / "metaphrase" / "training" / "model_card.md")


setup(cmdclass={"build_py": BuildWithTemplate})
