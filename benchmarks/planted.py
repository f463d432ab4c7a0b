"""Does any planted fault get through? Run: .venv/bin/python -m benchmarks.planted

Every way captured data can be wrong is planted into a right dump of a tiny model, one at a time, with honest checksums
and right shapes wherever the fault allows it. Then the same checks as in a run look at it, in the same order. Prints
one JSON object: `planted`, `caught`, `clean_passed`, and per fault the check that caught it first and, in `also`, those
that would have. `without_reference` counts what is caught when the target is too large for a reference forward.
"""

import argparse
import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas_capture import contract
from hidden_states.dump import Dump, DumpFolder
from hidden_states.errors import DataError, GateError
from hidden_states.gate import NormCheck, Reference
from hidden_states.mask import learned_spans, mask_of
from hidden_states.mask_rule import MaskRule
from hidden_states.match import reconcile
from hidden_states.prompts import render_prompt
from hidden_states.record import BadDump
from hidden_states.render import ChatTemplate, Messages
from hidden_states.samples import Sample, sample_from_reply
from hidden_states.teacher import TeacherHead, reply_positions
from hidden_states.validate import Expectation, check_dump
from tests.dump_factory import DumpFactory
from tests.tiny_models import make_tiny, tiny_tokenizer

AFTER_BLOCK = (1, 2, 4)
MIN_TEACHER_AGREEMENT = 0.99
REPLY_TOKENS = 24
OTHER_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
QUESTION = "Tell me what a young hawk is called, and how it is trained to come back to the glove."
OTHER_QUESTION = "Name three birds that hunt at night. How do they find what they hunt in the dark? Be brief."


def make_target(kind: str, folder: Path, seed: int) -> Path:
    """A tiny model whose norms have weights of their own (all ones would make a second final norm change nothing)."""
    make_tiny(kind, folder, seed=seed)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed + 1)
    weights = load_file(path)
    for name in sorted(weights):
        if name.endswith("norm.weight"):
            weights[name] = 0.5 + torch.rand(weights[name].shape, generator=generator)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


class Scene:
    """A target, an honest writer, and one on-policy sample, ready for a fault to be planted."""

    def __init__(self, folder: Path, kind: str, dtype: str) -> None:
        self.dtype = dtype
        self.target = make_target(kind, folder / "target", seed=0)
        self.other_target = make_target(kind, folder / "other", seed=7)
        self.dumps = folder / "dumps"
        self.writer = DumpFactory(self.dumps, self.target, AFTER_BLOCK, dtype)
        self.other_writer = DumpFactory(folder / "elsewhere", self.other_target, AFTER_BLOCK, dtype)
        self.expectation = Expectation.of_target(self.target, AFTER_BLOCK, dtype)
        self.head = TeacherHead.load(self.target)
        norm = NormCheck.load(self.target)
        assert norm is not None
        self.norm = norm
        self.reference = Reference.load(self.target)
        self.rule = MaskRule.of(ChatTemplate(tiny_tokenizer()))
        self.sample = self._answered(QUESTION)
        self.stranger = self._answered(OTHER_QUESTION)
        self.reset()

    def _answered(self, question: str) -> Sample:
        prompt = render_prompt([{"role": "user", "content": question}], tiny_tokenizer())
        model: Any = self.writer.model
        with torch.no_grad():
            out = model.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=REPLY_TOKENS, do_sample=False, eos_token_id=None,
            )  # fmt: skip
        return sample_from_reply(prompt, out[0, len(prompt) :].tolist(), "planted:1")

    def reset(self) -> None:
        """Remove the last case's dumps; the sample is right again."""
        DumpFolder(self.dumps).clear()
        self.captured_as = self.sample
        self.base_line: dict[str, int] = {self.writer.writer_id: self.writer.counter - 1}
        self.writer.write_writer()

    @property
    def request_id(self) -> str:
        return f"eyas-run-{self.captured_as.id}"

    def states(self) -> dict[str, torch.Tensor]:
        """The sample's right states."""
        return self.writer.states(self.sample.input_ids)

    def publish(self, states: dict[str, torch.Tensor] | None = None, **record: object) -> Path:
        """Publish a dump of the sample."""
        return self.writer.write(self.request_id, self.sample.input_ids, states, **record)

    def examine(self) -> list[str]:
        """Names of the checks that object, in the order a run asks them; empty = everything passes."""
        folder = DumpFolder(self.dumps)
        result = reconcile({self.request_id: self.captured_as}, folder.dumps(), self.base_line)
        if self.request_id not in result.matched:
            return ["match: " + ("stale" if result.stale else next(k for k, v in result.counts().items() if v))]
        dump = result.matched[self.request_id]
        found: list[str] = []
        try:
            check_dump(dump, self.captured_as, self.expectation)
        except BadDump as error:
            found.append(f"validate: {error.check}")
            if error.check == "file-intact":
                return found
        self._ask(found, "mask rule", lambda: self.rule.check(self.captured_as))
        self._ask(found, "norm", lambda: self.norm.check(dump))
        self._ask(found, "teacher", lambda: self._teacher(dump))
        self._ask(found, "reference", lambda: self.reference.check(dump))
        return found

    def _teacher(self, dump: Dump) -> None:
        agreement = self.head.agreement(dump.tensor(contract.FINAL), *reply_positions(self.captured_as))
        if agreement.share < MIN_TEACHER_AGREEMENT:
            raise GateError(str(dump.ref), f"{agreement.agree} of {agreement.total} tokens agree")

    @staticmethod
    def _ask(found: list[str], name: str, question: Callable[[], object]) -> None:
        try:
            question()
        except (DataError, GateError):
            found.append(name)


