"""docs/recipe.md, written from the recipe's own sections: `python -m infra.recipe_reference > docs/recipe.md`"""

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from infra.recipe import Recipe

HEAD = """# Recipe keys

A recipe is one YAML file; `infra/recipes/` holds two. Any key can be changed on the command line:
`eyas run RECIPE train.lr=1e-4 data.max_conversations=500`. Unknown keys, wrong types and combinations that cannot work
are refused before anything starts. Relative paths are taken from the working folder.

This page is written from the code: `.venv/bin/python -m infra.recipe_reference > docs/recipe.md`.
"""


def reference() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    top = [(name, field) for name, field in Recipe.model_fields.items()]
    for name, field in top:
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts.append(f"## {field.alias or name}\n\n| key | type | default | meaning |\n|-|-|-|-|\n{_rows(section)}")
    return "\n".join(parts)


def _rows(section: type[BaseModel]) -> str:
    rows = []
    for name, field in section.model_fields.items():
        default = "(required)" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
        rows.append(f"| `{name}` | {_words(field.annotation)} | {default} | {field.description or ''} |\n")
    return "".join(rows)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part) for part in parts if part is not type(None))
    if origin is list:
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return "mapping"
    return {"int": "integer", "float": "number", "str": "text", "bool": "true, false"}.get(annotation.__name__, "any")


if __name__ == "__main__":
    print(reference(), end="")
