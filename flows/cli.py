"""The `eyas` command. Heavy imports wait until a command needs them: `eyas plan` answers without Prefect or MLflow."""

import argparse
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from flows.environment import settle
from hidden_states.errors import Refusal


def run(args: argparse.Namespace) -> int:
    """`eyas run`: the whole road, as one Prefect flow."""
    from flows.runner import run_flow
    from flows.summary import print_summary

    _answer(args, run_flow("drafter_pipeline", args.recipe, args.overrides), print_summary)
    return 0


def extract(args: argparse.Namespace) -> int:
    """`eyas extract`: the road up to the committed dataset."""
    from flows.runner import run_flow
    from flows.summary import print_summary

    _answer(args, run_flow("extract", args.recipe, args.overrides), print_summary)
    return 0


def train(args: argparse.Namespace) -> int:
    """`eyas train`: a drafter from a dataset that is in the bucket already."""
    from flows.runner import run_flow
    from flows.summary import print_summary

    _answer(args, run_flow("train", args.recipe, args.overrides, dataset=args.dataset), print_summary)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """`eyas evaluate`: serve a drafter that exists and measure it."""
    from flows.runner import run_flow
    from flows.summary import print_evaluation

    _answer(args, run_flow("evaluate", args.recipe, args.overrides, drafter=args.drafter), print_evaluation)
    return 0


def serve(args: argparse.Namespace) -> int:
    """`eyas serve`: the flows as deployments of a Prefect server, run from here until Ctrl-C."""
    from flows.deployments import serve_recipes

    serve_recipes(args.recipes, notify=args.notify, keep_schedules=args.keep_schedules)
    return 0


def plan(args: argparse.Namespace) -> int:
    """`eyas plan`: sizes and refusals, nothing started."""
    from flows.plan_view import print_plan
    from infra.recipe_file import load_recipe
    from tasks.planning import make_plan

    _answer(args, make_plan(load_recipe(args.recipe, args.overrides), on_paper=True).as_dict(), print_plan)
    return 0


def doctor(args: argparse.Namespace) -> int:
    """`eyas doctor`: every part the recipe needs, asked one by one."""
    from flows.doctor import examine, print_findings
    from infra.recipe_file import load_recipe

    findings = examine(load_recipe(args.recipe, args.overrides))
    _answer(args, {"findings": findings, "ok": all(f["ok"] for f in findings)}, print_findings)
    return 0 if all(f["ok"] for f in findings) else 1


def inspect(args: argparse.Namespace) -> int:
    """`eyas inspect`: what a dump, shard, dataset or drafter is, verified."""
    from flows.inspect import inspect_thing, print_report

    report = inspect_thing(args.thing, recipe=args.recipe, full=not args.sample)
    _answer(args, report, print_report)
    return 0 if report["ok"] else 1


def compare(args: argparse.Namespace) -> int:
    """`eyas compare`: two drafters on the prompts both were served."""
    from flows.compare import compare_drafters, print_comparison

    _answer(args, compare_drafters(args.one, args.other, args.sets, args.html), print_comparison)
    return 0


def champion(args: argparse.Namespace) -> int:
    """`eyas champion`: which version is in production; move it by hand."""
    from flows.compare import champion, print_champion

    _answer(args, champion(args.model, to=args.set, back=args.back, reason=args.reason), print_champion)
    return 0


def up(args: argparse.Namespace) -> int:
    """`eyas up`: the local Prefect server, MLflow and object store, to look at the pages."""
    from flows.environment import state_dir
    from flows.stack_view import print_stack
    from infra.services import LocalStack

    status = LocalStack(state_dir()).up()
    os.environ.setdefault("PREFECT_API_URL", status["services"]["prefect"]["url"])
    from tasks.abandoned import end_all_abandoned

    end_all_abandoned(status["services"]["mlflow"]["url"], "eyas up")  # before a person looks at them
    _answer(args, status, print_stack)
    return 0


def down(args: argparse.Namespace) -> int:
    """`eyas down`: end what `eyas up` started."""
    from flows.environment import state_dir
    from infra.services import LocalStack

    ended = LocalStack(state_dir()).down()
    _answer(args, {"ended": ended}, lambda answer: print("ended: " + (", ".join(answer["ended"]) or "nothing was up")))
    return 0


