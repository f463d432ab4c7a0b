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
    """SafeLoader that reads 1e-4 as a number (YAML 1.2), and refuses a key given twice or one that is no word."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
        except (ValueError, AttributeError, KeyError) as error:  # 2026-13-45, 5,000 digits, `!!timestamp x`, `!!bool x`
            kind = node.tag.rpartition(":")[2]
            why = f" ({error})" if isinstance(error, ValueError) else ""
            raise _problem(f"{shortened(str(node.value))} looks like {_KINDS[kind]} and is none{why}", node) from error
        if isinstance(made, bytes) or (isinstance(made, str) and "\0" in made):
            raise _problem("a value has bytes that are no text", node)
        return made


_KINDS = {"timestamp": "a date", "int": "an integer", "float": "a number", "bool": "true or false"}

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _problem(found: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, found, node.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`; what the mapping says itself wins
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise _problem(f"a key is a {key_node.id}, not a word", key_node)
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise _problem(f"the key {shortened(str(key_node.value))} is no word ({type(key).__name__})", key_node)
        if key in seen:
            raise _problem(f"key {key!r} is given twice", key_node)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))  # a lone `=`


def shortened(text: str) -> str:
    """For a message: at most 80 characters."""
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def _read_yaml(text: str, where: str, do: str) -> Any:
    """Raises: RecipeError when it is no YAML that we read; in one line, with the line's number."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise RecipeError(where, "brackets or indents are nested too deeply", "a few levels", do) from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text.strip() else ""
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(where, f"not readable as YAML ({line}{said})", None, do) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise RecipeError(where, f"not readable as YAML ({' '.join(str(error).split())})", None, do) from error


def recipe_path(name: str) -> Path:
    """A path as given, or a recipe of infra/recipes by its bare name."""
    path, shipped = Path(name), RECIPES / f"{name}.yaml"
    known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
    do, where = f"Give a path, or one of the shipped names: {known}.", shortened(name) or "recipe ''"
    try:
        for file in (path, shipped):
            if file.is_file():
                return file
        if name and path.is_dir():
            raise RecipeError(where, "it is a folder", "a recipe file", do)
    except OSError as error:  # a name too long for the file system, a folder that may not be entered
        raise RecipeError(where, f"it cannot be looked up ({error.strerror})", "a recipe file", do) from error
    raise RecipeError(where, "there is no such recipe file", None, do)


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
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(str(path), f"it cannot be read ({error.strerror})", None, "May you read it?") from error
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), f"not UTF-8 text ({error})", "YAML in UTF-8", "Is it the right file?") from error
    content = _read_yaml(text, str(path), "Correct the file.")
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
    where = f"override {shortened(override)!r}"
    if not equals:
        raise RecipeError(where, "it has no `=`", "key=value", "Write it like train.lr=1e-4.")
    if not all(key.split(".")):
        found = "no key before the `=`" if not key else f"the key `{key}` has an empty part"
        raise RecipeError(where, found, "key=value, the key's sections parted by dots", "Write it like train.lr=1e-4.")
    value = _read_yaml(text, where, "Quote the value.")
    *parents, last = key.split(".")
    place = content
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise RecipeError(where, f"`{parent}` is not a section", None, "Check the key's spelling.")
        place = inner
    place[last] = value


# Where pydantic's own words name its types, or what only it knows of.
_EXPECTED = {
    "model_type": "a section: a mapping of keys",
    "dict_type": "a mapping of keys",
    "string_pattern_mismatch": "letters, digits, `.`, `_` and `-`, a letter or a digit first",
    "too_short": "one entry at least",
    "finite_number": "a finite number",
}


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
    expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should be ").removeprefix("a valid "))
    found = f"{shortened(repr(first['input']))} ({type(first['input']).__name__}){more}"
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
