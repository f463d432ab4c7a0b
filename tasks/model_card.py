"""The model card of a drafter, written from the run that made it."""

from typing import Any

from tasks.job import Job


def model_card(job: Job, lineage: dict[str, Any]) -> str:
    """README.md of the drafter's folder: what it is for, how good it is, how to serve it, where it comes from."""
    f, recipe = job.figures, job.recipe
    steps = recipe.evaluate.num_steps
    served = f.get("served_acceptance_length")
    lines = [
        "---",
        "library_name: sglang",
        "tags: [eagle3, speculative-decoding, drafter]",
        "---",
        "",
        f"# EAGLE-3 drafter for {job.target_name}",
        "",
        f"Made by Eyas, run `{job.run_id}`.",
        "",
        "| | |",
        "|-|-|",
        f"| served acceptance length ({steps} drafted tokens, top-k 1) | {_figure(served)} |",
        f"| predicted on the held-out split | {_figure(f['predicted_acceptance_length'])} |",
        f"| this drafter before training | {_figure(f.get('control_acceptance_length'))} |",
        f"| outputs equal to plain decoding | {f.get('served_outputs_equal', '-')} of {f.get('served_prompts', '-')} |",
        f"| trained on | {f['samples_valid'] - f['samples_held_out']} samples, {f['train_steps']} steps |",
        f"| captured blocks (outputs, from 0) | {', '.join(map(str, recipe.capture.blocks))} |",
        f"| draft vocabulary | {f['draft_vocab_size']} |",
        "",
        "Acceptance length = accepted drafted tokens per verification + 1, from SGLang's histogram, greedy.",
        *_sets(f.get("served_sets", {})),
        "",
        "## Serve it",
        "",
        "```",
        f"python -m sglang.launch_server --model-path <{job.target_name}> \\",
        "  --speculative-algorithm EAGLE3 --speculative-draft-model-path <this folder> \\",
        f"  --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}",
        "```",
        "",
        "## Where it comes from",
        "",
        f"Dataset `{lineage['dataset_uri']}`, manifest sha256 `{lineage['manifest_digest']}`; captured by SGLang "
        f"{f['sglang_version']}. Code {lineage['git_commit']}. The whole of it is in `lineage.json`.",
        "",
    ]
    return "\n".join(lines)


def _sets(sets: dict[str, dict[str, Any]]) -> list[str]:
    """A table, a row a prompt set."""
    if not sets:
        return []
    rows = [
        f"| {name} | {found['prompts']} | {found['acceptance_length']:.3f} | {found['speed_up']:.2f} |"
        for name, found in sets.items()
    ]
    return ["", "| prompt set | prompts | acceptance length | speed-up |", "|-|-|-|-|", *rows]


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