def datasets(args: argparse.Namespace) -> int:
    """`eyas datasets`: keeping house in a store."""
    from flows import datasets as house

    if args.action == "rm":
        answer = house.remove(args.place, args.recipe, yes=args.yes, force=args.force)
    elif args.action == "verify":
        answer = house.verify(args.place, args.recipe, full=not args.sample)
    else:
        answer = (house.list_all if args.action == "list" else house.show)(args.place, args.recipe)
    _answer(args, answer, house.PRINT.get(args.action, house.print_facts))
    return 0 if answer.get("ok", True) else 1


def import_(args: argparse.Namespace) -> int:
    """`eyas import`: another trainer's hidden states as a dataset."""
    from flows.datasets import print_facts
    from flows.formats import ImportOptions, import_dataset

    options = ImportOptions(
        after_block=tuple(args.after_block) if args.after_block else None, final_norm=args.final_norm,
        learn_all=args.learn_all, reference=not args.no_reference, batch_tokens=args.batch_tokens,
        held_out_share=args.held_out_share, draft_vocab_size=args.draft_vocab_size,
    )  # fmt: skip
    _answer(args, import_dataset(args.format, args.folder, args.place, args.recipe, args.target, options), print_facts)
    return 0


def export(args: argparse.Namespace) -> int:
    """`eyas export`: a dataset as another trainer's folder."""
    from flows.datasets import print_facts
    from flows.formats import export_dataset

    _answer(args, export_dataset(args.place, args.format, args.folder, args.recipe, args.target), print_facts)
    return 0


