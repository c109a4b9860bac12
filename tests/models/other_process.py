"""The second process: restores what the first one saved, goes on, and reports what the model then said.

python -m models.other_process FOLDER, where jobs.json and the store are; leaves report.json and logits.safetensors.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import mlx.core as mx

from blockstore import Store
from models.conversation import FURTHER_TOKENS, Conversation, identity_of
from models.families import FAMILIES


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    report: dict[str, Any] = {}
    logits: dict[str, mx.array] = {}
    with Store(folder / "store", create=False) as store:
        for name, prompts in jobs.items():
            try:
                report[name], found = converse(store, name, prompts)
                logits |= found
            except Exception:  # one family's failure is that family's, and the report carries it to its tests
                report[name] = {"error": traceback.format_exc()}
    mx.save_safetensors(str(folder / "logits.safetensors"), logits)
    (folder / "report.json").write_text(json.dumps(report))


def converse(store: Store, name: str, prompts: dict[str, list[int]]) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Go on behind the longest stored prefix of each prompt: what was restored, and the logits of what was new."""
    family = FAMILIES[name]
    model = family.build()
    facts, logits = {}, {}
    for title, prompt in prompts.items():
        loaded = store.restore(prompt, identity_of(name), family.make_caches(model))
        assert loaded is not None, f"nothing stored serves {title}"
        facts[title] = {"tokens": loaded.tokens, "classes": [type(cache).__name__ for cache in loaded.caches]}
        talk = Conversation(family, model, loaded.caches, list(loaded.tokens))
        talk.feed(prompt[loaded.token_count :])
        talk.answer(FURTHER_TOKENS)
        logits[f"{name}/{title}"] = talk.logits_since(0)
    return facts, logits


if __name__ == "__main__":
    main(Path(sys.argv[1]))