def layers_off_by_one(scene: Scene) -> None:
    """Every aux state is the output of the block before."""
    early = DumpFactory(scene.dumps.parent / "early", scene.target, tuple(b - 1 for b in AFTER_BLOCK), scene.dtype)
    wrong = early.states(scene.sample.input_ids)
    names = [contract.block_tensor(block) for block in AFTER_BLOCK]
    moved = {name: wrong[contract.block_tensor(block - 1)] for name, block in zip(names, AFTER_BLOCK, strict=True)}
    scene.publish(scene.states() | moved)


def aux_order_swapped(scene: Scene) -> None:
    states = scene.states()
    low, _, high = (contract.block_tensor(block) for block in AFTER_BLOCK)
    scene.publish(states | {low: states[high], high: states[low]})


def final_without_norm(scene: Scene) -> None:
    last = DumpFactory(scene.dumps.parent / "last", scene.target, (5,), scene.dtype)
    scene.publish(scene.states() | {contract.FINAL: last.states(scene.sample.input_ids)[contract.block_tensor(5)]})


def final_norm_twice(scene: Scene) -> None:
    states = scene.states()
    norm: Any = scene.writer.model.get_decoder().norm
    with torch.no_grad():
        scene.publish(states | {contract.FINAL: norm(states[contract.FINAL])})


def tokens_shifted_by_one(scene: Scene) -> None:
    """Row t holds the state of token t + 1."""
    states = scene.states()
    scene.publish({name: t if name == contract.INPUT_IDS else t.roll(-1, 0) for name, t in states.items()})


def another_models_weights(scene: Scene) -> None:
    """Same configuration, other weights."""
    scene.publish(scene.other_writer.states(scene.sample.input_ids))


def dtype_cast(scene: Scene) -> None:
    """Cast to a narrower dtype and back, in one tensor."""
    states = scene.states()
    narrow = torch.bfloat16 if scene.dtype == "float32" else torch.float8_e4m3fn
    name = contract.block_tensor(AFTER_BLOCK[1])
    scene.publish(states | {name: states[name].to(narrow).to(states[name].dtype)})


def one_nan(scene: Scene) -> None:
    states = scene.states()
    states[contract.block_tensor(AFTER_BLOCK[2])][3, 5] = torch.nan
    scene.publish(states)


def one_flipped_byte(scene: Scene) -> None:
    path = scene.publish() / contract.STATES_FILE
    data = bytearray(path.read_bytes())
    data[-1001] ^= 1
    path.write_bytes(data)


def rows_of_another_request(scene: Scene) -> None:
    """Five rows in the middle are another request's, in every state."""
    states, strange = scene.states(), scene.writer.states(scene.stranger.input_ids)
    for name in list(states)[1:]:
        states[name][8:13] = strange[name][8:13]
    scene.publish(states)


def prefix_from_cache(scene: Scene) -> None:
    size = len(scene.sample)
    states = {n: t if n == contract.INPUT_IDS else t[16:].clone() for n, t in scene.states().items()}
    scene.publish(states, spans=[[16, size]], prefix_cached=16, complete=False,
                  incomplete_reason=contract.PREFIX_CACHE)  # fmt: skip