def _answer(args: argparse.Namespace, answer: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    if args.json:
        print(json.dumps(answer, indent=1, sort_keys=True))
    else:
        show(answer)


def parser() -> argparse.ArgumentParser:
    """The command line, as argparse sees it."""
    top = argparse.ArgumentParser(prog="eyas", description="Raises EAGLE drafters for models served by SGLang.")
    top.add_argument("--version", action="version", version=f"eyas {version('eyas')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(function=function)
        made.add_argument("--json", action="store_true", help="print the answer as one JSON object")
        return made

    for name, function, text in (
        ("run", run, "capture, prove, store, train, serve and register; the same command goes on after a kill"),
        ("extract", extract, "capture, prove and store only; `eyas run` goes on from there"),
        ("train", train, "train, export and register a drafter from a dataset that is in the bucket already"),
        ("evaluate", evaluate, "serve a drafter on every prompt set, beside plain decoding and the champion"),
        ("plan", plan, "what a run will take: samples, tokens, bytes, disk; refuses what cannot work"),
        ("doctor", doctor, "is the server patched, the bucket writable, MLflow up?"),
    ):
        made = command(name, function, text)
        made.add_argument("recipe", help="a recipe file, or the name of one of infra/recipes/")
        made.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="override a key, e.g. train.lr=1e-4"
        )
        if name == "evaluate":
            text = "MODEL/VERSION or MODEL@ALIAS in MLflow, or a drafter's folder; left out = the champion"
            made.add_argument("--drafter", metavar="MODEL/VERSION|FOLDER", help=text)
        if name == "train":
            made.add_argument("--dataset", metavar="NAME", help="in the recipe's store; left out = the newest version")
    made = command("inspect", inspect, "what is in a dump, shard, dataset, drafter or conversations file; verifies it")
    made.add_argument("thing", metavar="PATH|URI", help="a local path, or s3://bucket/prefix/dataset")
    made.add_argument("--recipe", help="recipe whose store or tokenizer is used")
    made.add_argument("--sample", action="store_true", help="verify a sample of the checksums, not all")
    made = command("datasets", datasets, "list, show, verify or remove datasets in a store")
    made.add_argument("action", choices=["list", "show", "verify", "rm"])
    made.add_argument(
        "place", nargs="?", default="", metavar="NAME|URI", help="a dataset: its URI, or its name in the recipe's store"
    )
    made.add_argument("--recipe", help="recipe whose store is used")
    made.add_argument("--sample", action="store_true", help="verify: a sample of the checksums, not all")
    made.add_argument("--yes", action="store_true", help="rm: do not ask")
    made.add_argument("--force", action="store_true", help="rm: even what a registered drafter was trained on")
    _add_formats(command)
    made = command("compare", compare, "two drafters, paired over the prompts both were served, with an interval")
    for name in ("one", "other"):
        made.add_argument(name, metavar=name.upper(), help="MODEL/VERSION or MODEL@ALIAS in MLflow, or a folder")
    made.add_argument("--set", action="append", default=[], dest="sets", metavar="NAME", help="this prompt set only")
    made.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as a page, with plots")
    made = command("champion", champion, "the version in production, and every move so far; or move it by hand")
    made.add_argument("model", metavar="MODEL", help="registered model in MLflow")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--set", metavar="VERSION", help="make this version the champion")
    how.add_argument("--back", action="store_true", help="go back to the champion before this one")
    made.add_argument("--reason", help="why, kept in the history")
    made = command("serve", serve, "offer the flows to Prefect: started from its pages, by schedules, retried there")
    made.add_argument(
        "recipes", nargs="*", default=[], metavar="RECIPE", help="a deployment each, with the recipe's schedule"
    )
    made.add_argument("--notify", metavar="TYPE/NAME", help="block of Prefect that is told when an automation fires")
    text = "do not pause the schedules at the end: another host serves the same recipes"
    made.add_argument("--keep-schedules", action="store_true", help=text)
    command("up", up, "start the local Prefect server, MLflow and object store")
    command("down", down, "end them")
    return top


FORMATS = ("specforge", "speculators-v1", "speculators", "modelopt", "angelslim")


def _add_formats(command: Callable[..., argparse.ArgumentParser]) -> None:
    place: dict[str, Any] = {"metavar": "NAME|URI", "help": "the dataset: its URI, or its name in the recipe's store"}
    made = command("import", import_, "another trainer's hidden states as a dataset; says which convention they follow")
    made.add_argument("format", choices=FORMATS)
    made.add_argument("folder", help="the other trainer's folder")
    made.add_argument("place", **place)
    made.add_argument("--target", help="the target's Hugging Face folder; left out = the recipe's")
    made.add_argument("--recipe", help="recipe whose store and target are used")
    made.add_argument("--after-block", type=int, nargs="+", metavar="K", help="captured blocks, if they are not found")
    made.add_argument("--final-norm", choices=["post", "pre"], help="the final state behind or before the norm")
    made.add_argument("--learn-all", action="store_true", help="files without a loss mask: learn every token")
    made.add_argument("--no-reference", action="store_true", help="do not load the target to find the convention")
    made.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a shard")
    made.add_argument("--held-out-share", type=float, default=0.05, help="share kept for evaluation")
    made.add_argument("--draft-vocab-size", type=int, default=32000, help="target tokens the drafter can propose")
    made = command("export", export, "a dataset as another trainer's folder")
    made.add_argument("place", **place)
    made.add_argument("format", choices=FORMATS)
    made.add_argument("folder", help="a new folder")
    made.add_argument("--target", help="the target's Hugging Face folder, where its norm is needed")
    made.add_argument("--recipe", help="recipe whose store and target are used")


NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code; a refusal is printed without a traceback."""
    args = _parsed(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's text may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        settle()
        return args.function(args)
    except Refusal as refusal:
        return _refuse(args, refusal)
    except BrokenPipeError:  # the reader (head, less) left early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_ACCESS:
            raise
        said = f"{error.strerror or error}"
        do = "EYAS_HOME names another folder for what Eyas keeps."
        return _refuse(args, Refusal(str(error.filename or "a file"), said, "room, and the right to write there", do))
    except KeyboardInterrupt:
        print(
            f"\neyas {args.command}: interrupted. Nothing is lost; the same command goes on from here.", file=sys.stderr
        )
        return 130


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. What stands behind an option belongs to `key=value`, to the recipes or to the dataset's place;
    argparse, which has given these their words by then, calls it unrecognized."""
    made = parser()
    args, rest = made.parse_known_args(argv)
    if rest:
        many = next((name for name in ("overrides", "recipes") if hasattr(args, name)), None)
        one = getattr(args, "place", None) == "" and len(rest) == 1
        if not (many or one) or any(word.startswith("-") for word in rest):
            made.error(f"unrecognized arguments: {' '.join(rest)}")
        if many is not None:
            setattr(args, many, [*getattr(args, many), *rest])
        else:
            args.place = rest[0]
    return args


def _refuse(args: argparse.Namespace, refusal: Refusal) -> int:
    if args.json:
        parts = {"where": refusal.where, "found": refusal.found, "expected": refusal.expected, "do": refusal.do}
        print(json.dumps({"ok": False, "error": {"type": type(refusal).__name__, **parts}}, indent=1))
    print(f"eyas {args.command}: {refusal}", file=sys.stderr)
    return refusal.exit_code


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt  # SIGTERM ends a run as tidily as Ctrl-C does


if __name__ == "__main__":
    sys.exit(main())
