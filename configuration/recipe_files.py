"""The recipes that come with the package, by name. Nothing heavy is imported, so that help can list them at once."""

from __future__ import annotations

from pathlib import Path

from .errors import MetaphraseError
from .limits import nearest

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_name(recipe: str | Path) -> str:
    """What a run of this recipe is called: the recipe's name, or its file's without `.yaml`."""
    return Path(recipe).stem if _is_path(recipe) else str(recipe)


def locate_recipe(recipe: str | Path) -> Path:
    """The file of a recipe.

    Args:
        recipe: a name of `recipe_names()`, or the path of a YAML file.

    Raises:
        MetaphraseError: if there is none; the sentence names the nearest.
    """
    path = Path(recipe).expanduser() if _is_path(recipe) else FOLDER / f"{recipe}.yaml"
    if path.is_file():
        return path
    if _is_path(recipe):
        raise MetaphraseError(f"there is no recipe file {recipe}")
    names = recipe_names()
    raise MetaphraseError(
        f'there is no recipe "{recipe}"{nearest(str(recipe), names)}; there are {", ".join(names)}, or give the path '
        "of a YAML file"
    )


def _is_path(recipe: str | Path) -> bool:
    return isinstance(recipe, Path) or recipe.endswith((".yaml", ".yml")) or "/" in recipe


def recipe_help() -> str:
    """What may stand for RECIPE on a command line."""
    return f"one of {', '.join(recipe_names())}, or a YAML file"