def padded_rows(scene: Scene) -> None:
    """The last rows are padding: zeros."""
    states = scene.states()
    for name in list(states)[1:]:
        states[name][-4:] = 0
    scene.publish(states)


def rows_repeated_as_padding(scene: Scene) -> None:
    """Rows in the prompt are copies of the row before them."""
    states = scene.states()
    for name in list(states)[1:]:
        states[name][10:14] = states[name][9]
    scene.publish(states)


def truncated_file(scene: Scene) -> None:
    path = scene.publish() / contract.STATES_FILE
    path.write_bytes(path.read_bytes()[:-64])


def stale_dump_of_an_earlier_server(scene: Scene) -> None:
    """Right in everything, under the request id that is waited for, but written before this extraction began."""
    scene.publish()
    scene.base_line = {scene.writer.writer_id: scene.writer.counter - 1}


def loss_mask_shifted_by_one(scene: Scene) -> None:
    mask = scene.sample.loss_mask
    scene.captured_as = Sample.of(scene.sample.input_ids, [0, *mask[:-1]], scene.sample.source)
    scene.publish()


def mask_of_another_template(scene: Scene) -> None:
    """The mask that the same talk has under another template, whose headers are longer."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = OTHER_TEMPLATE
    answer = tokenizer.decode(scene.sample.input_ids[-REPLY_TOKENS:])
    talk: Messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    chat = ChatTemplate(tokenizer)
    _, mask = mask_of(chat, learned_spans(chat, talk, None, "all", True))
    size = len(scene.sample)
    mask = (mask + [1] * size)[:size]
    scene.captured_as = Sample.of(scene.sample.input_ids, mask, scene.sample.source)
    scene.publish()


def mask_changed_after_planning(scene: Scene) -> None:
    """One bit of a stored mask is another."""
    mask = scene.sample.loss_mask
    sample = scene.sample
    scene.captured_as = Sample(sample.id, sample.input_ids, [*mask[:-1], 0], sample.source, sample.digest)
    scene.publish()


FAULTS: dict[str, Callable[[Scene], None]] = {
    fault.__name__: fault
    for fault in (
        layers_off_by_one, aux_order_swapped, final_without_norm, final_norm_twice, tokens_shifted_by_one,
        another_models_weights, dtype_cast, one_nan, one_flipped_byte, rows_of_another_request, prefix_from_cache,
        padded_rows, rows_repeated_as_padding, truncated_file, stale_dump_of_an_earlier_server,
        loss_mask_shifted_by_one, mask_of_another_template, mask_changed_after_planning,
    )
}  # fmt: skip


def plant(scene: Scene, fault: str) -> list[str]:
    """Plant one fault and look: names of the checks that object."""
    scene.reset()
    FAULTS[fault](scene)
    return scene.examine()


def clean(scene: Scene) -> list[str]:
    """The same without a fault: nothing may object."""
    scene.reset()
    scene.publish()
    return scene.examine()


@dataclasses.dataclass
class Tally:
    planted: int = 0
    caught: int = 0
    without_reference: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="llama,deepseek_v3", help="model kinds of tests/tiny_models.py")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(2)
    tally, clean_passed, clean_runs = Tally(), 0, 0
    by_fault: dict[str, dict[str, object]] = {}
    for kind in options.kinds.split(","):
        for dtype in options.dtypes.split(","):
            with tempfile.TemporaryDirectory() as folder:
                scene = Scene(Path(folder), kind, dtype)
                objections = clean(scene)
                clean_runs += 1
                clean_passed += not objections
                if objections:
                    print(f"{kind} {dtype}: a right dump is refused by {objections}")
                for fault in FAULTS:
                    objections = plant(scene, fault)
                    tally.planted += 1
                    tally.caught += bool(objections)
                    tally.without_reference += any(name != "reference" for name in objections)
                    entry = by_fault.setdefault(fault, {"caught_by": None, "also": [], "missed": []})
                    if objections:
                        entry["caught_by"] = entry["caught_by"] or objections[0]
                        entry["also"] = sorted({*entry["also"], *objections} - {entry["caught_by"]})  # type: ignore[misc]
                    else:
                        entry["missed"] = [*entry["missed"], f"{kind} {dtype}"]  # type: ignore[misc]
                    print(f"{kind:12} {dtype:9} {fault:34} {', '.join(objections) or 'MISSED'}")
    answer = dataclasses.asdict(tally) | {"clean": clean_runs, "clean_passed": clean_passed, "by_fault": by_fault}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
