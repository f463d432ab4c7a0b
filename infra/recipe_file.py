"""Reading a recipe: YAML and `key=value` overrides, checked as one, refused in words.

Unknown keys, wrong types and impossible combinations are refused with the key's full name (and the nearest known one).
Relative paths inside a recipe are taken from the working folder.
"""

import difflib
import re
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hidden_states.errors import RecipeError
from infra.recipe import Recipe

RECIPES = Path(__file__).parent / "recipes"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number (YAML 1.2) and refuses a key given twice."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _no_duplicate_keys(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _no_duplicate_keys)


def recipe_path(name: str) -> Path:
    """A path as given, or a recipe of infra/recipes by its bare name."""
    path = Path(name)
    shipped = RECIPES / f"{name}.yaml"
    if path.is_file():
        return path
    if shipped.is_file():
        return shipped
    known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
    raise RecipeError(name, "there is no such recipe file", None, f"Give a path, or one of the shipped names: {known}.")


def load_recipe(name: str, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        name: path of a YAML file, or the bare name of a shipped recipe.
        overrides: `dotted.key=value` strings; the value is read as YAML.

    Raises:
        RecipeError: unreadable file, unknown key (names the nearest known one), wrong type, missing key, or a
            combination that cannot work.
    """
    path = recipe_path(name)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(str(path), f"not readable as YAML ({error})", None, "Correct the file.") from error
    if not isinstance(content, dict):
        raise RecipeError(
            str(path), f"a {type(content).__name__}", "a mapping of keys", "See infra/recipes/ for examples."
        )
    for override in overrides:
        _apply_override(content, override)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise _refusal(str(path), error) from None


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}", "it has no `=`", "key=value", "Write it like train.lr=1e-4.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"override {override!r}", f"its value is not YAML ({error})", None, "Quote the value."
        ) from error
    *parents, last = key.split(".")
    place = content
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise RecipeError(
                f"override {override!r}", f"`{parent}` is not a section", None, "Check the key's spelling."
            )
        place = inner
    place[last] = value


def _refusal(where: str, error: ValidationError) -> RecipeError:
    """One refusal for the first problem, in words; pydantic's own wording leaks its type names."""
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part)) or "the recipe"
    more = f" ({len(problems) - 1} more problem{'s' * (len(problems) > 2)} in this recipe)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _known_keys(Recipe)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0) or known[:1]
        same_last = [
            k for k in known if difflib.SequenceMatcher(None, k.split(".")[-1], key.split(".")[-1]).ratio() > 0.8
        ]
        nearest = difflib.get_close_matches(key, same_last, n=1, cutoff=0)[:1] or near
        return RecipeError(
            f"{where}, key `{key}`", f"unknown key{more}", None, f"The nearest known key is `{nearest[0]}`."
        )
    if first["type"] == "missing":
        return RecipeError(f"{where}, key `{key}`", f"missing{more}", "a value", "Add it; infra/recipes/ has examples.")
    if first["type"] == "value_error":
        return RecipeError(f"{where}, `{key}`", str(first["ctx"]["error"]) + more, None, "Edit the recipe.")
    expected = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    found = f"{first['input']!r} ({type(first['input']).__name__}){more}"
    return RecipeError(f"{where}, key `{key}`", found, expected, "Edit the recipe or the override.")


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (
        part.startswith(("constrained-", "list[", "function-")) or part in ("int", "str", "float")
    )


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = _section_of(field.annotation)
        keys.extend([key] + (_known_keys(inner, key + ".") if inner else []))
    return keys


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((s for a in get_args(annotation) if (s := _section_of(a))), None)
    return None
