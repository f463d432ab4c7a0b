"""Which slots count, drawn; which are computed, and that nothing else is needed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.slots import counted_slots, plan_slots
from tests.drafter.packing import document, pack, random_drafter, small_config


def drawn(row: torch.Tensor) -> str:
    return "".join("#" if on else "." for on in row.tolist())


def mask(drawing: str) -> torch.Tensor:
    return torch.tensor([int(c == "#") for c in drawing])


def counts(drawing: str, steps: int, docs: list[int] | None = None) -> list[str]:
    learn = mask(drawing)
    doc_ids = torch.zeros(len(learn), dtype=torch.int64) if docs is None else torch.tensor(docs)
    return [drawn(row) for row in counted_slots(learn, doc_ids, steps)]


def test_the_counted_slots_of_a_two_turn_chat() -> None:
    # Slot i at step j predicts token i + 2 + j. Tokens 2 and 7 open a reply: the target emits them itself.
    assert counts("..###..###", 3) == [
        ".##...##..",
        "##...##...",
        "#...##....",
    ]


def test_the_last_token_of_a_turn_is_predicted_and_none_beyond_it() -> None:
    assert counts("...##.....", 2) == ["..#.......", ".#........"]


def test_a_reply_of_one_token_leaves_nothing_to_predict() -> None:
    assert counts("...#...#..", 2) == [".........." for _ in range(2)]


def test_no_slot_predicts_across_a_document_end() -> None:
    #       document 0 | document 1
    assert counts("######" "######", 3, [0] * 6 + [1] * 6) == [
        "####.." "####..",
        "###..." "###...",
        "##...." "##....",
    ]  # fmt: skip


def test_documents_shorter_than_a_prediction_count_nothing() -> None:
    assert counts("##", 2) == ["..", ".."]
    assert counts("#", 1) == ["."]
    assert counts("####", 3, [0, 1, 2, 3]) == ["...."] * 3


@settings(max_examples=60, derandomize=True)
@given(st.integers(1, 3), st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_a_plan_computes_what_later_losses_need_and_nothing_else(steps, documents, data) -> None:
    learn = torch.tensor([int(x) for d in documents for x in d])
    docs = torch.tensor([i for i, d in enumerate(documents) for _ in d])
    counted = counted_slots(learn, docs, steps)
    dropped = torch.tensor(data.draw(st.lists(st.booleans(), min_size=counted.numel(), max_size=counted.numel())))
    used = counted & ~dropped.view_as(counted)
    plan = plan_slots(used, docs, query_block=data.draw(st.integers(1, 5)))

    for j in range(plan.steps):
        needed = [i for i in range(len(learn)) if used[j:, i].any()]
        assert plan.rows[j].tolist() == needed
        assert plan.scored_slots(j).tolist() == used[j].nonzero()[:, 0].tolist()
        assert plan.context[plan.context_of[j]].tolist() == needed
        if (keep := plan.keep[j]) is not None:
            assert plan.rows[j - 1][keep].tolist() == needed
        queries = [q for begin, end, _, _ in plan.blocks[j] for q in range(begin, end)]
        assert queries == list(range(len(needed)))
        for begin, end, first_key, last_key in plan.blocks[j]:
            slots, keys = plan.rows[j][begin:end], plan.context[first_key:last_key]
            assert len(set(docs[slots].tolist())) == 1
            own = [i for i in range(len(learn)) if docs[i] == docs[slots[0]] and i <= slots[-1]]
            assert keys.tolist() == own
    assert not used[plan.steps :].any()
    lasts = {
        d: max(i for i in range(len(learn)) if used[:, i].any() and docs[i] == d) for d in docs[used.any(0)].tolist()
    }
    assert plan.context.tolist() == [i for i in range(len(learn)) if i <= lasts.get(int(docs[i]), -1)]


def test_a_slot_without_loss_changes_nothing_but_through_its_step_0_key_and_value() -> None:
    """The states after the last counted slot of a document never reach the loss."""
    from drafter.loss import LossConfig
    from drafter.objective import Teacher, batch_loss, plan_work

    generator = torch.Generator().manual_seed(3)
    config = small_config()
    drafter, target = random_drafter(config, generator)
    doc = document(generator, 14, config)
    doc["learn"] = mask("....#####.....")
    teacher, loss = Teacher(target, drafter.draft_ids), LossConfig(out_of_vocab="renormalise")
    values = []
    for noise in (0.0, 5.0):
        doc["aux"] = doc["aux"].clone()
        doc["aux"][7:] += noise  # slot 6 is the last that predicts a token to learn
        row = pack([doc])
        work = plan_work(row, teacher, 2, loss)
        values.append(float(batch_loss(drafter, row, work, teacher, [1.0, 1.0], loss, torch.float64)[0].detach()))
    assert values[0] == values[1]
