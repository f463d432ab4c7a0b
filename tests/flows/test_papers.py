"""Every `eyas` command of the papers is run, a tiny model in place of the reader's own; all else is as written."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.services import LocalStack
from tests.dump_factory import DumpFactory
from tests.flows.runs import CHECKOUT, Place, tiny_recipe, wait_for
from tests.servers import running_server
from tests.test_docs import EVERY

MODEL = "eagle3-tiny-deepseek-v3"
DATASET = "s3://eyas/datasets/tiny-v1"

# What stands in a paper -> what is run here, in this order. The target's name, a recipe's path, a version's number are
# the reader's; options and overrides are the paper's own.
COMMANDS: dict[str, list[str]] = {
    "up": ["up"],
    "doctor RECIPE": ["doctor", "recipe.yaml"],
    "doctor my-recipe.yaml": ["doctor", "recipe.yaml"],
    "doctor my-kimi.yaml": ["doctor", "recipe.yaml"],
    "plan RECIPE": ["plan", "recipe.yaml"],
    "plan my-recipe.yaml": ["plan", "recipe.yaml"],
    "plan kimi-k2.5": ["plan", "kimi-k2.5"],
    "inspect conversations.jsonl --recipe RECIPE": ["inspect", "conversations.jsonl", "--recipe", "recipe.yaml"],
    "extract RECIPE": ["extract", "recipe.yaml"],
    "run my-recipe.yaml": ["run", "recipe.yaml"],
    "run demo-smollm2 train.lr=1e-3": ["run", "recipe.yaml", "train.lr=1e-3"],
    "run RECIPE": ["run", "recipe.yaml", "register.margin=9"],  # which the drafters from here on do not have
    "run RECIPE [key=value ...]": ["run", "recipe.yaml", "register.margin=9", "train.steps=8"],
    "train RECIPE": ["train", "recipe.yaml"],
    "evaluate RECIPE": ["evaluate", "recipe.yaml"],
    "evaluate RECIPE --drafter MODEL/4": ["evaluate", "recipe.yaml", "--drafter", f"{MODEL}/4", "register.margin=9"],
    "evaluate RECIPE --drafter FOLDER": ["evaluate", "recipe.yaml", "--drafter", "FOLDER"],
    "evaluate RECIPE evaluate.url=http://host:30000": ["evaluate", "recipe.yaml", "evaluate.url=SERVED"],
    "champion MODEL": ["champion", MODEL],
    "champion eagle3-SmolLM2-135M-Instruct": ["champion", MODEL],
    'champion MODEL --set 4 --reason "..."': ["champion", MODEL, "--set", "4", "--reason", "..."],
    'champion MODEL --back --reason "..."': ["champion", MODEL, "--back", "--reason", "..."],
    "compare A B": ["compare", f"{MODEL}/1", f"{MODEL}/2"],
    "compare A B --html FILE": ["compare", f"{MODEL}/1", f"{MODEL}/2", "--html", "page.html"],
    "compare eagle3-SmolLM2-135M-Instruct/1 eagle3-SmolLM2-135M-Instruct/2": ["compare", f"{MODEL}/1", f"{MODEL}/2"],
    "compare eagle3-SmolLM2-135M-Instruct/5 eagle3-SmolLM2-135M-Instruct/3": ["compare", f"{MODEL}/4", f"{MODEL}/3"],
    "compare MODEL@candidate MODEL@champion --set humaneval --html comparison.html": [
        "compare", f"{MODEL}@candidate", f"{MODEL}@champion", "--set", "humaneval", "--html", "comparison.html",
    ],
    "compare runs/<run>/drafter MODEL@champion --json": ["compare", "FOLDER", f"{MODEL}@champion", "--json"],
    "inspect THING": ["inspect", DATASET],
    "inspect <dataset>": ["inspect", DATASET],
    "inspect s3://your-bucket/eyas/...": ["inspect", DATASET],
    "inspect FILE": ["inspect", "SHARD"],
    "inspect runs/<run>/...": ["inspect", "FOLDER"],
    "inspect runs/<run>/drafter --recipe RECIPE": ["inspect", "FOLDER", "--recipe", "recipe.yaml"],
    "inspect runs/<run>/evidence": ["inspect", "EVIDENCE"],
    "datasets list --recipe demo-smollm2": ["datasets", "list", "--recipe", "recipe.yaml"],
    "datasets list [STORE URI] [--recipe R]": ["datasets", "list", "s3://eyas/datasets"],
    "datasets list\\|show\\|verify\\|rm": ["datasets", "show", DATASET],
    "datasets show | verify NAME|URI [--sample]": ["datasets", "verify", DATASET, "--sample"],
    "export NAME|URI FORMAT FOLDER [--target FOLDER]": [
        "export", DATASET, "speculators", "exported", "--target", "tiny-deepseek-v3",
    ],
    "import FORMAT FOLDER NAME|URI --target FOLDER": [
        "import", "speculators", "exported", "s3://eyas/datasets/imported", "--target", "tiny-deepseek-v3",
    ],
    "datasets rm NAME|URI [--yes] [--force]": ["datasets", "rm", "s3://eyas/datasets/imported", "--yes"],
    "extract my-kimi.yaml data.max_conversations=10000 dataset.name=kimi-10k": [
        "extract", "recipe.yaml", "data.max_conversations=10000", "dataset.name=kimi-10k",
    ],
    "train my-kimi.yaml dataset.name=kimi-10k": ["train", "recipe.yaml", "dataset.name=kimi-10k"],
    "run my-kimi.yaml data.max_conversations=200 train.steps=50 evaluate.prompts=8": [
        "run", "recipe.yaml", "data.max_conversations=200", "train.steps=50", "evaluate.prompts=8",
    ],
    "run my-recipe.yaml data.max_conversations=200": ["run", "recipe.yaml", "data.max_conversations=200"],
    "run RECIPE train.lr=1e-4 data.max_conversations=500": [
        "run", "recipe.yaml", "train.lr=1e-4", "data.max_conversations=500",
    ],
    "serve RECIPE...": ["serve", "recipe.yaml"],
    "serve my-recipe.yaml": ["serve", "recipe.yaml"],
    "serve my-kimi.yaml": ["serve", "recipe.yaml"],
    "serve --notify slack-webhook/team": ["serve", "--notify", "slack-webhook/team"],
    "down": ["down"],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A reader's folder: a recipe, conversations, a prompt set of another domain."""
    folder = tmp_path_factory.mktemp("reader").resolve()
    rows = [{"messages": [{"role": "user", "content": f"def g{n}(y):"}]} for n in range(8)]
    (folder / "humaneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    humaneval = {"name": "humaneval", "path": str(folder / "humaneval.jsonl"), "prompts": 8}
    tiny_recipe(
        folder, store={"uri": "s3://eyas/datasets"}, data={"held_out_share": 0.3},
        evaluate={"prompts": 8, "max_new_tokens": 8, "control": False, "sets": [humaneval]},
    )  # fmt: skip
    made = Place(folder, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    try:
        yield made
    finally:
        made.run("down")
        assert not made.wait_empty(60)


def test_the_commands_are_those_of_the_papers() -> None:
    """A word alone is the name of a command in a sentence; `up` and `down` are whole."""
    written = {words for _, program, words in EVERY if program == "eyas"}
    whole = {words for words in written if " " in words or words in ("up", "down")}
    assert whole == set(COMMANDS)


@pytest.mark.parametrize("written", COMMANDS)
def test_what_is_run_is_what_is_written_but_for_the_readers_own_names(written: str) -> None:
    options = set(re.findall(r"(?<!\[)--[a-z]+|\b[a-z_]+\.[a-z_]+=[\w.-]+", written))
    assert options <= set(re.sub(r"=SERVED", "=http", " ".join(COMMANDS[written])).split())
    assert COMMANDS[written][0] == written.split()[0]


@pytest.mark.long
@pytest.mark.parametrize("written", COMMANDS)
def test_the_command_is_run(place: Place, written: str) -> None:
    words = list(COMMANDS[written])
    if words[0] == "serve":
        _serve(place, words)
    elif any("SERVED" in word for word in words):
        with running_server(
            place.folder / "tiny-deepseek-v3", place.folder / "theirs", draft=_champion(place)
        ) as theirs:
            _complete(place, [word.replace("SERVED", theirs.base_url) for word in words])
    else:
        _complete(place, [STAND_INS[word](place) if word in STAND_INS else word for word in words])


def _complete(place: Place, words: list[str]) -> None:
    status, output = place.run(*words)
    assert status == 0, output
    assert "Traceback" not in output


def _serve(place: Place, words: list[str]) -> None:
    if "--notify" in words:
        _make_notification_block(place)
    with (place.folder / "serve.log").open("w+") as log:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "EYAS"))} | place.env
        serving = subprocess.Popen(
            place.command(*words), cwd=place.folder, env=environment | {"PYTHONPATH": str(CHECKOUT)}, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

        def said() -> str:
            return (place.folder / "serve.log").read_text()

        ready = wait_for(lambda: "are being served" in said() or serving.poll() is not None, 90)
        assert ready and serving.poll() is None, said()
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0 and "Traceback" not in said(), said()


def _make_notification_block(place: Place) -> None:
    code = "from prefect.blocks.notifications import SlackWebhook as S; S(url='http://127.0.0.1:9/x').save('team')"
    stack = json.loads((place.folder / ".eyas" / "stack.json").read_text())["urls"]
    environment = os.environ | {"PREFECT_API_URL": stack["prefect"]}
    subprocess.run([place.command()[0], "-c", code], env=environment, cwd=place.folder, check=True)


def _champion(place: Place) -> Path:
    """The drafter of the first run: the first champion, and what goes back makes it again."""
    return Path(place.summaries()[0]["drafter_path"])


def _shard(place: Place) -> str:
    """A shard of the dataset, fetched from the local stack's bucket."""
    shard = place.folder / "shard.safetensors"
    code = (
        "from pathlib import Path; from hidden_states.store import open_store; store = open_store('s3://eyas/datasets');"
        "info = next(i for i in store.list('tiny-v1/shards/') if i.key.endswith('.safetensors'));"
        f"store.download(info.key, info.bytes, Path({str(shard)!r}))"
    )
    environment = os.environ | LocalStack(place.folder / ".eyas").environment()
    subprocess.run([place.command()[0], "-c", code], env=environment, cwd=CHECKOUT, check=True)
    return str(shard)


def _evidence(place: Place) -> str:
    """Dumps as a failed gate keeps them."""
    folder = place.folder / "runs" / "failed" / "evidence"
    DumpFactory(folder, place.folder / "tiny-deepseek-v3").write("a-request", list(range(3, 20)))
    return str(folder)


STAND_INS: dict[str, Callable[[Place], str]] = {
    "FOLDER": lambda place: str(_champion(place)), "SHARD": _shard, "EVIDENCE": _evidence,
}  # fmt: skip
